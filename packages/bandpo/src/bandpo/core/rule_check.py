"""`check`, which tests a rule, a divergence, an objective or a method of your own against its base class's contract.

Mistakes in them often raise no error: with a rule that returns ratios instead of log-ratios, or a divergence written
for ``u`` instead of ``log u``, training runs, but nothing is clipped. A few points reveal such mistakes.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, NoReturn

import torch

from . import _checks
from .batch import Batch, Tokens
from .bounds import RatioBounds
from .divergences import Divergence
from .errors import InvalidType, InvalidValue
from .methods import Method
from .objectives import Objective
from .rules import Band, ClipMask, ClipRule, FixedClip, bands
from .schedules import Radius, TrainingState
from .text import PACKAGE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check"]

LOGP = torch.tensor(
    [[-30, -20, -10, -5], [-3, -2, -1, -0.5], [-0.1, -1e-2, -1e-3, -1e-4]], dtype=torch.float64, device="cpu"
)
"""The log-probabilities (nats) that are tested, from those of rare to those of almost certain tokens."""
LOG_U = torch.arange(-50, 51, dtype=torch.float64, device="cpu") / 10
"""The arguments of f that are tested. 0 is exact."""
LOG_RATIOS = (-10.0, -1.0, -0.1, 0.0, 0.1, 1.0, 10.0)
"""The log-ratios (nats) that are tested."""
MIDWAY = TrainingState(progress=0.5, controller_state={})
"""The training state that is used to resolve schedules and controllers."""
ROUNDING = 1e-6
"""Tolerance for the rounding of a formula in float32."""


def check(setting: ClipRule | Divergence | Objective | Method) -> None:
    """Check that a rule, divergence, objective or method of your own satisfies the contract of its base class.

    It is tested on a few tokens, from p = 1e−13 to 1 − p = 1e−4. `BandGRPOTrainer`, the adapters, `bandpo bounds` and
    `rlvet report` call this function. A schedule is tested at its value in the middle of training. For a rule with a
    tensor, the bounds are not tested.

    - **Rule**: the bounds are log-ratios in the tokens' shape, the lower one at most 0, the upper one at least 0, and
      `clip_mask` agrees with `bounds`. A `TokenRule` is tested with the bounds for these tokens, which are in three
      sequences. A warning is given for a rule of your own whose upper bound depends on p and is above 1/p for some p:
      no ratio exceeds 1/p, so the bound has no effect there. There is none for an upper bound that is the same for
      every p, or for bandpo's rules: `DCPO` exceeds 1/p for common tokens by its published formula.
    - **Divergence**: ``f`` is convex with the minimum ``f(0) = 0``, ``df`` is its derivative, and the divergence at
      both bounds is the radius.
    - **Objective**: the weights are finite and in the tokens' shape.

    Raises:
        TypeError: if ``setting`` is none of these.
        ValueError: if a test fails. The message names the point, the value, the reason and the page about it.

    >>> check(Band(KL(), 0.05))
    """
    if isinstance(setting, Method):
        check(setting.clip)
        check(setting.objective)
    elif isinstance(setting, ClipRule):
        _check_rule(setting)
    elif isinstance(setting, Divergence):
        _check_rule(Band(setting, max_ratio=math.inf))
    elif _checks.is_a(setting, Objective):
        _check_objective(setting)
    else:
        raise InvalidType(f"check takes a clip rule, a divergence, an objective or a method, got {setting!r}")


def _check_rule(rule: ClipRule) -> None:
    """Check a rule, and the rules that it consists of."""
    for argument in rule.arguments().values():
        if isinstance(argument, ClipRule):
            _check_rule(argument)
    if isinstance(rule, Band):
        _check_f(rule.divergence)
        _check_divergence_of_ratio(rule.divergence)

    # The bounds cannot be tested if a radius is a tensor, which has the shape of other tokens, or a schedule that
    # depends on more than the progress of the training.
    resolved = rule.resolve(MIDWAY, strict=False)
    if any(isinstance(band.radius, torch.Tensor) for band in bands(rule).values()):
        return
    if any(isinstance(band.radius, Radius) for band in bands(resolved).values()):
        return
    if resolved.depends_on_tokens:
        resolved = _sample(resolved, LOGP).rule
    bounds = resolved.bounds(LOGP)
    _check_bounds(rule, bounds)
    _check_clip_mask(rule, resolved, bounds)
    _warn_beyond_simplex(rule, bounds)


def _check_bounds(rule: ClipRule, bounds: RatioBounds) -> None:
    """Check the type, the shape and the signs of a rule's bounds."""
    if not _checks.is_a(bounds, RatioBounds):
        _refuse(rule, f"bounds returns a {type(bounds).__name__}, not RatioBounds(log_lower, log_upper)")
    for name in ("log_lower", "log_upper"):
        _check_shape(rule, name, getattr(bounds, name))
    wrong = ~((bounds.log_lower <= ROUNDING) & (bounds.log_upper >= -ROUNDING))
    if wrong.any():
        logp, lower, upper = (x[wrong][0].item() for x in (LOGP, bounds.log_lower, bounds.log_upper))
        if math.isnan(lower) or math.isnan(upper):
            reason = "NaN is no bound"
        elif lower > 0 > upper:
            reason = "they are swapped"
        elif lower <= 1 <= upper:
            reason = "log_lower is above 0: these are ratios, return their logarithms"
        else:
            side = "log_lower must not be above 0" if lower > 0 else "log_upper must not be below 0"
            reason = f"{side}, else the ratio 1 is outside"
        _refuse(rule, f"at {_token(logp)} log_lower is {lower:g} and log_upper {upper:g}; {reason}")


