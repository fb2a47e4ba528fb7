"""Tests of every method: its gradient against its formula, its text form, and its metrics in the audit."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import method_references as reference
from bandpo import (
    DAPO,
    DCPO,
    KL,
    Band,
    ClipRule,
    FixedClip,
    Loosest,
    Method,
    Rows,
    TotalVariation,
    Unclipped,
    parse,
    policy_loss,
)
from bandpo.audit import Audit
from bandpo.core import objectives
from bandpo.core.batch import Batch
from bandpo.core.methods import METHODS
from bandpo.core.objectives import (
    ClippedWeight,
    CovarianceMask,
    CovariancePenalty,
    DecoupledDecay,
    DropOutside,
    DualClip,
    FutureKL,
    GammaWeight,
    GeometricMean,
    HazardGate,
    InverseRatio,
    KeepBound,
    LogRatioPenalty,
    MassAdaptiveGate,
    Objective,
    ProbabilityPenalty,
    Quadratic,
    RatioCap,
    RolloutSurrogate,
    SelfAnchored,
    SequenceMask,
    SequenceProduct,
    SigmoidGate,
    Smoothed,
    Surrogate,
    Unweighted,
)
from bandpo.core.text import as_method, as_text
from bandpo.core.token_rules import PrefixBudget, SecondMoment
from helpers.missing import require


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
    at_ten = -10 * advantages
    limited = torch.where(advantages > 0, torch.maximum(loss, at_ten), torch.minimum(loss, at_ten))
    return torch.where(ratio > 10, limited.detach(), loss)


def band_above(logp, logp_old, advantages, mask):
    """TRGPPO's interval with a cap of 10 for positive advantages, PPO's for negative ones."""
    above = band_of_the_paper(logp, logp_old, advantages, mask)
    return torch.where(advantages > 0, above, reference.ppo(logp, logp_old, advantages, mask))


def either_interval(logp, logp_old, advantages, mask):
    """TRGPPO's whole rule: blocked where its own interval blocks and PPO's does too."""
    ppo = reference.ppo(logp, logp_old, advantages, mask)
    return torch.minimum(ppo, reference.trgppo(logp, logp_old, advantages, mask, delta=0.05))


def bent(logp, logp_old, advantages, mask, *, slope):
    """PPO's minimum, with a line of that slope in place of its clamp beyond the bounds."""
    ratio = (logp - logp_old).exp()
    bound = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * advantages, (bound + slope * (ratio - bound)) * advantages)


def penalty_of_band(logp, logp_old, advantages, mask):
    """SPO's penalty, its width that of Band-KL's interval on the side where the ratio lies."""
    bounds = Band(KL(), 0.05).bounds(logp_old)
    width = torch.where(logp > logp_old, bounds.upper - 1, 1 - bounds.lower)
    return reference.spo(logp, logp_old, advantages, mask, epsilon=width)


def two_sided(logp, logp_old, advantages, mask):
    """TRL's ``delta``, as its GRPOTrainer writes it, below the upper bound."""
    ratio = (logp - logp_old).exp()
    return -torch.minimum(ratio.clamp(max=1.1) * advantages, ratio.clamp(0.8, 1.2) * advantages)


