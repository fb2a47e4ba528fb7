"""Tests of `bandpo.check`: the errors for wrong rules, divergences and objectives; bandpo's own pass."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bandpo
from bandpo import (
    DCPO,
    KL,
    Band,
    ClipRule,
    Divergence,
    FDivergence,
    FixedClip,
    Loosest,
    Method,
    RatioBounds,
    TotalVariation,
    TwoSided,
    Unclipped,
    check,
)
from bandpo.core.divergences import (
    AlphaDivergence,
    JensenShannon,
    NeymanChi2,
    PearsonChi2,
    ReverseKL,
    SquaredHellinger,
)
from bandpo.core.objectives import (
    CovarianceMask,
    DropOutside,
    DualClip,
    LogRatioPenalty,
    Objective,
    RatioCap,
    SequenceMask,
    Surrogate,
)
from bandpo.core.rules import ClipMask, LogClip, Tightest, TokenRule
from bandpo.core.schedules import ClipRateController, Linear, Radius, TrainingState
from bandpo.integrations._adapt import read_method

PAGE = r"docs/write-your-own\.md"


def triangular(u):
    return (u - 1) ** 2 / (u + 1)


def with_kinks(u):
    return (u - 1).abs() / 2 + (u - 1.3).clamp(min=0.0) + (0.6 - u).clamp(min=0.0)


# None of ours is refused.

named = st.one_of(
    st.sampled_from([KL(), ReverseKL(), JensenShannon(), TotalVariation(), PearsonChi2(), NeymanChi2()]),
    st.just(SquaredHellinger()),
    st.builds(AlphaDivergence, st.floats(-8, 8)),
)
divergences = named | st.sampled_from([FDivergence(triangular), FDivergence(with_kinks)])
sizes = st.floats(1e-6, 1e3)
radii = st.one_of(
    sizes,
    st.builds(Linear, sizes, sizes),
    st.builds(ClipRateController, st.floats(1e-3, 1), sizes),
    sizes.map(lambda size: torch.full((5, 7), size)),
)
caps = st.one_of(st.floats(1.01, 100), st.just(math.inf))
rules = st.recursive(
    st.one_of(
        st.builds(Band, divergences, radii, caps),
        st.builds(FixedClip, st.floats(0, 1), st.one_of(st.floats(0, 10), st.just(math.inf))),
        st.builds(DCPO, st.floats(0, 2), st.floats(0, 2), caps),
        st.just(Unclipped()),
    ),
    lambda inner: st.one_of(*(st.builds(kind, inner, inner) for kind in (TwoSided, Loosest, Tightest))),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(rule=rules)
def test_no_rule_of_ours_is_refused(rule):
    check(rule)


@settings(max_examples=20, deadline=None)
@given(divergence=named, radius=st.floats(1.2e-38, 1e-6) | st.floats(1e3, 1e6))
def test_no_radius_is_refused_however_extreme(divergence, radius):
    check(Band(divergence, radius, math.inf))


@pytest.mark.parametrize("alpha", [5e-324, -5e-324, 1e-310, 1e-45, -1e-40, 1e-31, 1e-29])
def test_an_alpha_of_next_to_nothing_is_kl(alpha):
    check(Band(AlphaDivergence(alpha)))
    x = torch.linspace(-9, 9, 99)
    for name in ("f", "df"):
        found, expected = getattr(AlphaDivergence(alpha), name)(x), getattr(AlphaDivergence(0.0), name)(x)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


# Watch needs transformers, and is no rule.
OURS = [cls for name in bandpo.__all__ if name != "Watch" and isinstance(cls := getattr(bandpo, name), type)]
NEEDS_ARGUMENTS = {
    DualClip: DualClip(3.0),
    SequenceMask: SequenceMask(0.5),
    FDivergence: FDivergence(triangular),
}
NEEDS_ARGUMENTS |= {AlphaDivergence: AlphaDivergence(0.5), LogClip: LogClip(0.2, 0.3)}
NEEDS_ARGUMENTS |= {RatioCap: RatioCap(3.0), LogRatioPenalty: LogRatioPenalty(0.1)}
NEEDS_ARGUMENTS |= {kind: kind(Band(), FixedClip()) for kind in (TwoSided, Loosest, Tightest)}


@pytest.mark.parametrize(
    "cls",
    [
        cls
        for cls in OURS
        if issubclass(cls, (ClipRule, Divergence, Objective, Method))
        and cls not in (ClipRule, TokenRule, Divergence, Objective, Method)
    ],
)
def test_nothing_that_is_exported_is_refused(cls):
    check(NEEDS_ARGUMENTS[cls] if cls in NEEDS_ARGUMENTS else cls())


@pytest.mark.parametrize(
    "objective", [DropOutside(math.inf, both_sides=True), Surrogate(-0.3), CovarianceMask(0.5)]
)
def test_objectives_of_ours_with_other_settings(objective):
    check(DualClip(3.0, SequenceMask(0.5, objective)))


def test_the_page_s_own_examples_are_not_refused():
    @dataclass(frozen=True)
    class BySurprise(ClipRule):
        scale: float = 0.05

        def bounds(self, logp_old):
            width = self.scale * (1 - logp_old)
            return RatioBounds(log_lower=-width, log_upper=torch.minimum(width, -logp_old))

    @dataclass(frozen=True)
    class LeCam(Divergence):
        def f(self, log_u):
            return torch.expm1(log_u) * torch.tanh(log_u / 2)

        def df(self, log_u):
            half = torch.tanh(log_u / 2)
            return torch.exp(log_u) * half * (2 - half)

    check(BySurprise())
    check(Tightest(BySurprise(), FixedClip(1.0, 1.0)))
    check(LeCam())
    check(TwoSided(FixedClip(), Band(LeCam(), Linear(0.05, 0.01))))


def test_a_radius_that_no_moment_tells_is_left_to_whoever_knows_it():
    class ByLength(Radius):
        needs = "length"
        range = (0.1, 0.2)

    check(Band(KL(), ByLength()))
    with pytest.raises(ValueError, match=PAGE):
        check(Band(WrittenForU(), ByLength()))


# Rules.


def mine(base, **methods):
    """Create a user's class from functions without ``self`` as methods."""
    named = {name: lambda self, *a, method=method: method(*a) for name, method in methods.items()}
    return dataclass(frozen=True)(type("Mine", (base,), named))()