def _warn_beyond_simplex(rule: ClipRule, bounds: RatioBounds) -> None:
    """Warn of an upper bound that depends on p and is above 1/p for some p."""
    # The docstrings of bandpo's own rules mention it. The rules that they consist of were checked before.
    if type(rule).__module__.startswith(PACKAGE):
        return
    # The bounds of a TokenRule differ between tokens for other reasons than p.
    if rule.depends_on_tokens:
        return
    log_upper = bounds.log_upper.double()
    constant = torch.isclose(log_upper, log_upper.flatten()[0].expand_as(log_upper), rtol=0.0, atol=ROUNDING)
    beyond = log_upper > -LOGP + ROUNDING
    if constant.all() or not beyond.any():
        return
    # LOGP ascends, so the first of these tokens is the rarest.
    logp = LOGP[beyond]
    upper = log_upper[beyond].exp()
    smallest = logp.min().exp().item()
    largest = logp.max().exp().item()
    span = f"for p = {smallest:.4g}" if smallest == largest else f"for p from {smallest:.4g} to {largest:.4g}"
    warnings.warn(
        f"{rule!r}: the upper bound is above 1/p {span} (at p = {smallest:.4g} it is {upper[0]:.5g}, 1/p is "
        f"{1 / smallest:.5g}). No probability exceeds 1, so the bound has no effect there; return "
        "torch.minimum(log_upper, -logp_old) as log_upper. See docs/write-your-own.md",
        stacklevel=2,
    )


