"""The study: what its file may say, what follows from it, what is claimed, and one real run of it all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import product

import pytest
import yaml
from scipy import stats
from typer.testing import CliRunner

from bandpo_lab.cli.app import app
from bandpo_lab.errors import FileProblem
from bandpo_lab.files.validation import with_seal
from bandpo_lab.files.writing import locked
from bandpo_lab.study.collect import RunResult, batches_to_half
from bandpo_lab.study.execute import Execution, read_results
from bandpo_lab.study.jobs import run_in_processes
from bandpo_lab.study.plan import Study, parse_study, study_text
from bandpo_lab.study.report import sentence, study_page
from bandpo_lab.study.statistics import Results
from pages import ROOT, blocks

SMALL = """
title: small
question: does it?
primary: mean@2
stopping: a fixed number of steps
baseline: clip
arms:
  clip: {method: "FixedClip(0.2)"}
  band: {method: "Band(KL(), 0.05)"}
options: {learning_rate: 1.0}
experiments:
  main:
    question: which?
    seeds: [0, 1, 2]
    tune: {options: {learning_rate: [0.1, 0.2]}, seeds: [10]}
  after:
    question: there too?
    seeds: [0]
    arms: [band]
    tuned_in: main
    options: {max_steps: 4}
"""


def record(
    arm: str, seed: int, score: float, *, experiment: str = "main", tuning=None, rewards=(0.0,)
) -> RunResult:
    names = ("entropy", "clip_high", "clip_low", "rare_wins", "rare_blocked")
    curves = dict.fromkeys(names, [0.1] * len(rewards))
    return RunResult(
        experiment, arm, seed, tuning, 1.0, {}, {"mean@2": score, "pass@2": score},
        {"reward": list(rewards), **curves}, {"above_0.1": (10, 0.5)},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["quick", str(ROOT / "research/studies/pretrained.yaml")])
def test_shipped_studies_are_accepted(name):
    study = parse_study(study_text(name))
    assert study.baseline in study.arms


def test_the_study_of_the_documentation_is_one():
    [block] = blocks(ROOT / "docs" / "write-your-own.md", "yaml")
    study = parse_study(block.text)
    assert len(study.tuning_runs()) == 2 * 2 * 2
    assert study.experiments["long batches"].tuned_in == "main"


def test_runs_that_follow_from_a_file():
    study = parse_study(SMALL)
    searches = study.tuning_runs()
    assert [(r.arm, r.seed, r.options["learning_rate"]) for r in searches] == [
        ("clip", 10, 0.1), ("band", 10, 0.1), ("clip", 10, 0.2), ("band", 10, 0.2)
    ]  # fmt: skip
    chosen = {("main", "clip"): {"learning_rate": 0.1}, ("main", "band"): {"learning_rate": 0.2}}
    runs = study.reported(chosen)
    assert len(runs) == 2 * 3 + 1
    assert {r.options["learning_rate"] for r in runs if r.arm == "clip"} == {0.1}
    [last] = [r for r in runs if r.experiment != "main"]
    assert (last.arm, last.options["learning_rate"], last.options["max_steps"]) == ("band", 0.2, 4)
    folders = [r.folder for r in [*searches, *runs]]
    assert len(set(folders)) == len(folders)
    assert all(not folder.is_absolute() and ".." not in folder.parts for folder in folders)


def one(**options):
    """A change of SMALL: this experiment alone."""
    return {"experiments": {"m": {"question": "?", "seeds": [0], **options}}}


def study_with(change: dict) -> Study:
    return parse_study(yaml.safe_dump(yaml.safe_load(SMALL) | change, sort_keys=False))


def test_a_sweep_is_an_experiment_at_each_point():
    swept = one(seeds=[0, 1], sweep={"learning_rate": [0.1, 0.2]}, options={"max_steps": 4})
    study = study_with(swept)
    low, high = study.experiments.values()
    assert low.name == "m, learning_rate 0.1"
    assert high.options == {"max_steps": 4, "learning_rate": 0.2}
    runs = study.reported({})
    assert [(r.seed, r.options["learning_rate"]) for r in runs[::2]] == [*product([0, 1], [0.1, 0.2])]
    assert len({r.folder for r in runs}) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"baseline": "clap"}, "baseline 'clap' is none of the arms clip, band"),
        ({"arms": {"clip": {}}}, "arm 'clip' names no method"),
        (
            {"arms": {"clip": {"method": "Band()", "objective": "DropOutside(20)"}}},
            "write one method of both",
        ),
        ({"experiments": {}}, "the study: experiments: Value should have at least 1 item"),
        ({"options": {"seed": 3}}, "options may not set seed"),
        ({"questions": "?"}, "the study: unknown key 'questions'; did you mean question?"),
        (one(seeds="0-7"), "m.seeds: 'str' instances are not allowed as a Sequence value, got '0-7'"),
        (one(sedes=1), "m: unknown key 'sedes'; did you mean seeds?"),
        (one(arms=["bond"]), "unknown arms bond"),
        (one(tuned_in="x"), "no experiment that tunes"),
        (one(tune={"options": {}, "seeds": [0]}), "tuned on and reported on"),
        (one(sweep={"max_steps": [1]}, tune={"options": {}, "seeds": [1]}), "so leave the tuning out"),
    ],
)
def test_a_study_that_cannot_work_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        study_with(change)


def test_a_study_with_a_misspelt_method_does_not_begin():
    study = study_with({"arms": {"clip": {"method": "FixdClip(0.2)"}, "band": {"method": "Band()"}}})
    with pytest.raises(ValueError, match=r"arm 'clip': in 'FixdClip.*did you mean FixedClip\?"):
        study.check_methods()


@pytest.mark.parametrize(
    "arm", ["evil_study.Rule()", "evil_study.__doc__()", "Band(evil_study.__init__(), 1)"]
)
def test_a_report_imports_nothing_that_the_results_name(arm, tmp_path, monkeypatch):
    (tmp_path / "evil_study.py").write_text("open('ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    change = {"arms": {"clip": {"method": arm}, "band": {"method": arm}}, **one(seeds=[0, 1, 2])}
    text = yaml.safe_dump(yaml.safe_load(SMALL) | change, sort_keys=False)
    runs = [vars(record(name, seed, 0.5, experiment="m")) for name in ("clip", "band") for seed in range(3)]
    results = {"study": text, "chosen": [], "failed": [], "versions": {}, "commit": "", "unfinished": False}
    (tmp_path / "results.json").write_text(json.dumps(with_seal({**results, "runs": runs})))
    result = CliRunner().invoke(app, ["study", "page", "."])
    assert not (tmp_path / "ran").exists()
    assert "evil_study" not in sys.modules
    assert result.exit_code == 0, result.output


def study_on(*experiments: str) -> Study:
    """SMALL with these experiments, of three seeds."""
    return study_with({"experiments": {name: {"question": "?", "seeds": [0, 1, 2]} for name in experiments}})


def of_scores(scores: dict[str, list[float]], experiment: str = "main") -> list[RunResult]:
    """A run for each arm and seed."""
    each = ((arm, *one) for arm, of_arm in scores.items() for one in enumerate(of_arm))
    return [record(*one, experiment=experiment) for one in each]


def test_differences_are_paired_and_corrected_for_all_comparisons_of_the_study():
    scores = {"clip": [0.1, 0.5, 0.9], "band": [0.3, 0.71, 1.1]}
    spoilt = scores | {"band": [0.3, 0.71, 0.5]}
    found = Results(study_on("main", "sweep"), of_scores(scores) + of_scores(spoilt, "sweep"))
    main, sweep = found.differences("mean@2")
    assert main.interval.value == pytest.approx(0.61 / 3, abs=1e-4)
    assert main.p == pytest.approx(2 * stats.ttest_rel(scores["band"], scores["clip"]).pvalue)
    assert (main.experiment, main.arm, main.claimed) == ("main", "band", True)
    assert not sweep.claimed
    equal = of_scores(dict.fromkeys(("clip", "band"), [0.5] * 3))
    [same] = Results(study_with({}), equal).differences("mean@2")
    assert (same.interval.value, same.p, same.claimed) == (0.0, 1.0, False)


def test_what_decides_has_a_p_value_and_what_was_not_announced_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "bandpo_lab.output.page.save_figure", lambda figure, path: None
    )  # the text is what counts
    text = study_page(results(differ=True)).save(tmp_path / "report.md")[0].read_text()
    assert "| minus clip | mean@2 | p | AUC |" in text
    by_auc = results(differ=True)
    by_auc |= {"study": by_auc["study"].replace("primary: mean@2", "primary: AUC")}
    decided = study_page(by_auc).save(tmp_path / "auc.md")[0].read_text()
    assert "| minus clip | AUC | p |\n" in decided
    assert "not announced" not in decided


def test_each_arm_takes_the_value_that_was_best_on_its_tuning_seeds():
    scores = {("clip", 0.1): 0.7, ("clip", 0.2): 0.6, ("band", 0.1): 0.1, ("band", 0.2): 0.2}
    runs = [record(arm, 10, score, tuning={"learning_rate": rate}) for (arm, rate), score in scores.items()]
    runs.append(record("clip", 0, 0.99))  # a reported run has no say
    assert Results(parse_study(SMALL), runs).tuned_values == {
        ("main", "clip"): {"learning_rate": 0.1}, ("main", "band"): {"learning_rate": 0.2}
    }  # fmt: skip
    with pytest.raises(ValueError, match="all tuning runs of 'band' failed"):
        _ = Results(parse_study(SMALL), [r for r in runs if r.arm == "clip"]).tuned_values


def test_of_batches_to_half_the_fewest_are_taken():
    assert batches_to_half(record("clip", 0, 0.0, rewards=[0.9, 0.0, 0.6, 0.2, 0.7, 0.9])) == 3
    assert batches_to_half(record("clip", 0, 0.0, rewards=[0.0, 0.4, 0.5, 0.6, 0.9])) == 4
    assert batches_to_half(record("clip", 0, 0.0, rewards=[0.1, 0.2])) == 3  # never: one more than there were
    study = parse_study(SMALL).model_copy(update={"primary": "batches to half"})
    slow, fast = [0.0] * 5 + [0.6] * 3, [0.6] * 8
    runs = [
        record(arm, 10, 0.0, tuning={"learning_rate": rate}, rewards=rewards)
        for arm in ("clip", "band")
        for rate, rewards in ((0.1, slow), (0.2, fast))
    ]
    assert set(map(str, Results(study, runs).tuned_values.values())) == {"{'learning_rate': 0.2}"}


def results(*, differ: bool) -> dict:
    band = [0.6, 0.62, 0.62] if differ else [0.3, 0.32, 0.32]
    records = of_scores({"clip": [0.3, 0.31, 0.32], "band": band})
    for arm, rate in product(("clip", "band"), (0.1, 0.2)):
        records.append(record(arm, 10, 0.5, tuning={"learning_rate": rate}))
    return {
        "study": SMALL, "versions": {"python": "3"}, "commit": None, "failed": ["after: band, seed 0"],
        "runs": [vars(r) for r in records],
    }  # fmt: skip


def said_of(found: Results, name: str) -> str:
    return sentence(found, found.study.experiments[name], found.differences(found.study.primary))


def test_what_is_claimed_and_what_is_not():
    tie, claim = (said_of(Results.from_file(results(differ=differ)), "main") for differ in (False, True))
    assert tie.startswith("clip ends at mean@2 0.310. Left open, shown neither to differ nor to tie: band.")
    assert "reach from -0.011 to +0.018" in tie
    assert claim == "clip ends at mean@2 0.310. Different from it: band +0.303 [+0.289, +0.318]."


def test_a_report_tells_terms_numbers_failures_and_is_whole(tmp_path):
    page = study_page(results(differ=True))
    terms = ("does it?", "a fixed number of steps", "FixedClip(0.2)")
    wanted = (*terms, "0.310 [", "never (0/3)", "At learning_rate", "after: band, seed 0", "←")
    [html], [markdown, *pictures] = page.save(tmp_path / "report.html"), page.save(tmp_path / "report.md")
    assert [text for text in wanted if text not in markdown.read_text()] == []
    assert len(pictures) == 3
    assert all(f"]({file.name})" in markdown.read_text() for file in pictures)
    text = html.read_text()
    assert [one for one in wanted if one not in text] == []
    assert not re.search(r'(?:src|href)="(?!#|data:image/svg)', text)  # nothing is loaded from elsewhere
    assert text.count('<img src="data:image/svg+xml;base64,') == 3
    assert "prefers-color-scheme: dark" in text
    ids = [part.split('"')[0] for part in text.split(' id="')[1:]]
    assert len(ids) == len(set(ids))


def test_a_study_that_was_interrupted_has_a_report_too(tmp_path, monkeypatch):
    """Of the runs that have ended; what has none says so."""
    monkeypatch.setattr(
        "bandpo_lab.output.page.save_figure", lambda figure, path: None
    )  # the text is what counts
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "study.yaml").write_text(SMALL)
    command = ["study", "page", str(folder), "--output", str(tmp_path / "report.md")]
    runs = results(differ=True)["runs"]
    nothing = CliRunner().invoke(app, command)
    assert "none of its runs has ended yet" in str(nothing.exception)
    so_far = results(differ=True) | {"runs": runs[:4] + runs[6:], "unfinished": True}
    (folder / "results.json").write_text(json.dumps(with_seal(so_far)))
    assert CliRunner().invoke(app, command).exit_code == 0
    text = (tmp_path / "report.md").read_text()
    assert "This study has not ended: 8 runs have so far." in text
    assert "after: no run has ended." in text
    assert "No run failed" not in text


def execution(folder, said: list[str], **options) -> Execution:
    """Of a small study, with a list of what it says."""
    text = yaml.safe_dump(
        {
            "title": "t", "question": "q", "primary": "mean@2", "stopping": "s", "baseline": "clip",
            "arms": {"clip": {"method": "FixedClip(0.2)"}, "band": {"method": "Band(KL(), 0.05)"}},
            "options": {
                "dataset_name": "multiplication", "model_name_or_path": "multiplication",
                "reward_funcs": ["bandpo_lab.tasks.multiplication.reward"], "threads": 1, "use_cpu": True,
                "bf16": False, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
                "steps_per_generation": 1, "num_iterations": 1, "num_generations": 4, "max_completion_length": 6,
                "max_steps": 2, "logging_steps": 1, "accept_idle_clip": True,
                "report_to": "none", "save_strategy": "no", "eval_prompts": 2, "eval_samples": 2,
                **options,
            },
            "experiments": {"control": {"question": "the same?", "seeds": [0]}},
        },
        sort_keys=False,
    )  # fmt: skip
    return Execution(parse_study(text), text, folder, partial(run_in_processes, workers=1), say=said.append)


def test_a_study_file_needs_no_subcommand(tmp_path):
    for words in ([], ["run"], ["--workers", "2"]):
        result = CliRunner().invoke(app, ["study", *words, "nowhere.yaml"])
        assert "nowhere.yaml does not exist" in str(result.exception)


@pytest.mark.slow
def test_settings_that_bandpo_train_refuses_are_named_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match=r"control: clip, seed 0.*num_iteration"):
        execution(tmp_path / "out", [], num_iteration=2)()
    assert not list((tmp_path / "out").rglob("*.log"))


def test_a_folder_takes_one_study_at_a_time_and_no_other(tmp_path):
    with locked(tmp_path), pytest.raises(FileProblem, match="another process is writing"):
        execution(tmp_path, [])()
    assert not (tmp_path / "study.yaml").exists()
    (tmp_path / "study.yaml").write_text("another")
    with pytest.raises(ValueError, match="choose another --output_dir"):
        execution(tmp_path, [])()


@pytest.mark.slow
def test_a_study_runs_and_resumes(tmp_path):
    said: list[str] = []
    run = execution(tmp_path / "out", said)
    first = run()
    assert first["failed"] == []
    assert len(first["runs"]) == 2
    assert all(0 <= r["after"]["mean@2"] <= 1 for r in first["runs"])
    assert len([line for line in said if "control: " in line]) == 2
    said.clear()
    shutil.rmtree(tmp_path / "out" / "runs")
    assert run() == first  # nothing is run again: the results are enough
    assert said == ["2 of 2 runs were done before"]
    assert read_results(tmp_path / "out") == json.loads(json.dumps(first))


@pytest.mark.exhaustive
def test_failures_are_isolated_reported_and_tried_again(tmp_path):
    # A missing folder would be named before any run; this one holds no model.
    (tmp_path / "model").mkdir()
    said: list[str] = []
    with pytest.raises(ValueError, match="every run has failed"):
        execution(tmp_path / "out", said, model_name_or_path=str(tmp_path / "model"))()
    assert sum("FAILED" in line for line in said) == 2


def test_results_of_which_a_byte_has_changed_are_refused(tmp_path):
    written = json.loads(json.dumps(results(differ=True)))
    content = json.dumps(with_seal(written))
    file = tmp_path / "results.json"
    file.write_text(content)
    assert read_results(tmp_path) == written
    for change in (content.replace("0.5", "0.6", 1), content.replace('"sha256"', '"sha257"'), content[:-1]):
        assert change != content
        file.write_text(change)
        with pytest.raises(ValueError, match=r"results\.json (has changed since|cannot be read)"):
            read_results(tmp_path)


INTERRUPTED_CALLS = """
import os, signal, sys, time
from functools import partial
from bandpo_lab.study.jobs import run_in_processes

def call(folder, name):
    open(os.path.join(folder, name), "w").close()
    time.sleep(60)

if __name__ == "__main__":
    # A background job of a shell ignores Ctrl-C, and so would these tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        calls = [partial(call, sys.argv[1], name) for name in "ab"]
        print(*run_in_processes(calls, 2, preload=()))
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.slow
def test_after_an_interrupt_no_process_prints_a_traceback(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED_CALLS)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not ((tmp_path / "a").exists() and (tmp_path / "b").exists()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (output, errors) == ("interrupted\n", "")
