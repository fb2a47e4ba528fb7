"""`check`: whether a rule, a divergence, an objective or a method keeps what its base class promises.

A mistake in one of them raises nothing. A rule that returns ratios for log-ratios, or a divergence written for ``u``
where it gets ``log u``, trains and clips nothing. A few points tell.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, NoReturn

import torch

from bandpo import _checks
from bandpo.batch import Tokens
from bandpo.bounds import RatioBounds
from bandpo.divergences import Divergence
from bandpo.errors import InvalidType, InvalidValue
from bandpo.methods import Method
from bandpo.objectives import Objective
from bandpo.rules import Band, ClipMask, ClipRule, FixedClip, bands
from bandpo.schedules import Radius, TrainingState

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check"]

LOGP = torch.tensor(
    [[-30, -20, -10, -5], [-3, -2, -1, -0.5], [-0.1, -1e-2, -1e-3, -1e-4]], dtype=torch.float64, device="cpu"
)
"""From the rarest to the surest token that a trainer meets."""
LOG_U = torch.arange(-50, 51, dtype=torch.float64, device="cpu") / 10
"""0 is exact among them."""
LOG_RATIOS = (-10.0, -1.0, -0.1, 0.0, 0.1, 1.0, 10.0)
MIDWAY = TrainingState(progress=0.5, controller_state={})
"""For a radius that depends on the training state."""
ROUNDING = 1e-6
"""Of a formula in float32."""


def check(setting: ClipRule | Divergence | Objective | Method) -> None:
    """Refuse a rule, divergence, objective or method of your own that breaks what its base class promises.

    It is tried on a few tokens, from p = 1e−13 to 1 − p = 1e−4. `BandGRPOTrainer`, the adapters, `bandpo bounds` and
    `bandpo report` do so by themselves. A radius that is not known yet is tried in the middle of training. A
    rule that holds a tensor is tried but for its bounds.

    - **Rule**: the bounds are log-ratios in the tokens' shape, the lower at most 0, the upper at least 0, and
      `clip_mask` says the same as `bounds`. A `TokenRule` is first settled for these tokens, of three sequences. A
      rule of your own whose upper bound depends on p, and is above 1/p for some p, gets a warning: no ratio exceeds
      1/p, so the bound never binds there. An upper bound that is the same for every p gets none, and neither do the
      rules of bandpo: `DCPO` exceeds 1/p for common tokens by its published formula.
    - **Divergence**: ``f`` is convex with its minimum ``f(0) = 0``, ``df`` is its derivative, and both bounds spend the
      radius.
    - **Objective**: the weights are finite and in the tokens' shape.

    Raises:
        TypeError: ``setting`` is none of these.
        ValueError: it breaks a promise; the message names the point, the value, the reason and the page about it.

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
    for part in rule.arguments().values():
        if isinstance(part, ClipRule):
            _check_rule(part)
    if isinstance(rule, Band):
        _check_f(rule.divergence)
        _check_divergence_of_ratio(rule.divergence)
    now = rule.resolve(MIDWAY, strict=False)
    if any(isinstance(band.radius, torch.Tensor) for band in bands(rule).values()) or any(
        isinstance(band.radius, Radius) for band in bands(now).values()
    ):
        return
    if now.looks_at_tokens:
        now = _sample(now, LOGP).rule
    bounds = now.bounds(LOGP)
    _check_bounds(rule, bounds)
    _check_clip_mask(rule, now, bounds)
    _warn_beyond_simplex(rule, bounds)