def rule(lower, upper, **methods):
    return mine(ClipRule, bounds=lambda logp: RatioBounds(lower(logp), upper(logp)), **methods)


def all_of(value):
    return lambda logp_old: torch.full_like(logp_old, value)


def nothing(log_ratio, logp_old):
    return ClipMask(
        torch.zeros_like(log_ratio, dtype=torch.bool), torch.zeros_like(log_ratio, dtype=torch.bool)
    )


def the_other_way(log_ratio, logp_old):
    return ClipMask(log_ratio > 0.2, log_ratio < -0.2)


def of_ratios(log_ratio, logp_old):
    return ClipMask(log_ratio < 0.8, log_ratio > 1.2)


def nearer(log_ratio, logp_old):
    return ClipMask(log_ratio < -0.05, log_ratio > 0.05)


def also_at_one(log_ratio, logp_old):
    return ClipMask(log_ratio < -0.2, (log_ratio > 0.2) | (log_ratio == 0))


WRONG_RULES = {
    "ratios": (
        rule(all_of(0.8), all_of(1.2)),
        r"at logp_old = -30 .* log_lower is 0\.8.*above 0.*are ratios",
    ),
    "swapped": (rule(all_of(0.2), all_of(-0.2)), r"log_lower is 0\.2 and log_upper -0\.2.*swapped"),
    "lower": (rule(all_of(0.3), all_of(0.2)), r"log_lower is 0\.3 and log_upper 0\.2.*above 0"),
    "upper": (rule(all_of(-0.2), all_of(-0.1)), r"log_upper -0\.1.*below 0"),
    "nan": (rule(all_of(-0.2), all_of(math.nan)), r"log_upper nan.*NaN"),
    "nan for some": (
        rule(
            lambda logp: torch.log(0.5 + logp.exp() * 0 + (logp > -20) * 0.1) * torch.sqrt(logp + 20),
            all_of(0.2),
        ),
        r"log_lower is nan.*NaN",
    ),
    "another shape": (
        rule(lambda logp: logp.sum(), all_of(0.2)),
        r"log_lower has the shape \(\), not the tokens",
    ),
    "no tensor": (rule(lambda logp: -0.2, all_of(0.2)), "log_lower is a float"),
    "clip_mask never": (
        rule(all_of(-0.2), all_of(0.2), clip_mask=nothing),
        r"is not clipped_low by clip_mask, but log_lower is -0\.2",
    ),
    "clip_mask the other way": (rule(all_of(-0.2), all_of(0.2), clip_mask=the_other_way), "by clip_mask"),
    "clip_mask of ratios": (rule(all_of(-0.2), all_of(0.2), clip_mask=of_ratios), "by clip_mask"),
    "clip_mask nearer": (
        rule(all_of(-0.18), all_of(0.18), clip_mask=nearer),
        r"log-ratio -0\.162 is clipped_low by clip_mask, but log_lower is -0\.18",
    ),
    "clip_mask also at a ratio of 1": (
        rule(all_of(-0.2), all_of(0.2), clip_mask=also_at_one),
        r"log-ratio 0 .*is clipped_high by clip_mask, but log_upper is 0\.2",
    ),
    "clip_mask as one tensor": (
        rule(all_of(-0.2), all_of(0.2), clip_mask=lambda log_ratio, logp: log_ratio.abs() > 0.2),
        r"clip_mask returns a Tensor, not ClipMask\(clipped_low, clipped_high\)",
    ),
    "clip_mask as numbers": (
        rule(all_of(-0.2), all_of(0.2), clip_mask=lambda log_ratio, logp: ClipMask(log_ratio, log_ratio)),
        "clip_mask returns torch.float64, not booleans",
    ),
}


