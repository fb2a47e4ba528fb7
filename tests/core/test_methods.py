"""Every method by name and in text: its gradient is its formula's, and the audit tells what it keeps."""

import inspect
import re
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import method_references as reference
from bandpo import (
    KL,
    Audit,
    Band,
    FixedClip,
    Surrogate,
    TotalVariation,
    Unclipped,
    as_text,
    methods,
    objectives,
    parse_method,
    parse_objective,
    parse_rule,
    policy_loss,
)
from bandpo.methods import Method, Parts
from bandpo.objectives import (
    Balanced,
    ClippedWeight,
    DualClip,
    GammaWeight,
    GeometricMean,
    InverseRatio,
    KeepBound,
    Masked,
    MiddleTanh,
    Objective,
    ProbabilityPenalty,
    Quadratic,
    Rollback,
    SelfAnchored,
    SequenceMask,
    SigmoidGate,
    SoftClip,
    Unweighted,
)
from bandpo.text import as_parts


def batch(seed, *, whole_sequences=False, ragged=True, shape=(40, 9), dtype=torch.float64):
    """Tokens common and rare, ratios near and far, both signs of advantage, ragged or ruptured masks."""
    generator = torch.Generator().manual_seed(seed)
    old = -8 * torch.rand(shape, generator=generator, dtype=dtype) ** 2 - 1e-3
    new = (old + 0.9 * torch.randn(shape, generator=generator, dtype=dtype)).clamp(max=-1e-5)
    advantages = torch.randn(shape, generator=generator, dtype=dtype)
    if whole_sequences:
        advantages = advantages[:, :1].expand(shape)
    lengths = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
    mask = torch.arange(shape[1]) < lengths if ragged else torch.rand(shape, generator=generator) > 0.3
    mask[:, 0] = True
    return new, old, advantages, mask


# --- the references that are no method's own in method_references, made of those that are -----------------------------


def band_of_the_paper(logp, logp_old, advantages, mask):
    """TRGPPO's interval with a cap of 10, and a dual clip of 10."""
    ratio = (logp - logp_old).exp()
    loss = reference.trgppo(logp, logp_old, advantages, mask, delta=0.05)
    return torch.where(ratio > 10, loss.detach(), loss)


def band_above(logp, logp_old, advantages, mask):
    """TRGPPO's interval with a cap of 10 for positive advantages, PPO's for negative ones."""
    above = band_of_the_paper(logp, logp_old, advantages, mask)
    return torch.where(advantages > 0, above, reference.ppo(logp, logp_old, advantages, mask))


def either_interval(logp, logp_old, advantages, mask):
    """TRGPPO's whole rule: blocked where its own interval blocks and PPO's does too."""
    ppo = reference.ppo(logp, logp_old, advantages, mask)
    inside = ppo == -(logp - logp_old).exp() * advantages
    return torch.where(inside, ppo, reference.trgppo(logp, logp_old, advantages, mask, delta=0.05))


def bent(logp, logp_old, advantages, mask, *, slope):
    """PPO's minimum, with a line of that slope in place of its clamp beyond the bounds."""

    def clip(r, lower, upper):
        bound = r.clamp(lower, upper)
        return bound + slope * (r - bound)

    return reference.soft(logp, logp_old, advantages, mask, clip=clip)


def penalty_of_band(logp, logp_old, advantages, mask):
    """SPO's penalty, its width that of Band-KL's interval on the side where the ratio lies."""
    bounds = Band(KL(), 0.05).bounds(logp_old)
    width = torch.where(logp > logp_old, bounds.upper - 1, 1 - bounds.lower)
    return reference.spo(logp, logp_old, advantages, mask, epsilon=width)


