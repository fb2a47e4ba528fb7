import json
import math
import re

import pytest
import torch

from bandpo import DCPO, KL, Band, Batch, FixedClip, Method, TwoSided, Unclipped, policy_loss
from bandpo.audit import Audit, Recorder
from bandpo.audit.metrics import BINS, COUNTERFACTUALS, LOGGED, logged
from bandpo.core.rules import Tightest
from bandpo.core.text import as_method
from pages import ROOT


def batch(seed, rows=8, columns=64):
    g = torch.Generator().manual_seed(seed)
    logp_old = -torch.rand(rows, columns, generator=g) * 11 - 0.01
    logp = (logp_old + 0.6 * torch.randn(rows, columns, generator=g)).clamp(max=-1e-3)
    advantages = torch.randn(rows, generator=g)
    mask = (torch.rand(rows, columns, generator=g) > 0.2).float()
    return logp, logp_old, advantages, mask


def test_numbers_worked_by_hand():
    """Clip 0.2. Positive row: p 0.005 with ratio 4 (blocked), p 0.05 with 2 (blocked), p 0.5 with 1.1 (free).
    Negative row: p 0.05 with ½ (blocked), p 0.5 with 1.5 (outside, but pulled back), and a token that does not count.
    """
    p = torch.tensor([[0.005, 0.05, 0.5], [0.05, 0.5, 0.9]])
    ratio = torch.tensor([[4.0, 2.0, 1.1], [0.5, 1.5, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    tensors = (p * ratio).log(), p.log(), torch.tensor([1.0, -2.0]), mask
    m = Audit.from_batch(Batch.read(*tensors, entropy=p * 2), method=FixedClip(0.2)).metrics()
    expected = {
        "tokens": 5,
        "calls": 1,
        "clip_high": 2 / 5,
        "clip_low": 1 / 5,
        "clip_high/1e-3_to_0.01": 1,
        "clip_high/0.01_to_0.1": 1,
        "clip_high/above_0.1": 0,
        "clip_low/0.01_to_0.1": 1,
        "clip_low/above_0.1": 0,
        "tokens_positive/0.01_to_0.1": 1,
        "tokens_negative/above_0.1": 1,
        "mass_positive/1e-3_to_0.01": 4,
        "tokens_positive_below_0.1": 2,
        "tokens_positive_below_0.01": 1,
        "mass_positive_below_0.1": 6,
        "clip_high_below_0.1": 1,
        "blocked_mass": 6 / 7.1,
        "blocked_mass_below_0.1": 1,
        "blocked_mass_below_0.01": 1,
        "inert": 0,
        "on_policy": 0,
        "ratio_mean": (4 + 2 + 1.1 + 0.5 + 1.5) / 5,
        "entropy": 2 * (0.005 + 0.05 + 0.5 + 0.05 + 0.5) / 5,
        # Band KL 0.05: p = 0.005 up to 10 (the cap); 0.05 in [0.16, 2.9]; 0.5 in [0.69, 1.31]
        "if/Band/clip_high": 0,
        "if/Band/clip_low": 0,
        "if/Band/blocked_mass_below_0.1": 0,
        "if/Band/inert": 1,
        "if/clip 0.2/clip_high": 2 / 5,
        "if/Clip-Higher/clip_high": 2 / 5,
        "if/DCPO/clip_low": 0,  # its lower bound is ½ there
    }
    assert {name: m.get(name) for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert "clip_high/below_1e-4" not in m  # a rate over no tokens
    json.dumps(m, allow_nan=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": FixedClip()},
        {"method": Band(KL(), 0.01)},
        {"method": DCPO()},
        {"method": Method(FixedClip(0.01), level="sequence")},
        {"method": FixedClip(), "logp_anchor": batch(0)[1] - 0.01},
    ],
    ids=["clip", "Band", "DCPO", "sequence", "anchor"],
)
def test_agrees_with_the_loss(settings):
    settings = dict(settings)
    tensors = batch(0)
    method = settings.pop("method")
    made = Batch.read(*tensors, **settings)
    m = Audit.from_batch(made, method=method).metrics()
    loss = as_method(method).loss(made).metrics
    for name in ("clip_high", "clip_low", "ratio_mean", "approx_kl"):
        assert m[name] == pytest.approx(loss[name].item(), rel=1e-4)
    assert 0 < m["clip_high"] < 0.6


def test_each_counterfactual_is_that_rule_s_own_audit():
    tensors = batch(1)
    m = Audit.from_batch(Batch.read(*tensors), method=Unclipped()).metrics()
    for name, rule in COUNTERFACTUALS.items():
        own = Audit.from_batch(Batch.read(*tensors), method=rule).metrics()
        for key in ("clip_high", "clip_low", "inert", "blocked_mass_below_0.1"):
            assert m[f"if/{name}/{key}"] == own[key]
    assert m["clip_high"] == 0


def test_sums_over_parts_are_the_whole():
    """Ragged micro-batches and processes: rates are over all tokens, not means of means."""
    tensors = batch(2)
    whole = Audit.from_batch(Batch.read(*tensors), method=Band())
    parts = [
        Audit.from_batch(Batch.read(*(x[i:j] for x in tensors)), method=Band())
        for i, j in ((0, 1), (1, 3), (3, 8))
    ]
    added = parts[0] + parts[1] + parts[2]
    processes = []  # what an all-reduce over two processes does to the flat sums
    (parts[1] + parts[2]).reduced(lambda flat: processes.append(flat) or flat)
    reduced = parts[0].reduced(lambda flat: flat + processes[0])
    for other in (added, reduced):
        ours, theirs = whole.metrics(), other.metrics()
        for name in ours.keys() - {"calls"}:
            if not name.endswith("inert"):
                assert theirs[name] == pytest.approx(ours[name], rel=1e-5, abs=1e-9)
        assert theirs["calls"] == 3
    with pytest.raises(ValueError, match="audits of different methods"):
        whole + Audit.from_batch(Batch.read(*tensors), method=Band(), counterfactuals={})


def test_on_policy_and_movement():
    logp, logp_old, advantages, mask = batch(4)
    still = Audit.from_batch(Batch.read(logp_old, logp_old, advantages, mask), method=FixedClip()).metrics()
    assert (still["on_policy"], still["inert"], still["radius_used"]) == (1, 1, 0)
    assert still["entropy"] == pytest.approx(-(logp_old * mask).sum().item() / mask.sum().item(), rel=1e-5)
    band = Band(KL(), 0.02)
    m = Audit.from_batch(Batch.read(logp, logp_old, advantages, mask), method=band).metrics()
    spent = KL().divergence_of_ratio(logp - logp_old, logp_old)
    assert m["radius_used"] == pytest.approx((spent * mask).sum().item() / mask.sum().item() / 0.02, rel=1e-4)


def test_padding_may_hold_anything():
    tensors = batch(6)
    m = Audit.from_batch(Batch.read(*tensors), method=Band()).metrics()
    padding, advantages = tensors[3] == 0, tensors[2][:, None].expand_as(tensors[3])
    dirty = [x.masked_fill(padding, math.nan) for x in (*tensors[:2], advantages)]
    assert Audit.from_batch(Batch.read(*dirty, tensors[3]), method=Band()).metrics() == m
    assert set(BINS) == {name.partition("/")[2] for name in m if name.startswith("tokens_positive/")}


WRONG = [
    ({"logp": torch.tensor([[-1.0, 0.3]])}, "logp holds 0.3, which is not a log-probability"),
    ({"logp_old": torch.tensor([[-1.0, math.nan]])}, "logp_old holds nan, which is not a log-probability"),
    ({"advantages": torch.tensor([math.nan])}, "advantages hold nan at a counted token"),
    ({"mask": torch.tensor([[1.0, 0.5]])}, "mask holds 0.5, but must be 0 or 1"),
    ({"mask": torch.ones(1)}, "mask has shape"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_what_the_loss_refuses_every_look_at_a_batch_refuses(wrong, message, tmp_path):
    """The loss and the audit share the validation. The recorder accepts invalid values, so that training continues."""
    given = {name: torch.tensor([[-1.0, -2.0]]) for name in ("logp", "logp_old")}
    given |= {"advantages": torch.ones(1), "mask": torch.ones(1, 2)} | wrong
    for look in (policy_loss, Batch.read):
        with pytest.raises(ValueError, match=message):
            look(**given)
    if "mask" in wrong:
        pytest.importorskip("pyarrow")
        with Recorder(tmp_path) as recorder, pytest.raises(ValueError, match=message):
            recorder.add(**given)


def test_double_precision_is_kept():
    """1e-9 from the bound, which float32 cannot tell from it."""
    logp_old = torch.full((1, 2), math.log(0.3), dtype=torch.float64)
    moved = torch.tensor([[math.log(1.2) - 1e-9, math.log(1.2) + 1e-9]], dtype=torch.float64)
    tensors = logp_old + moved, logp_old
    assert (
        Audit.from_batch(Batch.read(*tensors, torch.ones(1)), method=FixedClip(0.2)).metrics()["clip_high"]
        == 0.5
    )


def test_what_is_logged_is_measured_and_the_glossary_has_all_of_it():
    page = (ROOT / "docs/audit.md").read_text()
    metrics = Audit.from_batch(Batch.read(*batch(7, rows=200)), method=Band()).metrics()
    assert logged(metrics) == {f"audit/{name}": metrics[name] for name in LOGGED}
    assert logged(metrics, detail=True) == {f"audit/{name}": value for name, value in metrics.items()}
    assert len(LOGGED) == 12 < len(metrics)
    for name in metrics:
        general = re.sub(r"^if/[^/]+/", "if/RULE/", name)
        general = re.sub("/(" + "|".join(map(re.escape, BINS)) + ")$", "/BIN", general)
        assert f"`{general}`" in page, name
    assert all(f"`{name}`" in page for name in (*BINS, *COUNTERFACTUALS))


@pytest.mark.parametrize(
    "wrap", [lambda band: Tightest(band, FixedClip(1.0, 3.0)), lambda band: TwoSided(FixedClip(), band)]
)
def test_the_radius_used_is_that_of_the_band_in_the_rule(wrap):
    tensors = batch(6)
    band = Band(KL(), 0.5)
    used = Audit.from_batch(Batch.read(*tensors), method=band).metrics()["radius_used"]
    assert Audit.from_batch(Batch.read(*tensors), method=wrap(band)).metrics()[
        "radius_used"
    ] == pytest.approx(used)
    default = Audit.from_batch(Batch.read(*tensors), method=FixedClip()).metrics()["radius_used"]
    assert default == pytest.approx(10 * used, rel=1e-5)  # Band's own, 0.05
    both = TwoSided(Band(KL(), 0.5), Band(KL(), 0.05))  # of two bands, the one that is spent most
    assert Audit.from_batch(Batch.read(*tensors), method=both).metrics()["radius_used"] == pytest.approx(
        default
    )