@pytest.mark.parametrize("name", WRONG_RULES)
@pytest.mark.parametrize(
    "within",
    [lambda r: r, lambda r: Tightest(Loosest(FixedClip(), r), FixedClip(1.0, 3.0))],
    ids=["", "within"],
)
def test_a_wrong_rule_is_refused_with_its_reason_and_the_page(name, within):
    wrong, message = WRONG_RULES[name]
    with pytest.raises(ValueError, match=rf"(?s)Mine\(\).*{message}.*{PAGE}"):
        check(within(wrong))


def test_bounds_that_are_no_ratio_bounds_are_refused():
    @dataclass(frozen=True)
    class Pair(ClipRule):
        def bounds(self, logp_old):
            return logp_old * 0 - 0.2, logp_old * 0 + 0.2

    with pytest.raises(ValueError, match=rf"Pair\(\): bounds returns a tuple, not RatioBounds.*{PAGE}"):
        check(Pair())


# The simplex.


@dataclass(frozen=True)
class SquareRoot(ClipRule):
    width: float = 0.1
    within: bool = False

    def bounds(self, logp_old):
        h = self.width * (-logp_old / 2).exp()
        upper = h.log1p()
        if self.within:
            upper = torch.minimum(upper, -logp_old)
        return RatioBounds((-h).clamp(min=-1).log1p(), upper)


@pytest.mark.parametrize(
    "within", [lambda r: r, lambda r: TwoSided(FixedClip(), r), Method], ids=["", "part", "method"]
)
def test_a_bound_by_probability_beyond_the_simplex_is_warned_of(within):
    message = (
        r"SquareRoot\(.*\): the upper bound is above 1/p for p from 0\.99 to 0\.9999.*"
        r"at p = 0\.99 it is 1\.1005, 1/p is 1\.0101.*has no effect.*torch\.minimum\(log_upper, -logp_old\).*"
        rf"{PAGE}"
    )
    with pytest.warns(UserWarning, match=message) as warned:
        check(within(SquareRoot()))
    assert len(warned) == 1


@pytest.mark.parametrize(
    "silent",
    [
        SquareRoot(within=True),
        rule(all_of(-0.2), all_of(0.2)),  # the same for every p, as PPO's
        rule(all_of(-math.inf), all_of(math.inf)),
        rule(lambda logp: logp.clamp(min=-1.0), lambda logp: -logp),  # 1/p itself
        FixedClip(0.2, 0.28),
        DCPO(),
        Loosest(Band(), FixedClip(0.2)),
        Unclipped(),
    ],
    ids=repr,
)
def test_no_warning_where_a_bound_keeps_the_simplex_or_makes_no_claim_about_p(silent, recwarn):
    check(silent)
    assert not recwarn.list


# Divergences.


@dataclass(frozen=True)
class WrittenForU(Divergence):
    def f(self, log_u):
        return triangular(log_u)

    def df(self, log_u):
        return (log_u - 1) * (log_u + 3) / (log_u + 1) ** 2