THIS_FILE = "packages/bandpo/tests/core/test_methods.py"
CLIP = FixedClip(0.2)
REFERENCES = {
    "FixedClip(0.2)": ("FixedClip(0.2)", reference.ppo),
    "PPO": ("PPO()", reference.ppo),
    "GRPO": ("GRPO()", reference.ppo),
    "DAPO": ("DAPO()", partial(reference.ppo, high=0.28)),
    "BandPO": ("BandPO()", band_of_the_paper),
    "BandAbove": ("BandAbove()", band_above),
    "DCPO": (DCPO(), reference.dcpo),
    "TRGPPO": (Loosest(Band(KL(), 0.05, torch.inf), CLIP), either_interval),
    "dual clip": (Method(CLIP, DualClip(3)), partial(reference.ppo, dual=3.0)),
    "two-sided": (Method(CLIP, RatioCap(1.1)), two_sided),
    "unbounded positive": (FixedClip(0.2, torch.inf), partial(reference.ppo, high=torch.inf)),
    "soft clip": (Method(CLIP, Surrogate(beyond=0.1)), partial(bent, slope=0.1)),
    "rollback": (Method(CLIP, Surrogate(beyond=-0.3)), partial(bent, slope=-0.3)),
    "DPPO": ("DPPO()", reference.dppo_kl),
    "DPPO-TV": ("DPPO(TotalVariation(), 0.15, 2)", partial(reference.dppo_tv, max_weight=2.0)),
    "IcePop": ("IcePop()", reference.icepop),
    "IPO": ("IPO()", reference.ipo),
    "IPO(0.3, 0)": ("IPO(0.3, 0)", partial(reference.ipo, radius=0.3, coefficient=0.0)),
    "MiniRL": ("MiniRL()", reference.minirl),
    "MiniRL(…)": ("MiniRL(0.4, 0.5, 1.2)", partial(reference.minirl, low=0.4, high=0.5, max_weight=1.2)),
    "CISPO": ("CISPO()", reference.cispo),
    "CISPO, both sides": ("CISPO(0.2, 0.28)", partial(reference.cispo, low=0.2, high=0.28)),
    "GPPO": ("GPPO()", partial(reference.gppo, dual=10.0)),
    "CEGPPO": ("CEGPPO()", partial(reference.gppo, high=0.2, beta_low=0.75, dual=10.0)),
    "ASPO": ("ASPO()", reference.aspo),
    "UPGRPO": ("UPGRPO()", reference.up),
    "SPO": ("SPO()", reference.spo),
    "DRPO": ("DRPO()", reference.drpo),
    "DRPO of a band": (Method(Unclipped(), ProbabilityPenalty(0.3)), partial(reference.drpo, delta=0.3)),
    "Band-KL with a penalty": (Method(Band(KL(), 0.05), Quadratic()), penalty_of_band),
    "SAPO": ("SAPO()", reference.sapo),
    "SAPO(2, 3)": ("SAPO(2, 3)", partial(reference.sapo, positive=2.0, negative=3.0)),
    "BAPO": ("BAPO()", partial(reference.bapo, dual=3.0)),
    "BAPO(0.3)": ("BAPO(0.3)", partial(reference.bapo, share=0.3, dual=3.0)),
    "M2PO": ("M2PO()", reference.m2po),
    "M2PO(0.3)": ("M2PO(0.3)", partial(reference.m2po, threshold=0.3)),
    "CPPO": ("CPPO()", reference.cppo),
    "CPPO(0.3, 0.1, 0.2)": (
        "CPPO(0.3, 0.1, 0.2)",
        partial(reference.cppo, radius=0.3, budget=0.1, last=0.2),
    ),
    "ClipCov": ("ClipCov(1.0)", reference.clip_cov),
    "ClipCov(…)": (
        "ClipCov(1.0, 0.1, 0.6, 0.2, 0.3)",
        partial(reference.clip_cov, low=0.2, high=0.3, minimum=0.1, maximum=0.6),
    ),
    "GPG": ("GPG()", reference.gpg),
    "GSPO": ("GSPO()", reference.gspo),
    "GSPO(0.1, 0.2)": ("GSPO(0.1, 0.2)", partial(reference.gspo, low=0.1, high=0.2)),
    "GMPO": ("GMPO()", reference.gmpo),
    "VESPO": ("VESPO()", reference.vespo),
    "PSPO": ("PSPO()", reference.pspo),
    "TOPR": ("TOPR()", reference.topr),
    "TokenTOPR": ("TokenTOPR()", reference.token_topr),
    "KLCov": ("KLCov()", reference.kl_cov),
    "KLCov(0.2, 0.1)": ("KLCov(0.2, 0.1)", partial(reference.kl_cov, share=0.2, coefficient=0.1)),
    "DRO": ("DRO()", reference.dro),
    "PrimeRL": ("PrimeRL()", reference.prime_rl),
    "PrimeRL(0.1, 0.3)": ("PrimeRL(0.1, 0.3)", partial(reference.prime_rl, radius=0.1, coefficient=0.3)),
    "DeepSeekV32": ("DeepSeekV32()", reference.opsm),
    "TRM": ("TRM(0.4)", partial(reference.trm, limit=0.4)),
    "DGPO": ("DGPO()", reference.dgpo),
    "DGPO(2, 1)": ("DGPO(2, 1)", partial(reference.dgpo, n=2, m=1)),
    "MASPO": ("MASPO()", reference.maspo),
    "MASPO(…)": ("MASPO(0.5, 0.5, 0.1, 0.1)", partial(reference.maspo, sigma=0.5, alpha=0.5, beta=0.1)),
    "MHPO": ("MHPO()", reference.mhpo),
    "FIPO": ("FIPO()", reference.fipo),
    "FIPO(…)": (
        "FIPO(0.1, 0.3, 3, 2, 5)",
        partial(reference.fipo, low=0.1, high=0.3, dual=3.0, decay=2.0, boost=5.0),
    ),
}
OF_SEQUENCES = (
    "GMPO",
    "GSPO",
    "GSPO(0.1, 0.2)",
)
REPORT_ANOTHER_LOSS = (
    "CISPO",
    "CISPO, both sides",
    "DPPO",
    "DPPO-TV",
    "DRO",
    "GPG",
    "MiniRL",
    "MiniRL(…)",
    "TOPR",
    "TokenTOPR",
    "VESPO",
)
"""The formula is a constant times log π, where a loss here reports that constant; or its value is not the bound's."""


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", REFERENCES)
def test_the_gradient_is_that_of_the_formula(name, seed, ragged):
    method, formula = REFERENCES[name]
    require(
        [name] if as_method(method).level == "sequence" and name not in OF_SEQUENCES else [],
        THIS_FILE,
        lambda name: f'    "{name}",',
        "OF_SEQUENCES",
        "Its level is 'sequence', which needs one advantage for each sequence.",
    )
    logp, old, advantages, mask = batch(seed, whole_sequences=name in OF_SEQUENCES, ragged=ragged)
    signs, sides = advantages[mask] > 0, (logp > old)[mask]
    assert min((signs & sides).sum(), (signs & ~sides).sum(), (~signs & sides).sum()) > 20
    assert (~signs & ~sides).sum() > 20

    logp.requires_grad_()
    loss = formula(logp, old, advantages, mask.double())
    average = reference.PAPER_FACTS.get(name.partition("(")[0], reference.Facts("token-mean")).average
    loss = {
        "token-mean": loss[mask].mean(),
        "seq-mean-token-mean": reference.mean_of_sequence(loss, mask.double()).mean(),
        "seq-mean-token-sum": (loss * mask).sum(-1).mean(),
    }[average]
    (expected,) = torch.autograd.grad(loss, logp)
    ours = policy_loss(logp, old, advantages, mask, method=method).loss
    (found,) = torch.autograd.grad(ours, logp)
    if not torch.allclose(found, expected, rtol=1e-6, atol=1e-12):
        pytest.fail(
            f"{name}: the gradient of policy_loss is not that of the formula in tests/method_references.py, averaged "
            f"by its {average!r} of PAPER_FACTS. {first_difference(found, expected, logp, old, advantages, mask)}",
            pytrace=False,
        )
    differs = not torch.allclose(ours, loss, rtol=1e-7, atol=1e-7)
    require(
        [name] if differs and name not in REPORT_ANOTHER_LOSS else [],
        THIS_FILE,
        lambda name: f'    "{name}",',
        "REPORT_ANOTHER_LOSS, if both are meant to report their own",
        f"The gradient is the formula's, but the loss is {ours.item():.6g} in bandpo and {loss.item():.6g} in the "
        "formula: a formula may weigh log π by a constant, or leave a blocked token without a value.",
    )
    assert (expected[mask] != 0).double().mean() > 0.2