def _check_clip_mask(rule: ClipRule, resolved: ClipRule, bounds: RatioBounds) -> None:
    """Compare `ClipRule.clip_mask` with the bounds, for ratios close to them and for constant ratios.

    Args:
        rule: The rule, for errors.
        resolved: The rule without schedules, for the tested tokens.
        bounds: Its bounds.
    """
    log_ratios: list[Tensor] = []
    for bound in (bounds.log_lower, bounds.log_upper):
        log_ratios += [bound * 0.9, bound * 1.1]
    log_ratios += [torch.full_like(LOGP, log_ratio) for log_ratio in LOG_RATIOS]
    for log_ratio in log_ratios:
        log_ratio = torch.minimum(log_ratio.clamp(min=-30.0), -LOGP)  # within the simplex
        mask = resolved.clip_mask(log_ratio, LOGP)
        if not _checks.is_a(mask, ClipMask):
            _refuse(
                rule,
                f"clip_mask returns a {type(mask).__name__}, not ClipMask(clipped_low, clipped_high)",
            )
        sides = (
            ("clipped_low", "log_lower", mask.clipped_low, bounds.log_lower, log_ratio < bounds.log_lower),
            ("clipped_high", "log_upper", mask.clipped_high, bounds.log_upper, log_ratio > bounds.log_upper),
        )
        for side, name, clipped, bound, expected in sides:
            _check_shape(rule, f"clip_mask.{side}", clipped)
            if clipped.dtype != torch.bool:
                _refuse(rule, f"clip_mask returns {clipped.dtype}, not booleans")
            # Ratios this close to a bound are not compared, because rounding decides.
            near = bound.isfinite() & ((log_ratio - bound).abs() <= 0.05 * bound.abs() + ROUNDING)
            wrong = (clipped != expected) & ~near
            if not wrong.any():
                continue
            logp, ratio, wrong_bound = (x[wrong][0] for x in (LOGP, log_ratio, bound))
            # With Band's own clip_mask, the bounds of the divergence are at fault.
            if isinstance(resolved, Band) and type(resolved).compare is Band.compare:
                value = resolved.divergence.divergence_of_ratio(ratio, logp)
                _refuse(
                    resolved.divergence,
                    f"at {_token(logp)} {name} is {wrong_bound:g} by log_bounds, but the divergence at the log-ratio "
                    f"{ratio:g} is {value:g}, and the radius {resolved.radius_for(logp):g}",
                )
            verdict = side if clipped[wrong][0] else f"not {side}"
            _refuse(
                rule,
                f"at {_token(logp)} the log-ratio {ratio:g} is {verdict} by clip_mask, but {name} is {wrong_bound:g}",
            )


def _check_f(divergence: Divergence) -> None:
    """Check that f is convex with its minimum at 0, and that df is its derivative."""
    f = divergence.f(LOG_U)
    for name, values in (("f", f), ("df", divergence.df(LOG_U))):
        if not _checks.is_a(values, torch.Tensor) or values.shape != LOG_U.shape:
            _refuse(divergence, f"{name} must be elementwise, and map a tensor to one of equal shape")
    f = f.double()
    df = divergence.df(LOG_U).double()
    f_at_0 = f[LOG_U == 0].item()
    if not abs(f_at_0) <= ROUNDING:
        f_at_1 = divergence.f(torch.ones_like(LOG_U))[0].item()
        hint = ", and f(1) is 0: it seems to be written for u" if abs(f_at_1) <= ROUNDING else ""
        _refuse(divergence, f"f gets log u, so f(0) must be 0; f(0) is {f_at_0:g}{hint}")
    negative = ~(f >= -ROUNDING)
    if negative.any():
        reason = "f must be a number ≥ 0, with its minimum at log u = 0 (subtract f'(1)·(u − 1))"
        _refuse(divergence, f"f({LOG_U[negative][0]:g}) is {f[negative][0]:g}, a NaN or below 0; {reason}")
    if not f.max() > 0:
        _refuse(divergence, "f is 0 everywhere, so it puts no bound on the ratio")

    # The slopes of a convex function increase, up to rounding.
    u = LOG_U.exp()
    gap = u.diff()
    slopes = f.diff() / gap
    noise = ROUNDING * (f[1:] + f[:-1] + u[1:]) / gap
    falls = slopes.diff() < -(noise[1:] + noise[:-1])
    if falls.any():
        _refuse(
            divergence,
            f"f is not convex: as a function of u its slope falls around log u = {LOG_U[1:-1][falls][0]:g}",
        )

    # The derivative of a convex function lies between the slopes on both sides, also at a kink.
    def slope_to(log_u: Tensor) -> Tensor:
        return u * (divergence.f(log_u).double() - f) / (log_u.exp() - u)

    step = 1e-3
    slope_below = slope_to(LOG_U - step)
    slope_above = slope_to(LOG_U + step)
    tolerance = 1e-2 * torch.maximum(slope_below.abs(), slope_above.abs()) + 1e-4
    wrong = ~((slope_below - tolerance <= df) & (df <= slope_above + tolerance))
    if wrong.any():
        slope = (slope_below[wrong][0] + slope_above[wrong][0]) / 2
        _refuse(
            divergence,
            f"df({LOG_U[wrong][0]:g}) is {df[wrong][0]:g}, but f's derivative by log u is {slope:g} there",
        )

    limit = divergence.f(torch.full_like(LOG_U, -math.inf))[0].item()
    if not limit >= f[0] - ROUNDING:
        _refuse(
            divergence, f"f(-inf) is {limit:g}, but must be f's limit for u → 0; f({LOG_U[0]:g}) is {f[0]:g}"
        )