CLIP = {"clip": "FixedClip(0.2)"}
REFERENCES = {
    "FixedClip(0.2)": ({"method": "FixedClip(0.2)"}, reference.ppo),
    "GRPO": ({"method": "GRPO()"}, reference.ppo),
    "DAPO": ({"method": "DAPO()"}, partial(reference.ppo, high=0.28)),
    "BandPO": ({"method": "BandPO()"}, band_of_the_paper),
    "BandAbove": ({"method": "BandAbove()"}, band_above),
    "DCPO": ({"clip": "DCPO()"}, reference.dcpo),
    "TRGPPO": ({"clip": "Union(Band(KL(), 0.05, inf), FixedClip(0.2))"}, either_interval),
    "dual clip": ({**CLIP, "objective": "DualClip(3)"}, partial(reference.ppo, dual=3.0)),
    "dual_clip=3": ({**CLIP, "dual_clip": 3.0}, partial(reference.ppo, dual=3.0)),
    "unbounded positive": ({"clip": "FixedClip(0.2, inf)"}, partial(reference.ppo, high=torch.inf)),
    "soft clip": ({**CLIP, "objective": "Surrogate(beyond=0.1)"}, partial(bent, slope=0.1)),
    "rollback": ({**CLIP, "objective": "Surrogate(beyond=-0.3)"}, partial(bent, slope=-0.3)),
    "tanh tails": ({**CLIP, "objective": "SoftClip()"}, partial(reference.soft, clip=reference.tanh_tails)),
    "tanh sides": ({**CLIP, "objective": "SoftClip(0)"}, partial(reference.soft, clip=reference.tanh_sides)),
    "tanh whole": ({**CLIP, "objective": "MiddleTanh()"}, partial(reference.soft, clip=reference.tanh_whole)),
    "tanh rollback": (
        {**CLIP, "objective": "Rollback()"},
        partial(reference.soft, clip=reference.tanh_rollback),
    ),
    "tanh steered": (
        {**CLIP, "objective": "SoftClip(0.9, -1, 1)"},
        partial(reference.soft, clip=reference.tanh_steered),
    ),
    "tanh rollback from one": (
        {**CLIP, "objective": "Rollback(0.05, 1, depth_high=0.1125, from_one=True)"},  # 0.05·(1.2/0.8)²
        partial(reference.soft, clip=reference.tanh_rollback_from_one),
    ),
    "tanh rollback, activated": (
        {**CLIP, "objective": "Rollback(inner=2)"},
        partial(reference.soft, clip=partial(reference.activated, clip=reference.tanh_rollback)),
    ),
    "tanh rollback from one, activated": (
        {**CLIP, "objective": "Rollback(0.05, 1, depth_high=0.1125, from_one=True, inner=2)"},
        partial(reference.soft, clip=partial(reference.activated, clip=reference.tanh_rollback_from_one)),
    ),
    "DPPO": ({"method": "DPPO()"}, reference.dppo_kl),
    "DPPO-TV": (
        {"method": "DPPO(TotalVariation(), 0.15, 2)"},
        partial(reference.dppo_tv, max_weight=2.0),
    ),
    "IcePop": ({"method": "IcePop()"}, reference.icepop),
    "ipo": (
        {"clip": "Band(TotalVariation(), 0.1, inf)", "objective": "Masked(inf, both_sides=True)"},
        reference.ipo,
    ),
    "CISPO": ({"method": "CISPO()"}, reference.cispo),
    "CISPO, both sides": ({"method": "CISPO(0.2, 0.28)"}, partial(reference.cispo, low=0.2, high=0.28)),
    "GPPO": ({"method": "GPPO()"}, reference.gppo),
    "CEGPPO": ({"method": "CEGPPO()"}, partial(reference.gppo, beta_low=0.75)),
    "ASPO": ({"method": "ASPO()"}, reference.aspo),
    "UPGRPO": ({"method": "UPGRPO()"}, reference.up),
    "SPO": ({"method": "SPO()"}, reference.spo),
    "DRPO": ({"method": "DRPO()"}, reference.drpo),
    "DRPO of a band": (
        {"clip": Unclipped(), "objective": ProbabilityPenalty(0.3)},
        partial(reference.drpo, delta=0.3),
    ),
    "Band-KL with a penalty": ({"clip": "Band(KL(), 0.05)", "objective": "Quadratic()"}, penalty_of_band),
    "SAPO": ({"method": "SAPO()"}, reference.sapo),
    "SAPO(2, 3)": ({"method": "SAPO(2, 3)"}, partial(reference.sapo, positive=2.0, negative=3.0)),
    "BAPO": ({"method": "BAPO()"}, reference.bapo),
    "BAPO(0.3)": ({"method": "BAPO(0.3)"}, partial(reference.bapo, share=0.3)),
    "GPG": ({"method": "GPG()"}, reference.gpg),
    "GSPO": ({"method": "GSPO()"}, reference.gspo),
    "GSPO(0.1, 0.2)": ({"method": "GSPO(0.1, 0.2)"}, partial(reference.gspo, low=0.1, high=0.2)),
    "GMPO": ({"method": "GMPO()"}, reference.gmpo),
    "VESPO": ({"method": "VESPO()"}, reference.vespo),
    "off-policy sequence mask": ({**CLIP, "objective": "SequenceMask(0.5)"}, reference.opsm),
}
OF_SEQUENCES = ("GSPO", "GSPO(0.1, 0.2)", "GMPO")
NAMED = [cls for cls in vars(methods).values() if inspect.isclass(cls) and cls.__module__ == methods.__name__]
NAMED = [cls for cls in NAMED if issubclass(cls, Method) and cls is not Method]


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", REFERENCES)
def test_the_gradient_is_that_of_the_formula(name, seed, ragged):
    settings, formula = REFERENCES[name]
    logp, old, advantages, mask = batch(seed, whole_sequences=name in OF_SEQUENCES, ragged=ragged)
    signs, sides = advantages[mask] > 0, (logp > old)[mask]
    assert min((signs & sides).sum(), (signs & ~sides).sum(), (~signs & sides).sum()) > 20
    assert (~signs & ~sides).sum() > 20

    logp.requires_grad_()
    loss = formula(logp, old, advantages, mask.double())
    if as_parts(**settings).aggregation == "seq-mean-token-mean":
        loss = reference.mean_of_sequence(loss, mask.double()).mean()
    else:
        loss = loss[mask].mean()
    (expected,) = torch.autograd.grad(loss, logp)
    (found,) = torch.autograd.grad(policy_loss(logp, old, advantages, mask, **settings).loss, logp)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    assert (expected[mask] != 0).double().mean() > 0.2