def first_difference(found, expected, logp, old, advantages, mask):
    """Return where two gradients differ, in a sentence for each kind of token and one example."""
    differs = ~torch.isclose(found, expected, rtol=1e-6, atol=1e-12) & mask
    ratio = (logp.detach() - old).exp()
    kinds = {
        f"A {sign} 0, r {side} 1": mask & (rises == (sign == ">")) & (grows == (side == ">"))
        for rises, grows in [(advantages > 0, ratio > 1)]
        for sign, side in (">>", "><", "<>", "<<")
    }
    counts = [f"{(differs & kind).sum()} of {kind.sum()} tokens with {text}" for text, kind in kinds.items()]
    row, column = differs.nonzero()[0].tolist()
    at = (row, column)
    return (
        f"They differ at {', '.join(counts)}. The first: p_old = {old[at].exp():.4g}, r = {ratio[at]:.4g}, "
        f"A = {advantages[at]:.4g}: bandpo {found[at]:.6g}, the formula {expected[at]:.6g}."
    )


@pytest.mark.parametrize("name", METHODS)
def test_every_method_states_its_average(name):
    require(
        [name] if METHODS[name].method().aggregation is None else [],
        "packages/bandpo/src/bandpo/core/methods.py",
        lambda name: (
            '    return Method(…, aggregation="token-mean")  # or PER_SEQUENCE, or "seq-mean-token-sum"'
        ),
        "the function",
        "It does not state how the paper averages the loss.",
    )


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_reference(name):
    require(
        [name] if name not in REFERENCES else [],
        THIS_FILE,
        lambda name: (
            f'    "{name}": ("{name}()", reference.{name.lower()}),  '
            "# in tests/method_references.py: the loss by the paper's formula"
        ),
        "REFERENCES",
    )


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_facts(name):
    require(
        [name] if name not in reference.PAPER_FACTS else [],
        "tests/method_references.py",
        lambda name: (
            f'    "{name}": Facts({_constant_of(METHODS[name].method().aggregation)}, (0.8, 1.2)),  '
            f"# {METHODS[name].source}: check the average and the bounds against the paper"
        ),
        "PAPER_FACTS",
    )