def _check_divergence_of_ratio(divergence: Divergence) -> None:
    """Compare `Divergence.divergence_of_ratio` with that of the base class, which is the definition."""
    for log_ratio in LOG_RATIOS:
        ratios = torch.minimum(torch.full_like(LOGP, log_ratio), -LOGP / 2)
        values = divergence.divergence_of_ratio(ratios, LOGP)
        expected = Divergence.divergence_of_ratio(divergence, ratios, LOGP)
        _check_shape(divergence, "divergence_of_ratio", values)
        wrong = ~torch.isclose(values.double(), expected.double(), rtol=1e-3, atol=1e-9)
        if wrong.any():
            logp, ratio, value, definition = (x[wrong][0].item() for x in (LOGP, ratios, values, expected))
            _refuse(
                divergence,
                f"divergence_of_ratio at {_token(logp)} and the log-ratio {ratio:g} is {value:g}, "
                f"but p·f(r) + (1 − p)·f(c) is {definition:g}",
            )


def _check_objective(objective: Objective) -> None:
    """Check the shapes and values of an objective's weight and surrogate on a few tokens."""
    logp_old = LOGP.float()
    tokens = _sample(FixedClip(), logp_old)
    for name in ("weight", "surrogate"):
        values = getattr(objective, name)(tokens)
        _check_shape(objective, name, values)
        infinite = ~values.isfinite()
        if infinite.any():
            value, logp, ratio = (x[infinite][0] for x in (values, logp_old, tokens.log_ratio))
            _refuse(
                objective,
                f"{name} returns {value:g} at {_token(logp)} and the log-ratio {ratio:g}, but must be finite",
            )


def _sample(rule: ClipRule, logp_old: Tensor) -> Tokens:
    """Return a few tokens in three sequences, with all quantities that a rule or an objective may depend on."""
    log_ratio = torch.linspace(-1, 1, logp_old.numel(), dtype=logp_old.dtype, device="cpu")
    advantages = torch.tensor([1.0, -1.0, -0.5, 0.5], dtype=logp_old.dtype, device="cpu")
    sequence = torch.arange(len(logp_old), device="cpu")
    return Batch.read(
        (logp_old + log_ratio.view_as(logp_old)).clamp(max=-1e-6),
        logp_old,
        advantages.expand_as(logp_old),
        entropy=torch.ones_like(logp_old),
        state=TrainingState(MIDWAY.progress, MIDWAY.controller_state, group=sequence // 2, age=sequence),
    ).tokens(rule)


def _check_shape(setting: object, name: str, x: object) -> None:
    """Check that ``x`` is a tensor in the shape of the tested tokens."""
    if not isinstance(x, torch.Tensor):
        _refuse(setting, f"{name} is a {type(x).__name__}, not a tensor of the tokens' shape")
    if x.shape != LOGP.shape:
        _refuse(setting, f"{name} has the shape {tuple(x.shape)}, not the tokens' {tuple(LOGP.shape)}")


def _token(logp: float | Tensor) -> str:
    """Describe a token by its probability, for an error."""
    return f"logp_old = {logp:g} (p = {math.exp(logp):.4g})"


def _refuse(setting: object, reason: str) -> NoReturn:
    """Raise the error of a failed test."""
    raise InvalidValue(f"{setting!r}: {reason}; see docs/write-your-own.md")