def test_every_method_has_a_reference():
    tested = {type(parse_method(s["method"])) for s, _ in REFERENCES.values() if "method" in s}
    assert tested >= set(NAMED)


# --- as text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", NAMED)
def test_a_method_is_its_text(cls):
    method = cls()
    assert parse_method(as_text(method)) == parse_method(cls.__name__) == method
    assert parse_method(repr(method)) == method
    parts = method.parts()
    assert parse_rule(as_text(parts.clip)) == parts.clip
    assert parse_objective(as_text(parts.objective)) == parts.objective
    tensors = batch(3)
    for text in (cls.__name__, as_text(method)):
        torch.testing.assert_close(policy_loss(*tensors, method=text), policy_loss(*tensors, method=method))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("GSPO(FixedClip(0.2))", r"low must be in \[0, 1\] .* got FixedClip\(low=0.2, high=0.2\)"),
        ("CISPO(1.0, Band())", r"high must be at least 0 .* got Band\("),
        ("SAPO(KL())", r"positive must be above 0, got KL\(\)"),
        ("BandPO(0.05)", r"write Band\(KL\(\), 0.05\)"),
        ("BandPO(KL(), 0)", "radius must be a finite number above 0, got 0"),
        ("DPPO(KL(), 0.0)", "radius must be a finite number above 0, got 0.0"),
        ("BAPO(2)", r"share must be in \(0, 1\), got 2"),
    ],
)
def test_a_bad_value_is_refused_where_it_is_written(text, said):
    with pytest.raises(ValueError, match=said) as error:
        parse_method(text)
    assert text in str(error.value)


# --- the table --------------------------------------------------------------------------------------------------------

ROWS = [
    [cell.strip() for cell in line.strip("| ").split("|")]
    for line in methods.__doc__.splitlines()
    if line.startswith("| ") and not line.startswith("| method")
]