def test_every_fact_is_of_a_method():
    assert reference.PAPER_FACTS.keys() <= METHODS.keys()


MASKS_WHOLE_SEQUENCES = ("TRM",)
"""Methods of which two tokens of A < 0 and a ratio of 3 mask their sequence."""


def _constant_of(aggregation):
    """Return the name that tests/method_references.py gives an average."""
    return {"token-mean": "TOKENS", "seq-mean-token-sum": "SUMS"}.get(aggregation, "SEQUENCES")


@pytest.mark.parametrize("name", reference.PAPER_FACTS)
def test_a_method_is_what_its_paper_says(name):
    facts, method = reference.PAPER_FACTS[name], METHODS[name].method()
    wrong = []
    for field, value in (
        ("average", method.aggregation),
        ("level", method.level),
        ("old_policy", method.old_policy),
        ("whole_batch", method.whole_batch),
    ):
        if getattr(facts, field) != value:
            wrong.append(f"{field} is {value!r}")
            facts = facts._replace(**{field: value or facts.average})
    old = torch.full((1, 2), 0.08, dtype=torch.float64).log()
    ones = torch.ones_like(old)
    bounds = replace(method, level="token").tokens(Batch.read(old, old, ones)).bounds
    found = tuple(float(f"{side[0, 0].item():.9g}") for side in (bounds.lower, bounds.upper))
    expected = (facts.bounds[0], min(facts.bounds[1], 12.5 if isinstance(method.clip, Band) else torch.inf))
    if found != pytest.approx(expected, rel=1e-7):
        wrong.append(f"bounds is {found}")
        facts = facts._replace(bounds=found)
    # Two tokens of A < 0, just below the dual clip and just above it, or far out.
    dual = facts.dual if facts.dual < torch.inf else 3.0
    ratios = [round(0.999 * dual, 6), round(1.001 * dual, 6)]
    moved = gradient_of_losing_tokens(method, ratios) != 0
    hint = ""
    if name not in MASKS_WHOLE_SEQUENCES and moved.tolist() != [True, facts.dual == torch.inf]:
        wrong.append(f"of tokens of A < 0, those with the ratios {ratios} have a gradient: {moved.tolist()}")
        facts = facts._replace(dual=first_ratio_without_gradient(method))
        hint = f'\n\nIf it masks whole sequences: in {THIS_FILE}, add to MASKS_WHOLE_SEQUENCES:\n\n    "{name}",\n'
    doubled = gradient_of_losing_tokens(method, ratios, weights=torch.full((1, 2), 2.0, dtype=torch.float64))
    outside = torch.allclose(doubled, 2 * gradient_of_losing_tokens(method, ratios))
    if outside != (facts.weights == "outside"):
        weights = "outside" if outside else "inside"
        wrong.append(f"weights is {weights!r}")
        facts = facts._replace(weights=weights)
    if wrong:
        pytest.fail(
            f"{name} differs from its facts in tests/method_references.py: {'; '.join(wrong)}. If the paper says so "
            f"too, write in PAPER_FACTS:\n\n    {line_of_facts(name, facts)}\n\nOtherwise, change the method.{hint}",
            pytrace=False,
        )


