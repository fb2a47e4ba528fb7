"""Tables of bounds: one radius of a divergence, for many tokens without a root search for each.

The bounds of a token depend on its probability p alone. Their logarithms are smooth functions of the token's log-odds
``z = log((1 − p)/p)``, except at one point on each side, from which on the bound is the edge of the simplex. A table
has a cubic polynomial for each short interval of z, through four values of the solver in float64. Towards that point
the intervals become shorter by a constant factor, since some bounds change there as the logarithm of the distance.

The paper proposes a lookup table for divergences whose bounds have no closed form. This one is compared with the solver
when it is made, and is not used if its error is above `TOLERANCE`.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .._checks import values_can_be_read
from ..divergences import _solver

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from ..divergences.base import Divergence

TOLERANCE = 1e-5
"""The largest relative error of ``upper − 1`` and ``1 − lower``."""
FEW_TOKENS = 4096
"""The number of tokens of a call from which on a table is used. To make one takes as long as to solve for some 100,000
tokens, once in a process; a training has these soon. No call depends on what was called before, so that results can be
repeated."""
FARTHEST = -_solver.floor(torch.float32)
"""The largest ``−log p`` and ``|z|`` for which there are bounds in float32."""
PER_UNIT = 16
"""The number of intervals for each unit of z, far from the edge."""
PER_OCTAVE = 8
"""The number of intervals for each halving of the distance to the edge."""
NEAREST = 2.0**-24
"""The smallest distance to the edge. At a smaller one the bound is the edge, up to rounding."""


def bounds_table(
    divergence: Divergence, logp: Float[Tensor, "*shape"], radius: float | Tensor
) -> Table | None:
    """Return the table of a divergence and radius, or None if the solver is to be used for these tokens.

    The solver is used for few tokens, in float64, for a radius per token, on accelerators and under ``torch.compile``.
    """
    if divergence.one_pass or isinstance(radius, torch.Tensor):
        return None
    if logp.dtype != torch.float32 or logp.numel() < FEW_TOKENS or not values_can_be_read(logp):
        return None
    try:
        hash(divergence)
    except TypeError:  # a divergence with a field that cannot be hashed
        return None
    return _made(divergence, radius)


@functools.lru_cache(maxsize=16)
def _made(divergence: Divergence, radius: float) -> Table | None:
    """Make the table of a divergence and radius, or return None if it misses its accuracy."""
    with torch.inference_mode(False), torch.no_grad():
        made = Table(make_side(divergence, radius, above=False), make_side(divergence, radius, above=True))
        error = max(side_error(divergence, radius, side) for side in (made.lower, made.upper))
    if error <= TOLERANCE:
        return made
    warnings.warn(
        f"bounds of {divergence!r} with radius {radius:g} are solved for each token, which is slower: "
        f"a table of them would have an error of {error:.1g}",
        stacklevel=4,
    )
    return None


@dataclass(frozen=True, eq=False)
class Table:
    """The bounds of one divergence and radius in float32."""

    lower: Side
    upper: Side

    def log_bounds(self, logp: Float[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
        """Compute the smallest and the largest log-ratio within the trust region."""
        t, z = _coordinates(logp)
        return self.lower.log_bound(t, z), self.upper.log_bound(t, z)

    def log_bound(self, logp: Float[Tensor, "*shape"], above: Bool[Tensor, "*shape"]) -> Tensor:
        """Compute one bound of each token: the upper one where ``above``, else the lower one."""
        log_lower, log_upper = self.log_bounds(logp)
        return torch.where(above, log_upper, log_lower)


@dataclass(frozen=True, eq=False)
class Side:
    """The lower or the upper bounds of a table."""

    above: bool
    edge: float
    """The z from which on the bound is the edge of the simplex: for smaller z above, for larger z below."""
    polynomials: Float[Tensor, "intervals 4"]
    """The coefficients of each interval's polynomial, that of the constant first."""

    def log_bound(self, t: Float[Tensor, "*shape"], z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Compute the log-ratio of the bound for tokens with ``t = −log p`` and the log-odds z."""
        distance = z - self.edge if self.above else self.edge - z
        # `position`, with the whole and the fractional part of each summand apart: rounding of their sum would exceed
        # that of z.
        scaled = z * (PER_UNIT if self.above else -PER_UNIT)
        whole = scaled.floor()
        start, offset = divmod(PER_UNIT * (-self.edge if self.above else self.edge), 1)
        octaves = distance.clamp(min=NEAREST).log2_()
        within = (
            octaves.mul_(PER_OCTAVE).add_(offset - PER_OCTAVE * math.log2(NEAREST)).add_(scaled.sub_(whole))
        )
        carry = within.floor()
        within.sub_(carry)
        index = whole.add_(carry).add_(start).to(torch.int32).clamp_(0, len(self.polynomials) - 1)
        c = torch.nn.functional.embedding(index, self.polynomials)
        value = torch.addcmul(c[..., 2], c[..., 3], within)
        value = torch.addcmul(c[..., 1], value, within)
        value = torch.addcmul(c[..., 0], value, within)
        at_edge = t if self.above else -math.inf
        return torch.where(distance < NEAREST, at_edge, value)


def position(distance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute the number of intervals between the edge and a point at a distance in z of at least `NEAREST`."""
    return PER_UNIT * distance + PER_OCTAVE * torch.log2(distance / NEAREST)


def distance_at(place: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute the distance at which `position` has a value, by Newton's method for its logarithm."""
    octave = PER_OCTAVE / math.log(2)
    log_distance = torch.minimum(
        place / octave + math.log(NEAREST), (place / PER_UNIT).clamp(min=1e-300).log()
    )
    for _ in range(40):
        distance = log_distance.exp()
        excess = PER_UNIT * distance + octave * (log_distance - math.log(NEAREST)) - place
        log_distance = log_distance - excess / (PER_UNIT * distance + octave)
    return log_distance.exp()


def _coordinates(logp: Float[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
    """Compute ``t = −log p``, within the range of the table, and ``z = log((1 − p)/p)``."""
    t = -logp.clamp(-FARTHEST, -math.exp(-FARTHEST))
    return t, torch.expm1(-t).neg_().log_().add_(t)


def make_side(divergence: Divergence, radius: float, *, above: bool) -> Side:
    """Make the table of the lower or the upper bounds."""
    edge = edge_of(divergence, radius, above=above)
    direction = 1.0 if above else -1.0
    farthest = max(FARTHEST - direction * edge, 2 * NEAREST)
    count = math.ceil(position(torch.tensor(farthest, dtype=torch.float64)).item())
    # Chebyshev's points of an interval, and the matrix from the values there to the coefficients.
    within = (1 - torch.cos((torch.arange(4, dtype=torch.float64) + 0.5) * math.pi / 4)) / 2
    to_coefficients = torch.inverse(torch.stack([within**k for k in range(4)], dim=1))
    places = torch.arange(count, dtype=torch.float64)[:, None] + within
    values = exact(divergence, radius, edge + direction * distance_at(places), above=above)
    # At the first point a bound of 0 may already be reached, up to rounding.
    return Side(above, edge, (values.clamp(min=-1e36) @ to_coefficients.T).float())


def logp_at(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute ``log p`` from the log-odds in float64; at ``−z`` it is ``log(1 − p)``."""
    return -torch.nn.functional.softplus(z, threshold=800.0)


def exact(divergence: Divergence, radius: float, z: Float[Tensor, "*shape"], *, above: bool) -> Tensor:
    """Compute the bounds of one side in float64 from the log-odds."""
    logp = logp_at(z)
    log_lower, log_upper = divergence.log_bounds(logp, torch.full_like(logp, radius))
    return torch.minimum(log_upper.clamp(min=0.0), -logp) if above else log_lower.clamp(max=0.0)


def edge_of(divergence: Divergence, radius: float, *, above: bool) -> float:
    """Return the z from which on the bound is the edge of the simplex, or one outside of the range of the table.

    The divergence at an edge is monotone in z, so a search in a finer and finer grid finds it.
    """
    low, high = -FARTHEST - 1, FARTHEST + 1
    for _ in range(6):
        grid = torch.linspace(low, high, 1001, dtype=torch.float64)
        z = grid if above else -grid
        logp = logp_at(z)
        rarer = _solver.rarer_event(logp, logp_at(-z))
        sign = rarer.sign(torch.full_like(logp, above, dtype=torch.bool))
        count = int((_solver.divergence_at_edge(divergence, rarer, sign) <= radius).sum())
        low, high = grid[max(count - 1, 0)].item(), grid[min(count, 1000)].item()
    return low if above else -low


def side_error(divergence: Divergence, radius: float, side: Side) -> float:
    """Return the largest relative error of a side's margins, at one point of each of its intervals."""
    count = len(side.polynomials)
    # Points at different places within the intervals, the ends included.
    places = torch.arange(count, dtype=torch.float64)
    places += (places * 0.6180339887) % 1
    direction = 1.0 if side.above else -1.0
    z = (side.edge + direction * distance_at(places)).clamp(-FARTHEST, FARTHEST)
    logp = logp_at(z).float().clamp(max=-math.exp(-FARTHEST))
    margin = side.log_bound(*_coordinates(logp)).double().expm1()
    wanted = exact(divergence, radius, logp.double().neg().expm1().log(), above=side.above).expm1()
    error = ((margin - wanted) / wanted).abs()
    return error.nan_to_num(nan=math.inf).max().item()