def written(cell, fallback):
    """What a cell says: ``code`` as text, `Class` as its defaults; or ``fallback``."""
    found = re.search(r"``([\w.]+\(.*?\))``|`(\w+)`", cell)
    return (found[1] or f"{found[2]}()") if found else fallback


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_table_can_be_used_as_it_stands(row):
    names, _, rule, objective = row
    clip = parse_rule(written(rule, "FixedClip(0.2)" if rule == "any" else "Unclipped()"))
    objective = parse_objective(written(objective, ""))
    logp, old, advantages, mask = batch(4)
    loss = policy_loss(logp.requires_grad_(), old, advantages, mask, clip=clip, objective=objective).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    assert (gradient[~mask] == 0).all()
    assert ((gradient * -advantages)[mask] > 0).double().mean() > 0.2  # pushed where the advantage points
    for name in re.findall(r"(?<!`)`(\w+)`(?!`)", names):
        parts = parse_method(name).parts()
        assert type(parts.objective) is type(objective)
        assert parts.level == ("sequence" if "per sequence" in rule else "token")
        if "``" in row[3]:
            assert parts.objective == objective
        if "(" in rule:
            assert parts.clip == clip


def test_the_table_has_every_method_and_every_objective():
    text = "\n".join(" ".join(row) for row in ROWS)
    assert {cls.__name__ for cls in NAMED} <= set(re.findall(r"\w+", text))
    assert set(objectives.__all__) - {"Objective"} <= set(re.findall(r"\w+", text))


# --- the audit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFERENCES)
def test_the_audit_takes_every_method(name):
    settings, _ = REFERENCES[name]
    logp, old, advantages, mask = batch(5, dtype=torch.float32)
    metrics = Audit.from_batch(logp, old, advantages, mask, **settings).metrics()
    logp.requires_grad_()
    loss, expected = policy_loss(logp, old, advantages, mask, **settings)
    (gradient,) = torch.autograd.grad(loss, logp)
    dropped = expected["clip_low"] + expected["dual_clip"]
    assert metrics["clip_high"] == pytest.approx(expected["clip_high"].item(), abs=1e-6)
    assert metrics["clip_low"] == pytest.approx(dropped.item(), abs=1e-6)
    if metrics["clip_high"] + metrics["clip_low"] == 0:
        assert (gradient != 0)[mask].all()


def audit(ratios, advantages, **settings):
    """Metrics of tokens of probability 0.08 before, with these ratios."""
    old = torch.full((1, len(ratios)), 0.08).log()
    logp = old + torch.tensor([ratios]).log()
    return Audit.from_batch(logp, old, torch.tensor([advantages]), counterfactuals={}, **settings).metrics()


def shares(metrics):
    return {k: metrics[k] for k in ("clip_high", "clip_low", "softened", "amplified", "blocked_mass")}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # ratios 2, ½, 1, all of A = 1: masses 2, 0.5, 1
        # PPO: the first is blocked, and 2 of 3.5 is lost
        ({"method": "FixedClip(0.2)"}, (1 / 3, 0, 0, 0, 2 / 3.5)),
        # weights 2, ½, 1 between 0 and 5: nothing is changed
        ({"method": "CISPO()"}, (0, 0, 0, 0, 0)),
        # weights 1.28, 0.8, 1: 0.72 of the first is lost, the second gets more than its own
        ({"method": "CISPO(0.2, 0.28)"}, (0, 0, 1 / 3, 1 / 3, 0.72 / 3.5)),
        # the first keeps a tenth
        ({"clip": "FixedClip(0.2)", "objective": "Surrogate(beyond=0.1)"}, (0, 0, 1 / 3, 0, 1.8 / 3.5)),
        # weight 2·(1 − 1/0.5) = −2: pulled back, so all is lost and as much again; ½·(1 + 1) = 1: doubled
        ({"method": "SPO(0.5)"}, (1 / 3, 0, 0, 1 / 3, 4 / 3.5)),
        # weight 1 of 2, of ½ and of 1
        ({"method": "GPG()"}, (0, 0, 1 / 3, 1 / 3, 1 / 3.5)),
        # outside [0.8, 1.2] on either side
        (
            {"clip": "FixedClip(0.2)", "objective": "Masked(inf, both_sides=True)"},
            (2 / 3, 0, 0, 0, 2.5 / 3.5),
        ),
    ],
    ids=str,
)
def test_shares_by_hand(settings, expected):
    names = ("clip_high", "clip_low", "softened", "amplified", "blocked_mass")
    metrics = audit([2.0, 0.5, 1.0], [1.0, 1.0, 1.0], **settings)
    assert shares(metrics) == pytest.approx(dict(zip(names, expected, strict=True)), abs=1e-6)