def _check_bounds(rule: ClipRule, bounds: RatioBounds) -> None:
    if not _checks.is_a(bounds, RatioBounds):
        _refuse(rule, f"bounds returns a {type(bounds).__name__}, not RatioBounds(log_lower, log_upper)")
    for name in ("log_lower", "log_upper"):
        _check_shape(rule, name, getattr(bounds, name))
    where = ~((bounds.log_lower <= ROUNDING) & (bounds.log_upper >= -ROUNDING))
    if where.any():
        logp, lower, upper = (x[where][0].item() for x in (LOGP, bounds.log_lower, bounds.log_upper))
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
    # What bandpo's own rules do is documented with them; a pair's parts were checked before it.
    if type(rule).__module__.partition(".")[0] == "bandpo":
        return
    # The bounds of such a rule differ between tokens for other reasons than p.
    if rule.looks_at_tokens:
        return
    log_upper = bounds.log_upper.double()
    constant = torch.isclose(log_upper, log_upper.flatten()[0].expand_as(log_upper), rtol=0.0, atol=ROUNDING)
    beyond = log_upper > -LOGP + ROUNDING
    if constant.all() or not beyond.any():
        return
    # Ascending in p, so the first is the rarest token of those.
    logp, upper = LOGP[beyond], log_upper[beyond].exp()
    least, greatest = logp.min().exp().item(), logp.max().exp().item()
    span = f"for p = {least:.4g}" if least == greatest else f"for p from {least:.4g} to {greatest:.4g}"
    warnings.warn(
        f"{rule!r}: the upper bound is above 1/p {span} (at p = {least:.4g} it is {upper[0]:.5g}, 1/p is "
        f"{1 / least:.5g}). No probability exceeds 1, so the bound never binds there; return "
        "torch.minimum(log_upper, -logp_old) as log_upper. See docs/write-your-own.md",
        stacklevel=2,
    )


def _check_clip_mask(rule: ClipRule, now: ClipRule, bounds: RatioBounds) -> None:
    """Compare `ClipRule.clip_mask` with the bounds, near them and at constant ratios."""
    of_bounds = [bound * factor for bound in (bounds.log_lower, bounds.log_upper) for factor in (0.9, 1.1)]
    constant = [torch.full_like(LOGP, log_ratio) for log_ratio in LOG_RATIOS]
    for log_ratio in (*of_bounds, *constant):
        log_ratio = torch.minimum(log_ratio.clamp(min=-30.0), -LOGP)  # within the simplex
        mask = now.clip_mask(log_ratio, LOGP)
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
            # Ratios this close to a bound are left out: rounding decides them.
            near = bound.isfinite() & ((log_ratio - bound).abs() <= 0.05 * bound.abs() + ROUNDING)
            wrong = (clipped != expected) & ~near
            if wrong.any():
                logp, ratio, at = (x[wrong][0] for x in (LOGP, log_ratio, bound))
                if isinstance(now, Band) and type(now).clip_mask is Band.clip_mask:
                    _refuse(
                        now.divergence,
                        f"at {_token(logp)} {name} is {at:g} by log_bounds, but the log-ratio {ratio:g} spends "
                        f"{now.divergence.divergence_of_ratio(ratio, logp):g} of the radius {now.radius_for(logp):g}",
                    )
                verdict = side if clipped[wrong][0] else f"not {side}"
                _refuse(
                    rule,
                    f"at {_token(logp)} clip_mask says that the log-ratio {ratio:g} is {verdict}, but {name} is {at:g}",
                )


def _check_f(divergence: Divergence) -> None:
    f = divergence.f(LOG_U)
    for name, values in (("f", f), ("df", divergence.df(LOG_U))):
        if not _checks.is_a(values, torch.Tensor) or values.shape != LOG_U.shape:
            _refuse(divergence, f"{name} must be elementwise, and map a tensor to one of equal shape")
    f, df = f.double(), divergence.df(LOG_U).double()
    at_1 = f[LOG_U == 0].item()
    if not abs(at_1) <= ROUNDING:
        of_u = divergence.f(torch.ones_like(LOG_U))[0].item()
        hint = ", and f(1) is 0: it seems to be written for u" if abs(of_u) <= ROUNDING else ""
        _refuse(divergence, f"f gets log u, so f(0) must be 0; f(0) is {at_1:g}{hint}")
    if (bad := ~(f >= -ROUNDING)).any():
        reason = "f must be a number ≥ 0, with its minimum at log u = 0 (subtract f'(1)·(u − 1))"
        _refuse(divergence, f"f({LOG_U[bad][0]:g}) is {f[bad][0]:g}, a NaN or below 0; {reason}")
    if not f.max() > 0:
        _refuse(divergence, "f is 0 everywhere, so it puts no bound on the ratio")
    u = LOG_U.exp()
    gap = u.diff()
    slopes, noise = f.diff() / gap, ROUNDING * (f[1:] + f[:-1] + u[1:]) / gap
    if (falls := slopes.diff() < -(noise[1:] + noise[:-1])).any():
        _refuse(
            divergence,
            f"f is not convex: as a function of u its slope falls around log u = {LOG_U[1:-1][falls][0]:g}",
        )
    # A convex function's derivative lies between the slopes on both sides, at a kink too.
    step = 1e-3
    left, right = (
        u * (divergence.f(LOG_U + h).double() - f) / ((LOG_U + h).exp() - u) for h in (-step, step)
    )
    room = 1e-2 * torch.maximum(left.abs(), right.abs()) + 1e-4
    if (bad := ~((left - room <= df) & (df <= right + room))).any():
        slope = (left[bad][0] + right[bad][0]) / 2
        _refuse(
            divergence,
            f"df({LOG_U[bad][0]:g}) is {df[bad][0]:g}, but f's derivative by log u is {slope:g} there",
        )
    limit = divergence.f(torch.full_like(LOG_U, -math.inf))[0].item()
    if not limit >= f[0] - ROUNDING:
        _refuse(
            divergence, f"f(-inf) is {limit:g}, but must be f's limit for u → 0; f({LOG_U[0]:g}) is {f[0]:g}"
        )


