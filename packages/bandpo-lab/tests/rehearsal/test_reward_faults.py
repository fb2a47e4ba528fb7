"""A training of unmodified verl on Ray whose reward function fails in one way after another, and which then resumes.

Each fault is said with the function and the step, nothing recorded is lost, and `rlvet diagnose` reads the record.
"""

import re
import subprocess
import sys

import psutil
import pytest

from helpers.frameworks import needs

needs("verl")

from test_rehearsal import RECIPE, folder  # noqa: F401 - a fixture

from bandpo_lab.cluster.modes import entry_point
from bandpo_lab.rehearsal import files, run
from bandpo_lab.rehearsal.inputs import RIGHT_ANSWER
from bandpo_lab.rehearsal.processes import Forks
from bandpo_lab.rehearsal.shrink import PROMPTS, SAMPLES, changes, compose
from bandpo_lab.rehearsal.stages import _write_inputs
from rlvet.records.record import read_record

ANSWERS = PROMPTS * SAMPLES
"""The number of answers of a step."""
GRADER = """
import math, os
from pathlib import Path

FAULTS = [lambda: {{}}["answer"], lambda: "right", lambda: {{"acc": 1.0}}, lambda: math.nan, lambda: os._exit(3)]
calls = 0

def grade(data_source, solution_str, ground_truth, extra_info, **_):
    # The first answer of each step but the first one fails.
    global calls
    step, is_first = 1 + calls // {answers}, calls % {answers} == 0
    calls += 1
    if is_first and step > 1 and not Path("{mended}").exists():
        return FAULTS[step - 2]()
    return float(str(ground_truth) in solution_str) + 0.01 * (len(solution_str) % 7)
"""
LEFT_OUT = "verl leaves them out"
SAID = [
    f"raised KeyError: 'answer' for 1 answer of step 2: {LEFT_OUT}",
    f"returned 'right' in place of a number for 1 answer of step 3: {LEFT_OUT}",
    f"returned a dictionary without the entry 'score' for 1 answer of step 4: {LEFT_OUT}",
    "returned nan for 1 answer of step 5: the advantages of their groups are not finite",
]
"""What is said of the faults that do not end the run."""


def steps_of(record):
    """Return the steps of a record, of which rows that the driver does not know have none."""
    return {batch.step for batch in read_record(record)} - {None}


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)  # two trainings
@pytest.mark.filterwarnings("ignore:Ray state API:DeprecationWarning")  # verl's, on importing its rollout
@pytest.mark.filterwarnings("ignore:.*sequences with values that cannot be right")  # those of step 5
def test_a_reward_function_that_fails_is_named_and_the_run_goes_on(folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(run, "FATAL", re.compile("(?!)"))  # a rehearsal would stop at the first failed answer
    grader, mended = tmp_path / "grader.py", tmp_path / "mended"
    grader.write_text(GRADER.format(answers=ANSWERS, mended=mended))
    recipe = [
        *RECIPE,
        f"+actor_rollout_ref.actor.policy_loss.record={folder}/tokens",
        # An update on advantages that are NaN is left out, and does not end the run.
        "+actor_rollout_ref.actor.policy_loss.certify=warn",
        f"reward.custom_reward_function.path={grader}",
        "reward.custom_reward_function.name=grade",
    ]
    config = compose(recipe, None, "ppo_trainer")
    settings = [change.override for change in changes(config, folder, steps=6)]
    settings += ["++trainer.save_freq=1", "++trainer.test_freq=-1", "++actor_rollout_ref.actor.optim.lr=1e-3"]
    command = [*entry_point("sync").command(None), *recipe, *settings]
    with Forks(folder, run.environment(folder)) as forks:
        _write_inputs(config, folder, 6, RIGHT_ANSWER)
        run.train(forks, command, folder, "first", timeout=600)
        text = (folder / files.LOG.format("first")).read_text()
        function = f"the reward function grade of {grader}"
        for sentence in SAID:
            assert text.count(f"BandWarning: {function} {sentence} (later ones of this kind") == 1, sentence
        note = (
            f"bandpo: {function} ended its process (os._exit, or killed, as for want of memory) for {ANSWERS} answers "
            f"of step 6: {LEFT_OUT}, starts no process in its place, and asks it for later answers too; "
            "sync_refill_failed_groups=true would ask the same function again"
        )
        assert text.rstrip().splitlines()[-1] == note

        assert steps_of(folder / "tokens") == {1, 2, 3, 4, 5}
        read = [sys.executable, "-m", "rlvet", "diagnose"]
        of_log = subprocess.run(
            [*read, str(folder / files.METRICS.format("first"))], capture_output=True, text=True, check=False
        )
        line = r"nan: 1 of \d log steps hold NaN or infinite values, first step 5, the reward among them"
        assert re.search(line, of_log.stdout), of_log.stdout
        of_record = subprocess.run(
            [*read, str(folder / "tokens")], capture_output=True, text=True, check=False
        )
        assert of_record.returncode == 1, of_record
        assert re.search(r"^\d\. nan \(stop\)", of_record.stdout, re.M), of_record.stdout

        mended.touch()
        run.train(forks, command, folder, "resumed", timeout=600)
        assert steps_of(folder / "tokens") == {1, 2, 3, 4, 5, 6}
        assert f"{function} " not in (folder / files.LOG.format("resumed")).read_text()
    left = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in left if str(folder) in " ".join(words)]
