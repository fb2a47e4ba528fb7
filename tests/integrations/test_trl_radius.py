"""Radii that change, in TRL's trainer: when, from what, logged how, and across a checkpoint."""

import json

import pytest
import torch
from test_trl import make

from bandpo import KL, Band, ClipRule, parse
from bandpo.audit.logs import named_rows
from bandpo.integrations.trl import OLD_ENTROPIES, BandGRPOConfig, BandGRPOTrainer
from bandpo.radius import HoldClipRate
from bandpo_lab.tasks import multiplication
from two_processes import run_on_two_processes

# Two batches of four updates, each of which is logged.
TWO_BATCHES = {"max_steps": 8, "logging_strategy": "steps", "logging_steps": 1, "audit_steps": 0}


def trained(tmp_path, clip, **settings):
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path, clip=clip, **TWO_BATCHES | settings)
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
    radius = trainer.method.clip.lower.radius.resolve(trainer._batch.state)
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


@pytest.mark.parametrize(
    "radius", ["Linear(0.03, 0.03)", "ByEntropy(0.03, 0.03)", "HoldKL(1, 0.03, 0.1, 0.03, 0.03)"]
)
def test_a_constant_in_any_form_trains_to_the_same_weights(radius, plain, tmp_path):
    other = trained(tmp_path / "other", f"Band(KL(), {radius})", max_steps=4)
    for ours, theirs in zip(other.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_entropies_are_the_old_policys_token_by_token(level, tmp_path, monkeypatch):
    """At a batch's first loss the current policy is the old one, and a reference model is another."""
    seen, original = [], BandGRPOTrainer._see

    def see(self, inputs, logp, entropy):
        bounds = self.method.tokens(self._batch_of(inputs, logp, entropy)).bounds
        seen.append((dict(inputs), entropy.clone(), logp.clone(), *bounds))
        original(self, inputs, logp, entropy)

    monkeypatch.setattr(BandGRPOTrainer, "_see", see)
    clip = "Band(KL(), ByEntropy(0.01, 0.1))"
    trained(tmp_path, clip, beta=0.1, importance_sampling_level=level)
    assert len(seen) == 8
    for k, (inputs, entropy, logp, lower, upper) in enumerate(seen):
        mask = inputs["completion_mask"] != 0
        assert inputs[OLD_ENTROPIES].shape == mask.shape
        first = k % 4 == 0
        same = torch.allclose(inputs[OLD_ENTROPIES][mask], entropy[mask], rtol=1e-4, atol=1e-5)
        assert same == first
        assert torch.allclose(inputs["old_per_token_logps"][mask], logp[mask], atol=1e-4) == first
        old, entropies = (inputs[x].masked_fill(~mask, 0.0) for x in ("old_per_token_logps", OLD_ENTROPIES))
        if level == "sequence":
            old, entropies = (x.sum(1, keepdim=True) / mask.sum(1, keepdim=True) for x in (old, entropies))
        bounds = Band(KL(), 0.1 - 0.09 * (-entropies).exp()).bounds(old)
        torch.testing.assert_close(lower[mask], bounds.lower.expand_as(mask)[mask])
        torch.testing.assert_close(upper[mask], bounds.upper.expand_as(mask)[mask])
    ref = seen[4][0]["ref_per_token_logps"]
    assert not torch.allclose(ref, seen[4][0]["old_per_token_logps"], atol=1e-3)


@pytest.mark.parametrize("radius", ["ByEntropy(0.01, 0.1)"])
@pytest.mark.slow
def test_per_token_radii_are_logged(radius, tmp_path):
    trainer = trained(tmp_path, f"Band(KL(), {radius})", audit_steps=1)
    mean, low, high = logged(trainer, "radius", "radius_min", "radius_max")
    for a, b, c in zip(low, mean, high, strict=True):
        assert 0.01 <= a < b < c <= 0.1
    assert len(set(mean)) > 1
    used = logged(trainer, "audit/radius_used")[0]
    assert all(share > 0 for k, share in enumerate(used) if k % 4)
    trainer.evaluate(eval_dataset=multiplication.dataset("eval", 8))


@pytest.mark.filterwarnings("ignore:each batch is used for one")
def test_entropies_without_an_old_policy(tmp_path):
    """One update per batch: TRL computes no old log-probabilities, and the current policy is the old one."""
    settings = {"steps_per_generation": 1, "num_iterations": 1, "max_steps": 2, "beta": 0.1}
    trainer = trained(tmp_path, "Band(KL(), ByEntropy(0.01, 0.1))", **settings)
    low, high = logged(trainer, "radius_min", "radius_max")
    assert all(0.01 <= a < b <= 0.1 for a, b in zip(low, high, strict=True))


@pytest.mark.parametrize(
    ("hold", "measured", "otherwise_audited"),
    [
        ("HoldClipRate(0.2, 0.005, 0.5)", ("audit/clip_high", "audit/clip_low"), (0, 3)),
        ("HoldKL(0.02, 0.05, 0.5)", ("audit/approx_kl",), (0,)),
        ("HoldEntropy(0.5, 0.05, 0.5)", ("audit/entropy",), (0,)),
    ],
)
@pytest.mark.filterwarnings("ignore::bandpo.audit.watch.BandWarning")
@pytest.mark.slow
def test_controllers_act_on_what_the_audit_shows_of_each_batch(hold, measured, otherwise_audited, tmp_path):
    rule, three_batches = f"Band(KL(), {hold})", {"max_steps": 12, "logging_steps": 4}
    audited = trained(tmp_path / "audited", rule, **three_batches, audit_steps=1)
    controller = parse(rule, ClipRule).radius
    (radii,), metrics = logged(audited, "radius"), logged(audited, *measured)
    expected = controller.start
    for radius, quantities in zip(radii, zip(*metrics, strict=True), strict=True):
        assert radius == pytest.approx(expected, rel=1e-9)
        expected = controller.update(expected, sum(quantities))
    assert len(set(radii)) == 3
    assert audited._held_radii == {repr(controller): pytest.approx(expected, rel=1e-6)}
    # Audited or not, it measures the same.
    for audit_steps in otherwise_audited:
        other = trained(tmp_path / str(audit_steps), rule, **three_batches, audit_steps=audit_steps)
        assert logged(other, "radius")[0] == pytest.approx(radii, rel=1e-9)


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.filterwarnings("ignore::bandpo.audit.watch.BandWarning")
@pytest.mark.slow
def test_a_controller_goes_on_from_a_checkpoint(restore, tmp_path):
    settings = {
        "clip": "Band(KL(), HoldClipRate(0.2, 0.005, 0.5))",
        "max_steps": 12,
        "save_strategy": "steps",
        "save_steps": 4,
        "restore_callback_states_from_checkpoint": restore,
    }
    whole = trained(tmp_path / "whole", **settings)
    checkpoint = tmp_path / "whole" / "checkpoint-8"
    stored = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]["HeldRadii"]
    assert stored["args"]["held"] != whole._held_radii
    cut = make(BandGRPOTrainer, BandGRPOConfig, tmp_path / "cut", **TWO_BATCHES | settings)
    cut.train(resume_from_checkpoint=str(checkpoint))
    assert cut._held_radii == whole._held_radii
    assert logged(cut, "radius") == logged(whole, "radius")
    for ours, theirs in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_a_checkpoint_of_a_stock_run_starts_the_controller(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 4}
    trained(tmp_path / "plain", "Band(KL(), 0.05)", max_steps=4, **settings)
    state = tmp_path / "plain" / "checkpoint-4" / "trainer_state.json"
    assert "HeldRadii" not in json.loads(state.read_text())["stateful_callbacks"]
    settings |= TWO_BATCHES | {"clip": Band(KL(), HoldClipRate(0.2, 0.05))}
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path / "on", **settings)
    trainer.train(resume_from_checkpoint=str(state.parent))
    assert logged(trainer, "radius")[0][-4:] == pytest.approx([0.05] * 4)
    assert (tmp_path / "on" / "checkpoint-8").exists()