def _check_divergence_of_ratio(divergence: Divergence) -> None:
    """Compare `Divergence.divergence_of_ratio` with the base class's, which is the definition."""
    for log_ratio in LOG_RATIOS:
        ratios = torch.minimum(torch.full_like(LOGP, log_ratio), -LOGP / 2)
        values = divergence.divergence_of_ratio(ratios, LOGP)
        expected = Divergence.divergence_of_ratio(divergence, ratios, LOGP)
        _check_shape(divergence, "divergence_of_ratio", values)
        wrong = ~torch.isclose(values.double(), expected.double(), rtol=1e-3, atol=1e-9)
        if wrong.any():
            logp, ratio, value, right = (x[wrong][0].item() for x in (LOGP, ratios, values, expected))
            _refuse(
                divergence,
                f"divergence_of_ratio at {_token(logp)} and the log-ratio {ratio:g} is {value:g}, "
                f"but p·f(r) + (1 − p)·f(c) is {right:g}",
            )


def _check_objective(objective: Objective) -> None:
    logp_old = LOGP.float()
    tokens = _sample(FixedClip(), logp_old)
    for name in ("weight", "surrogate"):
        values = getattr(objective, name)(tokens)
        _check_shape(objective, name, values)
        if (bad := ~values.isfinite()).any():
            value, logp, ratio = (x[bad][0] for x in (values, logp_old, tokens.log_ratio))
            _refuse(
                objective,
                f"{name} returns {value:g} at {_token(logp)} and the log-ratio {ratio:g}, but must be finite",
            )


def _sample(rule: ClipRule, logp_old: Tensor) -> Tokens:
    """Return a few tokens of three sequences, with all that a rule and an objective may look at."""
    moved = torch.linspace(-1, 1, logp_old.numel(), dtype=logp_old.dtype, device="cpu").view_as(logp_old)
    advantages = torch.tensor([1.0, -1.0, -0.5, 0.5], dtype=logp_old.dtype, device="cpu")
    sequence = torch.arange(len(logp_old), device="cpu")
    return Tokens.from_batch(
        (logp_old + moved).clamp(max=-1e-6),
        logp_old,
        advantages.expand_as(logp_old),
        rule=rule,
        entropy=torch.ones_like(logp_old),
        state=TrainingState(MIDWAY.progress, MIDWAY.controller_state, group=sequence // 2, age=sequence),
    )


def _check_shape(setting: object, name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        _refuse(setting, f"{name} is a {type(x).__name__}, not a tensor of the tokens' shape")
    if x.shape != LOGP.shape:
        _refuse(setting, f"{name} has the shape {tuple(x.shape)}, not the tokens' {tuple(LOGP.shape)}")


def _token(logp: float | Tensor) -> str:
    return f"logp_old = {logp:g} (p = {math.exp(logp):.4g})"


def _refuse(setting: object, reason: str) -> NoReturn:
    raise InvalidValue(f"{setting!r}: {reason}; see docs/write-your-own.md")