def divergence(f, df, **methods):
    return mine(Divergence, f=f, df=df, **methods)


def kl(x):
    return torch.expm1(x) - x


LOG = torch.log
WRONG_DIVERGENCES = {
    "for u": (divergence(triangular, lambda u: 1 - 4 / (u + 1) ** 2), r"f\(0\) is 1.*written for u"),
    "KL for u": (divergence(lambda u: u - 1 - LOG(u), lambda u: 1 - 1 / u), r"f\(0\) is inf.*written for u"),
    "chi2 for u": (divergence(lambda u: (u - 1) ** 2, lambda u: 2 * (u - 1)), r"f\(0\) is 1.*written for u"),
    "not 0 at 1": (divergence(lambda x: kl(x) + 1, torch.expm1), r"f\(0\) is 1"),
    "negative": (divergence(lambda x: -kl(x), lambda x: -torch.expm1(x)), r"f\(-5\) is -4\.0.*below 0"),
    "no minimum at 1": (divergence(lambda x: -x, lambda x: -torch.ones_like(x)), "below 0.*minimum"),
    "not convex": (divergence(lambda x: x.abs() / 2, lambda x: x.sign() / 2), "not convex"),
    "bounded": (
        divergence(lambda x: 1 - torch.exp(-(x**2)), lambda x: 2 * x * torch.exp(-(x**2))),
        "not convex",
    ),
    "nothing": (divergence(lambda x: 0 * x.clamp(-9, 9), lambda x: 0 * x), "0 everywhere.*no bound"),
    "f' for df": (
        divergence(kl, lambda x: 1 - torch.exp(-x)),
        r"df\(-5\) is -147.*derivative by log u is -0\.99",
    ),
    "df of the other sign": (divergence(kl, lambda x: -torch.expm1(x)), "derivative by log u"),
    "df of another factor": (divergence(kl, lambda x: 2 * torch.expm1(x)), "derivative by log u"),
    "no limit": (
        divergence(lambda x: torch.exp(x) * x - torch.expm1(x), lambda x: torch.exp(x) * x),
        r"f\(-inf\) is nan.*limit",
    ),
    "nan": (divergence(lambda x: torch.where(x < -1, math.nan, kl(x)), torch.expm1), r"f\(-5\) is nan"),
    "of another shape": (divergence(lambda x: kl(x).sum(), torch.expm1), "f must be elementwise"),
    "divergence_of_ratio off by 1 %": (
        divergence(
            kl,
            torch.expm1,
            divergence_of_ratio=lambda log_ratio, logp: 1.01 * KL().divergence_of_ratio(log_ratio, logp),
        ),
        r"divergence_of_ratio.* is .*, but p·f\(r\) \+ \(1 − p\)·f\(c\) is",
    ),
    "divergence_of_ratio of another": (
        divergence(kl, torch.expm1, divergence_of_ratio=lambda log_ratio, logp: log_ratio**2),
        r"divergence_of_ratio.* is .*, but p·f\(r\) \+ \(1 − p\)·f\(c\) is",
    ),
    "bounds as ratios": (
        divergence(kl, torch.expm1, log_bounds=lambda logp, radius: (0.8 + 0 * logp, 1.2 + 0 * logp)),
        "log_bounds.* radius 0.05",
    ),
    "bounds too wide": (
        divergence(
            kl, torch.expm1, log_bounds=lambda logp, radius: [x * 1.3 for x in KL().log_bounds(logp, radius)]
        ),
        "log_bounds.* radius 0.05",
    ),
    "bounds too narrow": (
        divergence(
            kl, torch.expm1, log_bounds=lambda logp, radius: [x / 1.3 for x in KL().log_bounds(logp, radius)]
        ),
        "log_bounds.* radius 0.05",
    ),
}


@pytest.mark.parametrize("name", WRONG_DIVERGENCES)
def test_a_wrong_divergence_is_refused_with_its_reason_and_the_page(name):
    wrong, message = WRONG_DIVERGENCES[name]
    for setting in (wrong, TwoSided(FixedClip(), Band(wrong, Linear(0.08, 0.02)))):
        with pytest.raises(ValueError, match=rf"(?s)Mine\(\).*{message}.*{PAGE}"):
            check(setting)