def test_shares_of_negative_advantages_by_hand():
    """Ratios ½ and 4 of A = −1: SPO's ½·(1 − 1) = 0 at its bound is blocked, a dual clip of 3 drops the 4."""
    spo, dual = (
        audit([0.5, 4.0], [-1.0, -1.0], **s)
        for s in ({"method": "SPO(0.5)"}, {"method": "FixedClip(0.8)", "dual_clip": 3.0})
    )
    assert (spo["clip_high"], spo["clip_low"], spo["amplified"]) == (0, 0.5, 0.5)
    assert (dual["clip_high"], dual["clip_low"], dual["amplified"]) == (0, 0.5, 0)


# --- compiled ---------------------------------------------------------------------------------------------------------

ONE_OF_EACH = [
    Surrogate(0.1),
    Masked(20, both_sides=True),
    ClippedWeight(3),
    KeepBound(0.75),
    InverseRatio(),
    GeometricMean(),
    DualClip(),
    SequenceMask(0.5),
    SelfAnchored(),
    Unweighted(),
    Balanced(),
    SoftClip(),
    MiddleTanh(),
    Rollback(),
    Quadratic(),
    ProbabilityPenalty(),
    SigmoidGate(),
    GammaWeight(),
]


def test_each_objective_is_compiled_here():
    assert {type(x).__name__ for x in ONE_OF_EACH} == set(objectives.__all__) - {Objective.__name__}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ONE_OF_EACH, ids=lambda x: type(x).__name__)
def test_one_graph(objective):
    assert_one_graph(clip=Band(TotalVariation(), 0.1), objective=objective)


@pytest.mark.parametrize("method", [methods.SAPO(), methods.GSPO()], ids=str)
def test_one_graph_by_name(method):
    assert_one_graph(method=method)


@pytest.mark.parametrize("objective", ONE_OF_EACH, ids=lambda x: type(x).__name__)
def test_no_value_is_read_on_an_accelerator(objective):
    """Meta tensors hold no values: what would synchronise on a real accelerator raises on this one."""
    logp, *rest = (x.to("meta") for x in batch(0, dtype=torch.float32))
    loss, metrics = policy_loss(logp.requires_grad_(), *rest, clip=Band(KL(), 0.05), objective=objective)
    loss.backward()
    assert all(x.device.type == "meta" for x in (loss, logp.grad, *metrics.values()))


def assert_one_graph(**settings):
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(partial(policy_loss, **settings), backend=graphs, fullgraph=True, dynamic=True)
    for rows in (3, 5):
        logp, *rest = batch(rows, shape=(rows, 2 * rows), dtype=torch.float32)
        both = []
        for loss_fn in (compiled, partial(policy_loss, **settings)):
            leaf = logp.clone().requires_grad_()
            loss, metrics = loss_fn(leaf, *rest)
            loss.backward()
            both.append((loss, metrics, leaf.grad))
        torch.testing.assert_close(*both)
    assert graphs.frame_count == 1


def test_parts_say_what_settings_say():
    assert as_parts("FixedClip(0.2)") == as_parts(clip="FixedClip(0.2)") == Parts(FixedClip(0.2))
    assert as_parts("DAPO()", dual_clip=3).objective == DualClip(3)
    with pytest.raises(ValueError, match="level must be 'token' or 'sequence', got 'batch'"):
        as_parts(level="batch")
