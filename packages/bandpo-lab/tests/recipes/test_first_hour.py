"""The first hour with a card: its plan, its page, what it makes of a training's log, and the trainings on a CPU."""

import json
import math
import sys

import pytest

from helpers.frameworks import needs

needs("verl")

import first_hour
from bandpo_lab.cli.recipes import SHIPPED
from first_hour import METHODS, SEEDS, comparison_rows, fault, plan
from pages import ROOT
from stages import Stage, plan_rows
from stages import run_stages as run_with_table


def run_stages(stages, output):
    return run_with_table(stages, output, comparison_rows)


@pytest.fixture
def stages(tmp_path):
    return plan(tmp_path / "data", tmp_path / "runs")


def test_the_page_has_the_plan():
    page = (ROOT / "research/reports/recipes.md").read_text()
    rows = plan_rows(plan(ROOT / "data", ROOT / "runs/first-hour"))
    assert "\n".join(rows) in page, "python scripts/first_hour.py --page writes the table"


def test_the_plan_fits_into_an_hour_and_is_printed(stages, capsys):
    assert [stage.name for stage in stages[:4]] == ["preflight", "gpu-check", "setup", "data"]
    assert len(stages) == 4 + len(METHODS) * len(SEEDS)
    assert sum(stage.seconds for stage in stages) < 62 * 60
    assert first_hour.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("-m bandpo_lab run verl") == 8
    with pytest.raises(SystemExit):
        first_hour.main(["--without", "nothing"])


@pytest.mark.slow
def test_verl_accepts_each_training_and_it_is_the_rule_that_its_name_says(stages):
    from test_flow import told

    from bandpo_lab.rehearsal.preflight import validate
    from bandpo_lab.rehearsal.shrink import compose

    names = {"grpo": "clip=FixedClip(low=0.2, high=0.2)", "clip-0.8-2": "clip=FixedClip(low=0.2, high=1.0)"}
    names |= {"band-above": "BandAbove(", "bandpo": "BandPO("}
    for stage in stages[4:]:
        overrides = told(list(stage.command[3:]))
        config = compose(overrides[overrides.index("--config-dir") + 2 :], SHIPPED, "ppo_trainer")
        check = validate(config)
        assert check.ok, check.detail
        rule, _, seed = stage.name.rpartition("-")
        assert names[rule] in config.bandpo.run.loss
        assert config.bandpo.run.average.startswith("seq-mean-token-mean")
        assert config.bandpo.run.updates.startswith("4 for each batch of 16 × 8 responses")
        assert {config.data.seed, config.actor_rollout_ref.rollout.seed} == {int(seed)}
        assert config.trainer.n_gpus_per_node == 1


SOUND = {
    "actor/grad_norm": 0.3,
    "critic/score/mean": 0.4,
    "training/rollout_probs_diff_mean": 0.002,
    "timing_s/step": 20.0,
    "timing_s/gen": 8.0,
    "timing_s/update_actor": 9.0,
    "actor/clip_high": 0.01,
}


def training(**changes):
    """Eight steps, of which the last has changed metrics, or all if the name begins with `all_`."""
    found = {step: dict(SOUND) for step in range(1, 9)}
    for name, value in changes.items():
        for step in found if name.startswith("all_") else (8,):
            key = next(key for key in SOUND if key.endswith(name.removeprefix("all_")))
            found[step][key] = value
    return found


def test_a_sound_training_has_no_fault():
    assert fault(training(), 8, 19.0) is None
    # A step may have no right answer, and the first may compile.
    assert fault(training(mean=0.002, grad_norm=0.0) | {1: SOUND | {"timing_s/step": 300.0}}, 8, 19.0) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, "step 1 was not made"),
        (dict.fromkeys(range(1, 6), SOUND), "step 6 was not made"),
        (training(grad_norm=math.nan), "gradient of step 8 is nan"),
        (training(grad_norm=math.inf), "gradient of step 8 is inf"),
        (training(all_grad_norm=0.0), "every gradient is 0"),
        ({step: SOUND | {"critic/score/mean": 0.0} for step in range(1, 9)}, "no answer was right"),
        (training(rollout_probs_diff_mean=0.2), "new weights do not reach it"),
        (training(rollout_probs_diff_mean=math.nan), "new weights do not reach it"),
        (training(all_rollout_probs_diff_mean=math.nan), "new weights do not reach it"),
        (
            {step: SOUND | {"timing_s/step": 90.0, "timing_s/gen": 70.0} for step in range(1, 9)},
            "most of it gen",
        ),
    ],
)
def test_a_fault_is_named_with_what_to_do(found, words):
    assert words in fault(found, 8, 19.0)


def stage(name, code, check=None):
    return Stage(name, (sys.executable, "-c", code), 1, "something", "do this", check)


def test_it_stops_at_a_failure_and_goes_on_behind_what_passed(tmp_path, capsys):
    line = " - ".join(f"{name}:{value}" for name, value in SOUND.items())
    lines = "\\n".join(f"step:{step} - {line}" for step in range(1, 9))
    good = stage("good-0", f"print('{lines}')", lambda found: fault(found, 8, 19.0))
    bad = stage("bad-0", "print('hello'); raise SystemExit(3)")
    after = stage("after-0", f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert run_stages([good, bad, after], tmp_path) == 1
    printed = capsys.readouterr().out
    assert "bad-0: FAILED" in printed
    assert "it ended with 3\n  do this" in printed
    assert not (tmp_path / "ran").exists()
    mended = stage("bad-0", "print('hello')")
    assert run_stages([good, mended, after], tmp_path) == 0
    printed = capsys.readouterr().out
    assert "good-0: passed before" in printed
    assert "| good-0 | 20 | 0.4 |  | 0.01 |  |  |" in printed
    assert (tmp_path / "ran").exists()
    assert set(json.loads((tmp_path / "passed.json").read_text())) == {"good-0", "bad-0", "after-0"}


def test_a_training_that_ends_well_without_its_steps_fails(tmp_path, capsys):
    silent = stage("silent-0", "print('done')", lambda found: fault(found, 8, 19.0))
    assert run_stages([silent], tmp_path) == 1
    assert "step 1 was not made" in capsys.readouterr().out


def test_the_table_at_the_end_has_a_row_for_each_training():
    rows = comparison_rows({"grpo-0": training(), "bandpo-0": {1: {"actor/entropy": 0.5}}})
    assert rows[2].startswith("| grpo-0 | 20 | 0.4 |")
    assert rows[3] == "| bandpo-0 |  |  | 0.5 |  |  |  |"


@pytest.mark.exhaustive
@pytest.mark.parametrize("k", range(len(METHODS)))
def test_a_training_of_each_rule_passes_on_a_cpu(k, tmp_path_factory):
    folder = tmp_path_factory.mktemp("h")
    stages = plan(folder / "data", folder / "runs", rehearse=True)
    assert len(stages) == len(METHODS) * len(SEEDS)
    assert run_stages([stages[k]], folder / "logs") == 0, (folder / f"logs/{stages[k].name}.log").read_text()