def test_a_batch_that_measures_nothing_leaves_the_radius(tmp_path, monkeypatch):
    monkeypatch.setattr(BandGRPOTrainer, "_read", lambda self, seen: {"tokens": 0.0})
    trainer = trained(tmp_path, "Band(KL(), HoldKL(0.02, 0.05))")
    assert list(trainer._held_radii.values()) == [0.05]


TWO_PROCESSES = """
import json, sys
from pathlib import Path
from test_trl_radius import logged, trained

out = Path(sys.argv[1])
for name, radius in {"hold": "HoldKL(0.02, 0.05, 0.5)", "entropy": "ByEntropy(0.01, 0.1)"}.items():
    trainer = trained(out / name, f"Band(KL(), {radius})", max_steps=12)
    rank = trainer.accelerator.process_index
    rows = logged(trainer, "radius", "radius_min", "radius_max")
    held = trainer._held_radii if name == "hold" else None
    (out / f"{name}-{rank}.json").write_text(json.dumps({"rows": rows, "held": held}))
"""


@pytest.mark.slow
def test_two_processes_agree(tmp_path):
    run_on_two_processes(TWO_PROCESSES, tmp_path)
    for name in ("hold", "entropy"):
        one, other = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in (0, 1))
        assert one == other
        assert len(set(one["rows"][0])) > 1
    assert all(a < b < c for b, a, c in zip(*one["rows"], strict=True))