def gradient_of_losing_tokens(method, ratios, **given):
    """Return the gradient of tokens of A < 0 in one sequence, of probability 0.08 before, with these ratios."""
    old = torch.full((1, len(ratios)), 0.08, dtype=torch.float64).log()
    logp = (old + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    policy_loss(logp, old, -torch.ones_like(old), method=method, **given).loss.backward()
    return logp.grad[0]


def first_ratio_without_gradient(method):
    """Return the ratio above 1 from which a token of A < 0 has no gradient, to 4 digits; infinity if there is none."""

    def blocked(ratio):
        return gradient_of_losing_tokens(method, [ratio]).item() == 0

    # A batch each: the bounds of some methods depend on all tokens.
    low, high = 1.001, next((1.001 * 1.05**k for k in range(52) if blocked(1.001 * 1.05**k)), torch.inf)
    if high == torch.inf:
        return high
    low = max(low, high / 1.05)
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (low, middle) if blocked(middle) else (middle, high)
    return round(high, 4)


def line_of_facts(name, facts):
    """Return the line of PAPER_FACTS for a method."""
    values = []
    for field, value in facts._asdict().items():
        if value != facts._field_defaults.get(field):
            text = _constant_of(value) if field == "average" else repr(value).replace("inf", "math.inf")
            values.append(text if field in ("average", "bounds") else f"{field}={text}")
    return f'"{name}": Facts({", ".join(values)}),'


def test_wrong_facts_are_answered_with_the_line_to_write(monkeypatch):
    """PPO has no dual clip, BAPO has one and looks at the whole batch, IcePop blocks on both sides."""
    for name, line in (
        ("PPO", '"PPO": Facts(TOKENS, (0.8, 1.2)),'),
        ("BAPO", '"BAPO": Facts(TOKENS, (0.6, 1.2), dual=3.0, whole_batch=True),'),
        ("IcePop", "\"IcePop\": Facts(SEQUENCES, (0.5, 5.0), dual=5.0, old_policy='rollout'),"),
    ):
        monkeypatch.setitem(
            reference.PAPER_FACTS, name, reference.Facts("seq-mean-token-sum", (0.1, 0.2), 2.0)
        )
        with pytest.raises(pytest.fail.Exception) as failure:
            test_a_method_is_what_its_paper_says(name)
        assert line in str(failure.value)


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_the_ratio_of_topr_and_of_minirl_is_to_the_policy_that_sampled(per):
    """The importance weights π_old/μ are a part of it: so are the product's factors, and what is limited."""
    logp, old, advantages, mask = batch(11, whole_sequences=True)
    generator = torch.Generator().manual_seed(12)
    gap = 0.6 * torch.randn(old.shape if per == "token" else (len(old), 1), generator=generator).double()
    weights = gap.exp() if per == "token" else gap.exp().squeeze(-1)
    # A weight per sequence is a factor of each token's ratio in MiniRL, and one factor of the product in TOPR.
    share = gap if per == "token" else gap / mask.sum(-1, keepdim=True)
    logp.requires_grad_()
    for name, losses, reduced in (
        ("MiniRL()", reference.minirl(logp, old, advantages, mask, logp_rollout=old - gap), torch.sum),
        ("TOPR()", reference.topr(logp, old - share, advantages, mask.double()), torch.mean),
    ):
        losses = torch.stack([reduced(row[counted]) for row, counted in zip(losses, mask, strict=True)])
        (expected,) = torch.autograd.grad(losses.mean(), logp, retain_graph=True)
        ours = policy_loss(logp, old, advantages, mask, method=name, weights=weights).loss
        (found,) = torch.autograd.grad(ours, logp)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
        # They are more than factors of the loss.
        unweighted = policy_loss(logp, old, advantages, mask, method=name).loss
        (without,) = torch.autograd.grad(unweighted, logp)
        outside = without * (weights if per == "token" else weights[:, None])
        assert not torch.allclose(found, outside)


def test_topr_by_hand():
    """Two sequences of the ratios 1/2 and 3/2: the product 3/4 weighs both tokens of the loser, 1 the winner's."""
    old = torch.full((2, 2), 0.08, dtype=torch.float64).log()
    logp = (old + torch.tensor([[0.5, 1.5]], dtype=torch.float64).log()).requires_grad_()
    weights = {}
    for name in ("TOPR()", "TokenTOPR()"):
        loss = policy_loss(logp, old, torch.tensor([1.0, -1.0]).double(), method=name).loss
        weights[name] = (torch.autograd.grad(loss, logp)[0].abs() * 4).tolist()  # 2 sequences of 2 tokens
    assert weights["TOPR()"] == [[1.0, 1.0], pytest.approx([0.75, 0.75])]
    assert weights["TokenTOPR()"] == [[1.0, 1.0], pytest.approx([0.5, 1.0])]


# --- as text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_its_text(name):
    method = METHODS[name].method()
    assert parse(as_text(method)) == parse(name) == method
    assert repr(parse(name)) == repr(method) == as_text(method)
    assert repr(method).startswith(f"{name}(")
    assert parse(as_text(method.clip), ClipRule) == method.clip
    assert parse(as_text(method.objective), Objective) == method.objective


def test_a_combination_is_its_text():
    method = Method(Band(KL(), 0.05), DualClip(3.0, DropOutside()), "sequence", "sum")
    assert parse(as_text(method)) == parse(repr(method)) == method
    assert as_text(method).endswith("level='sequence', aggregation='sum')")
    assert as_text(Method(FixedClip(0.2))) == "FixedClip(low=0.2, high=0.2)"
    assert parse("FixedClip(0.2)") == Method(FixedClip(0.2))


def test_what_is_changed_in_a_paper_s_method_has_its_name_no_more():
    changed = replace(DAPO(), clip=Band())
    assert repr(changed).startswith("Method(clip=Band(")
    assert parse(repr(changed)) == changed


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
        parse(text)
    assert text in str(error.value)


# --- the audit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFERENCES)
def test_the_audit_takes_every_method(name):
    method, _ = REFERENCES[name]
    logp, old, advantages, mask = batch(5, dtype=torch.float32)
    metrics = Audit.from_batch(
        Batch.read(logp, old, advantages, mask, layout=Rows()), method=method
    ).metrics()
    logp.requires_grad_()
    loss, expected = policy_loss(logp, old, advantages, mask, method=method, layout=Rows())
    (gradient,) = torch.autograd.grad(loss, logp)
    dropped = expected["clip_low"] + expected["dual_clip"]
    assert metrics["clip_high"] == pytest.approx(expected["clip_high"].item(), abs=1e-6)
    assert metrics["clip_low"] == pytest.approx(dropped.item(), abs=1e-6)
    if metrics["clip_high"] + metrics["clip_low"] == 0:
        assert (gradient != 0)[mask].all()


def audit(ratios, advantages, method):
    """Metrics of tokens of probability 0.08 before, with these ratios."""
    old = torch.full((1, len(ratios)), 0.08).log()
    logp = old + torch.tensor([ratios]).log()
    advantages = torch.tensor([advantages])
    return Audit.from_batch(Batch.read(logp, old, advantages), method=method, counterfactuals={}).metrics()


def shares(metrics):
    return {k: metrics[k] for k in ("clip_high", "clip_low", "softened", "amplified", "blocked_mass")}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # ratios 2, ½, 1, all of A = 1: masses 2, 0.5, 1
        # PPO: the first is blocked, and 2 of 3.5 is lost
        ("FixedClip(0.2)", (1 / 3, 0, 0, 0, 2 / 3.5)),
        # weights 2, ½, 1 between 0 and 5: nothing is changed
        ("CISPO()", (0, 0, 0, 0, 0)),
        # weights 1.28, 0.8, 1: 0.72 of the first is lost, the second gets more than its own
        ("CISPO(0.2, 0.28)", (0, 0, 1 / 3, 1 / 3, 0.72 / 3.5)),
        # the first keeps a tenth
        (Method(FixedClip(0.2), Surrogate(beyond=0.1)), (0, 0, 1 / 3, 0, 1.8 / 3.5)),
        # weight 2·(1 − 1/0.5) = −2: pulled back, so all is lost and as much again; ½·(1 + 1) = 1: doubled
        ("SPO(0.5)", (1 / 3, 0, 0, 1 / 3, 4 / 3.5)),
        # weight 1 of 2, of ½ and of 1
        ("GPG()", (0, 0, 1 / 3, 1 / 3, 1 / 3.5)),
        # outside [0.8, 1.2] on either side
        (Method(FixedClip(0.2), DropOutside(torch.inf, both_sides=True)), (2 / 3, 0, 0, 0, 2.5 / 3.5)),
    ],
    ids=str,
)
def test_shares_by_hand(method, expected):
    names = ("clip_high", "clip_low", "softened", "amplified", "blocked_mass")
    metrics = audit([2.0, 0.5, 1.0], [1.0, 1.0, 1.0], method)
    assert shares(metrics) == pytest.approx(dict(zip(names, expected, strict=True)), abs=1e-6)


