"""Radii that change, in TRL's trainer: when, from what, logged how, and across a checkpoint."""

import json
from dataclasses import dataclass

import pytest
import torch

from helpers.frameworks import needs

needs("trl")

from test_trl import make

from bandpo import KL, Band, ClipRule, parse
from bandpo.core.schedules import ClipRateController, Radius
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks import multiplication
from processes import run_on_processes
from rlvet.runs.quantities import named_rows

# Two batches of four updates, each of which is logged.
TWO_BATCHES = {"max_steps": 8, "logging_strategy": "steps", "logging_steps": 1, "audit_steps": 0}


def trained(tmp_path, method, **settings):
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path, method=method, **TWO_BATCHES | settings)
    trainer.train()
    return trainer


def logged(trainer, *names):
    rows = [row for row in named_rows(trainer.state.log_history) if "loss" in row]
    return [[row.get(name) for row in rows] for name in names]


def test_a_number_is_logged_and_no_spread(tmp_path):
    radius, low, high = logged(trained(tmp_path, "Band(KL(), 0.05)"), "radius", "radius_min", "radius_max")
    assert radius == pytest.approx([0.05] * 8)
    assert low == high == [None] * 8


def test_schedules_move_between_batches(tmp_path):
    clip = "TwoSided(lower=Band(KL(), Linear(0.05, 0.01)), upper=Band(KL(), Linear(0.05, 0.08)))"
    trainer = trained(tmp_path, clip, max_steps=12, logging_steps=2)
    lower, upper, spread = logged(trainer, "radius/lower", "radius/upper", "radius_min/lower")
    thirds = [0.05, 0.05, 0.05 - 0.04 / 3, 0.05 - 0.04 / 3, 0.05 - 0.08 / 3, 0.05 - 0.08 / 3]
    assert lower == pytest.approx(thirds)
    assert upper == pytest.approx([0.05, 0.05, 0.06, 0.06, 0.07, 0.07])
    assert spread == [None] * 6
    radius = trainer.method.clip.lower.radius.resolve(trainer._generated.state)
    assert trainer.audited_method().clip.lower == Band(KL(), radius)


