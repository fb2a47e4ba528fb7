"""Ratio bounds straight from the definition, in 70-digit arithmetic; shares no code with ``src``."""

from functools import cache

import mpmath as mp

mp.mp.dps = 70


def cressie_read(alpha):
    """Compute f of the Cressie–Read family, whose limits at 0 and 1 are KL and ReverseKL."""
    a = mp.mpf(alpha)
    return lambda u: (u**a - a * u + a - 1) / (a * (a - 1)) if u > 0 or a > 0 else mp.inf


F = {
    "KL()": lambda u: u - 1 - mp.log(u) if u > 0 else mp.inf,
    "ReverseKL()": lambda u: u * mp.log(u) - u + 1 if u > 0 else mp.mpf(1),
    "TotalVariation()": lambda u: abs(u - 1) / 2,
    "PearsonChi2()": lambda u: (u - 1) ** 2,
    "NeymanChi2()": lambda u: (u - 1) ** 2 / u if u > 0 else mp.inf,
    "SquaredHellinger()": lambda u: (mp.sqrt(u) - 1) ** 2 / 2,
    "JensenShannon()": lambda u: ((u * mp.log(u) if u > 0 else 0) - (1 + u) * mp.log((1 + u) / 2)) / 2,
    "triangular": lambda u: (u - 1) ** 2 / (u + 1),
} | {f"AlphaDivergence(alpha={a})": cressie_read(a) for a in (-8.0, -3.0, -1.0, -0.5, 0.5, 0.999, 1.5, 3.0)}


def formula(name: str):
    """Return the f of a divergence.

    Raises:
        LookupError: if `F` lacks it.
    """
    if name not in F:
        raise LookupError(f"tests/oracle.py has no formula of {name}. Add to F:\n\n{line_to_add(name)}\n")
    return F[name]


def line_to_add(name: str) -> str:
    """Return the line of `F` for a divergence, to be completed."""
    return f'    "{name}": lambda u: (u - 1) ** 2 / (u + 1),  # its f(u) in mpmath instead, and its limit at u = 0'


def divergence_of_ratio(name: str, logp: float, ratio: mp.mpf) -> mp.mpf:
    """``g(p, r) = p·f(r) + (1 − p)·f((1 − p·r)/(1 − p))``."""
    f = formula(name)
    p, rest = event(logp)
    others = max(mp.mpf(0), (1 - p * ratio) / rest)
    return p * f(ratio) + rest * f(others)


@cache
def event(logp: float) -> tuple[mp.mpf, mp.mpf]:
    """``p`` and ``1 − p``."""
    return mp.exp(mp.mpf(logp)), -mp.expm1(mp.mpf(logp))


@cache
def margins(name: str, logp: float, radius: float) -> tuple[mp.mpf, mp.mpf]:
    """``(1 − lower, upper − 1)``: how far the ratio may move down and up, each to 20 digits."""
    p, rest = event(logp)

    def margin(side: int, edge: mp.mpf) -> mp.mpf:
        # f at the simplex edge itself decides saturation; KL is infinite there.
        if divergence_of_ratio(name, logp, 1 + side * edge) <= radius:
            return edge

        def excess(log_margin: mp.mpf) -> mp.mpf:
            return mp.log(divergence_of_ratio(name, logp, 1 + side * mp.exp(log_margin)) / radius)

        return mp.exp(root(excess, mp.log(edge) - 60, mp.log(edge)))

    return margin(-1, mp.mpf(1)), margin(1, rest / p)


def reduction(value: mp.mpf, before: mp.mpf) -> mp.mpf:
    """Return the factor for the value at the stale end, when the other end's fell from ``before`` to ``value``."""
    factor = 1 - value / before
    return factor if factor > 0 else mp.mpf(1) / 2


def root(excess, low: mp.mpf, high: mp.mpf) -> mp.mpf:
    """Root of an increasing function to 20 digits: regula falsi, the stale end's value reduced (Anderson–Björck)."""
    at_low, at_high, side = excess(low), excess(high), 0
    for _ in range(300):
        if mp.isinf(at_low) or mp.isinf(at_high):
            point = (low + high) / 2
        else:
            point = (low * at_high - high * at_low) / (at_high - at_low)
        value = excess(point)
        if abs(value) < mp.mpf(10) ** -22 or high - low < mp.mpf(10) ** -20:
            return point
        if value < 0:
            at_high *= reduction(value, at_low) if side < 0 else 1
            low, at_low = point, value
        else:
            at_low *= reduction(value, at_high) if side > 0 else 1
            high, at_high = point, value
        side = -1 if value < 0 else 1
    raise ArithmeticError("no convergence")