def test_shares_of_negative_advantages_by_hand():
    """Ratios ½ and 4 of A = −1: SPO's ½·(1 − 1) = 0 at its bound is blocked, a dual clip of 3 drops the 4."""
    spo, dual = (
        audit([0.5, 4.0], [-1.0, -1.0], method)
        for method in ("SPO(0.5)", Method(FixedClip(0.8), DualClip(3.0)))
    )
    assert (spo["clip_high"], spo["clip_low"], spo["amplified"]) == (0, 0.5, 0.5)
    assert (dual["clip_high"], dual["clip_low"], dual["amplified"]) == (0, 0.5, 0)


# --- compiled ---------------------------------------------------------------------------------------------------------

ONE_OF_EACH = [
    Surrogate(0.1),
    DropOutside(20, both_sides=True),
    ClippedWeight(3),
    CovariancePenalty(0.1),
    FutureKL(),
    KeepBound(0.75),
    LogRatioPenalty(0.1),
    InverseRatio(),
    GeometricMean(),
    DualClip(),
    SequenceMask(0.5),
    RatioCap(1.5),
    RolloutSurrogate(),
    SelfAnchored(),
    SequenceProduct(1.0),
    Smoothed(),
    DecoupledDecay(),
    MassAdaptiveGate(),
    HazardGate(),
    Unweighted(),
    CovarianceMask(0.1),
    Quadratic(),
    ProbabilityPenalty(),
    SigmoidGate(),
    GammaWeight(),
]