def test_the_spread_over_a_window_of_several_batches(tmp_path):
    names = ("radius", "radius_min", "radius_max")
    mean, low, high = logged(trained(tmp_path, "Band(KL(), Linear(0.04, 0.02))", logging_steps=8), *names)
    assert (low, high) == ([pytest.approx(0.03)], [pytest.approx(0.04)])
    assert 0.03 < mean[0] < 0.04


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Trained for a batch with a number for a radius."""
    return trained(tmp_path_factory.mktemp("plain"), "Band(KL(), 0.03)", max_steps=4)


@pytest.mark.parametrize("radius", ["Linear(0.03, 0.03)", "ClipRateController(1, 0.03, 0.1, 0.03, 0.03)"])
def test_a_constant_in_any_form_trains_to_the_same_weights(radius, plain, tmp_path):
    other = trained(tmp_path / "other", f"Band(KL(), {radius})", max_steps=4)
    for ours, theirs in zip(other.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@dataclass(frozen=True)
class ByPosition(Radius):
    """Wider at the start of a sequence."""

    needs = "position"
    per_token = True
    range = (0.01, 0.1)

    def resolve(self, state):
        return self if state.position is None else 0.01 + 0.09 / (1 + state.position)


@pytest.mark.slow
def test_radii_per_token_are_logged(tmp_path):
    trainer = trained(tmp_path, Band(KL(), ByPosition()), audit_steps=1)
    mean, low, high = logged(trainer, "radius", "radius_min", "radius_max")
    for a, b, c in zip(low, mean, high, strict=True):
        assert 0.01 <= a < b < c <= 0.1 + 1e-6
    used = logged(trainer, "audit/radius_used")[0]
    assert all(share > 0 for k, share in enumerate(used) if k % 4)
    trainer.evaluate(eval_dataset=multiplication.dataset("eval", 8))


@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
@pytest.mark.slow
def test_a_controller_acts_on_what_the_audit_shows_of_each_batch(tmp_path):
    rule = "Band(KL(), ClipRateController(0.2, 0.005, 0.5))"
    three_batches = {"max_steps": 12, "logging_steps": 4}
    audited = trained(tmp_path / "audited", rule, **three_batches, audit_steps=1)
    controller = parse(rule, ClipRule).radius
    radii, high, low = logged(audited, "radius", "audit/clip_high", "audit/clip_low")
    expected = controller.start
    for radius, rates in zip(radii, zip(high, low, strict=True), strict=True):
        assert radius == pytest.approx(expected, rel=1e-9)
        expected = controller.update(expected, sum(rates))
    assert len(set(radii)) == 3
    assert audited._controller_state == {repr(controller): pytest.approx(expected, rel=1e-6)}
    # Audited or not, it measures the same.
    for audit_steps in (0, 3):
        other = trained(tmp_path / str(audit_steps), rule, **three_batches, audit_steps=audit_steps)
        assert logged(other, "radius")[0] == pytest.approx(radii, rel=1e-9)


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
@pytest.mark.slow
def test_a_controller_goes_on_from_a_checkpoint(restore, tmp_path):
    settings = {
        "method": "Band(KL(), ClipRateController(0.2, 0.005, 0.5))",
        "max_steps": 12,
        "save_strategy": "steps",
        "save_steps": 4,
        "restore_callback_states_from_checkpoint": restore,
    }
    whole = trained(tmp_path / "whole", **settings)
    checkpoint = tmp_path / "whole" / "checkpoint-8"
    stored = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"][
        "ControllerState"
    ]
    assert stored["args"]["values"] != whole._controller_state
    cut = make(BandGRPOTrainer, BandGRPOConfig, tmp_path / "cut", **TWO_BATCHES | settings)
    cut.train(resume_from_checkpoint=str(checkpoint))
    assert cut._controller_state == whole._controller_state
    assert logged(cut, "radius") == logged(whole, "radius")
    for ours, theirs in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_a_checkpoint_of_a_stock_run_starts_the_controller(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 4}
    trained(tmp_path / "plain", "Band(KL(), 0.05)", max_steps=4, **settings)
    state = tmp_path / "plain" / "checkpoint-4" / "trainer_state.json"
    assert "ControllerState" not in json.loads(state.read_text())["stateful_callbacks"]
    settings |= TWO_BATCHES | {"method": Band(KL(), ClipRateController(0.2, 0.05))}
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path / "on", **settings)
    trainer.train(resume_from_checkpoint=str(state.parent))
    assert logged(trainer, "radius")[0][-4:] == pytest.approx([0.05] * 4)
    assert (tmp_path / "on" / "checkpoint-8").exists()


def test_a_batch_that_measures_nothing_leaves_the_radius(tmp_path, monkeypatch):
    monkeypatch.setattr(BandGRPOTrainer, "_reduce_metrics", lambda self, seen: {"tokens": 0.0})
    trainer = trained(tmp_path, "Band(KL(), ClipRateController(0.02, 0.05))")
    assert list(trainer._controller_state.values()) == [0.05]


TWO_PROCESSES = """
import json, sys
from pathlib import Path
from test_trl_radius import logged, trained

out = Path(sys.argv[1])
trainer = trained(out, "Band(KL(), ClipRateController(0.02, 0.05, 0.5))", max_steps=12)
rank = trainer.accelerator.process_index
rows = logged(trainer, "radius", "radius_min", "radius_max")
(out / f"{rank}.json").write_text(json.dumps({"rows": rows, "state": trainer._controller_state}))
"""


@pytest.mark.slow
def test_two_processes_agree(tmp_path):
    run_on_processes(TWO_PROCESSES, tmp_path)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert one == other
    assert len(set(one["rows"][0])) > 1