def test_a_right_divergence_of_ones_own_passes_with_a_spent_and_bounds_of_its_own():
    check(
        divergence(kl, torch.expm1, divergence_of_ratio=KL().divergence_of_ratio, log_bounds=KL().log_bounds)
    )


# Objectives and methods.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            mine(Objective, weight=lambda tokens: tokens.ratio.mean()),
            r"weight has the shape \(\), not the tokens",
        ),
        (mine(Objective, weight=lambda tokens: 1.0), "weight is a float"),
        (mine(Objective, weight=lambda tokens: LOG(tokens.log_ratio)), r"weight returns nan .* finite"),
        (mine(Objective, weight=lambda tokens: 1 / (tokens.log_ratio * 0)), "weight returns -?inf"),
        (
            mine(Objective, weight=lambda tokens: tokens.ratio, surrogate=lambda tokens: tokens.ratio / 0),
            "surrogate returns inf",
        ),
    ],
)
def test_a_wrong_objective_is_refused(wrong, message):
    with pytest.raises(ValueError, match=rf"Mine\(\): {message}.*{PAGE}"):
        check(wrong)


def test_a_method_is_checked_by_its_parts():
    check(Method(FixedClip()))
    with pytest.raises(ValueError, match="are ratios"):
        check(Method(WRONG_RULES["ratios"][0]))
    with pytest.raises(ValueError, match="weight is a float"):
        check(Method(FixedClip(), mine(Objective, weight=lambda tokens: 1.0)))


def test_what_is_none_of_them_is_refused():
    with pytest.raises(TypeError, match=r"check takes .* got 'Band\(\)'"):
        check("Band()")


# Who calls it.

MODULE = """
from dataclasses import dataclass

import torch
from bandpo import ClipRule, Divergence, RatioBounds
from bandpo.core.objectives import Objective


@dataclass(frozen=True)
class Ratios(ClipRule):
    def bounds(self, logp_old):
        return RatioBounds(torch.full_like(logp_old, 0.8), torch.full_like(logp_old, 1.2))


@dataclass(frozen=True)
class ForU(Divergence):
    def f(self, u):
        return (u - 1) ** 2

    def df(self, u):
        return 2 * (u - 1)


@dataclass(frozen=True)
class Number(Objective):
    def weight(self, tokens):
        return 1.0
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mine_that_are_wrong.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "mine_that_are_wrong"


def test_every_adapter_refuses_it_where_it_reads_its_settings(module):
    with pytest.raises(ValueError, match=r"^actor\.method: .*Ratios\(\).*are ratios"):
        read_method("actor.", method=f"{module}.Ratios()")
    with pytest.raises(ValueError, match=r"^method: .*ForU\(\).*written for u"):
        read_method(method=f"Band({module}.ForU(), 0.05)")
    with pytest.raises(ValueError, match=r"^method: .*Number\(\).*weight"):
        read_method(method=f"Method(FixedClip(), {module}.Number())")


def test_an_adapter_checks_a_text_once(monkeypatch):
    from bandpo.integrations import _adapt

    seen = []
    monkeypatch.setattr(_adapt, "check", seen.append)
    for _ in range(3):  # verl reads its settings for each loss
        read_method(method="Method(Band(KL(), 0.0123), DropOutside(12.3))")
    assert seen == [Method(Band(KL(), 0.0123), DropOutside(12.3))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bandpo", "bounds", "--divergence", "{}.ForU"], "written for u"),
        (["rlvet", "report", ".", "--method", "{}.Ratios()"], "are ratios"),
        (["rlvet", "report", ".", "--method", "Band({}.ForU(), 0.1)"], "written for u"),
    ],
)
def test_the_commands_refuse_it_in_one_line(module, arguments, message, monkeypatch, tmp_path):
    pytest.importorskip("typer")
    cli = pytest.importorskip(f"{arguments[0]}.cli")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [argument.format(module) for argument in arguments])
    with pytest.raises(SystemExit, match=rf"^error: mine|^error: .*{message}"):
        cli.main()
    assert not [*tmp_path.glob("*.html")]


def test_a_stand_in_moment_knows_every_radius_of_ours():
    rule = Loosest(
        Band(KL(), Linear(0.1, 0.2)),
        TwoSided(Band(KL(), ClipRateController(0.1, 0.2)), Band(KL(), ClipRateController(1e-3, 0.1))),
    )
    check(rule)
    assert rule.resolve(TrainingState(), strict=False) is rule