@pytest.mark.parametrize(
    "name",
    [
        "ASPO",
        "BAPO",
        "ClipCov",
        "DGPO",
        "DPPO",
        "DRPO",
        "FIPO",
        "KLCov",
        "MASPO",
        "MHPO",
        "PSPO",
        "SAPO",
        "SPO",
        "VESPO",
    ],
)
def test_an_objectives_own_numbers_are_its_methods(name):
    objective = as_method(name + "()").objective
    if isinstance(objective, DualClip):
        objective = objective.objective
    within = {"objective": objective.objective} if hasattr(objective, "objective") else {}
    assert type(objective)(**within) == objective


@pytest.mark.parametrize(("name", "clip"), [("M2PO", SecondMoment()), ("CPPO", PrefixBudget())])
def test_a_rules_own_numbers_are_its_methods(name, clip):
    assert as_method(name + "()").clip == clip


@pytest.mark.parametrize("told", ["TRM(0.01, 'mean_k3')", "DeepSeekV32(0.5)"])  # verl's preset; TRL's example
def test_a_limit_that_no_paper_names_is_a_frameworks(told):
    assert as_method(told) == as_method(told.split("(")[0] + "()")


@pytest.mark.parametrize("name", objectives.__all__)
def test_each_objective_is_compiled_here(name):
    compiled = {type(objective).__name__ for objective in ONE_OF_EACH}
    require(
        [name] if name not in {*compiled, "Objective"} else [],
        THIS_FILE,
        lambda name: f"    {name}(),",
        "ONE_OF_EACH",
    )


# Of each kind some: what sorts, what sums over a sequence, what wraps another objective, gates and masks. `Surrogate`
# and its like are in test_graph.py; the others are compiled every night.
COMPILED_AT_EACH_CHANGE = (
    "CovariancePenalty",
    "DropOutside",
    "FutureKL",
    "GeometricMean",
    "SequenceMask",
    "SelfAnchored",
    "Smoothed",
    "MassAdaptiveGate",
    "HazardGate",
    "CovarianceMask",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [
        objective
        if type(objective).__name__ in COMPILED_AT_EACH_CHANGE
        else pytest.param(objective, marks=pytest.mark.exhaustive)
        for objective in ONE_OF_EACH
    ],
    ids=lambda x: type(x).__name__,
)
def test_one_graph(objective):
    assert_one_graph(Method(Band(TotalVariation(), 0.1), objective))


# The others are made of the objectives of `test_one_graph` and of rules that are compiled in test_graph.py.
COMPILED_EACH_TIME = ("BAPO", "CPPO", "FIPO", "GSPO", "M2PO")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name in COMPILED_EACH_TIME else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in METHODS
    ],
)
def test_one_graph_by_name(name):
    """The method is created within the graph: older versions of torch.compile break at defaults of bandpo's classes."""
    assert_one_graph(METHODS[name].method())
    logp, *rest = batch(0, dtype=torch.float32)
    compiled = torch.compile(
        lambda *x: policy_loss(*x, method=METHODS[name].method()).loss, backend="eager", fullgraph=True
    )
    torch.testing.assert_close(
        compiled(logp, *rest), policy_loss(logp, *rest, method=name, layout=Rows()).loss
    )


@pytest.mark.parametrize("objective", ONE_OF_EACH, ids=lambda x: type(x).__name__)
def test_no_value_is_read_on_an_accelerator(objective):
    """Meta tensors hold no values: what would synchronise on a real accelerator raises on this one."""
    logp, *rest = (x.to("meta") for x in batch(0, dtype=torch.float32))
    loss, metrics = policy_loss(logp.requires_grad_(), *rest, method=Method(Band(KL(), 0.05), objective))
    loss.backward()
    assert all(x.device.type == "meta" for x in (loss, logp.grad, *metrics.values()))


def assert_one_graph(method):
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    # The batch has an advantage per token at every level.
    loss_of_method = partial(policy_loss, method=method, layout=Rows())
    compiled = torch.compile(loss_of_method, backend=graphs, fullgraph=True, dynamic=True)
    for rows in (3, 5):
        logp, *rest = batch(rows, shape=(rows, 2 * rows), dtype=torch.float32)
        both = []
        for loss_fn in (compiled, loss_of_method):
            leaf = logp.clone().requires_grad_()
            loss, metrics = loss_fn(leaf, *rest)
            loss.backward()
            both.append((loss, metrics, leaf.grad))
        torch.testing.assert_close(*both)
    assert graphs.frame_count == 1


def test_a_text_a_rule_and_nothing_are_methods():
    assert as_method("FixedClip(0.2)") == as_method(FixedClip(0.2)) == Method(FixedClip(0.2))
    assert as_method("DAPO()") == DAPO()
    assert as_method() == Method(Band(KL(), 0.05))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("FixedClip(0.2)",), "clip must be a clip rule such as FixedClip"),
        ((FixedClip(), 0.2), "objective must be an Objective such as Surrogate"),
        ((FixedClip(), Surrogate(), "batch"), "level must be 'token' or 'sequence', got 'batch'"),
    ],
)
def test_a_method_of_something_else_is_refused(arguments, said):
    with pytest.raises((TypeError, ValueError), match=said):
        Method(*arguments)
    with pytest.raises(TypeError, match="method must be a method such as"):
        as_method(0.2)
