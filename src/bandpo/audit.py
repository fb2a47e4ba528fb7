"""What a clip rule does to a run: sums over tokens, cheap enough to be taken on every batch, and their metrics.

The sums add up over micro-batches, steps and processes, so that every rate read from them is the rate over all
tokens. They stay on the device until they are read. docs/audit.md explains every metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bandpo.clipping import Band, ClipRule, FixedClip
from bandpo.losses import judge
from bandpo.rivals import DCPO

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

EDGES = (1e-4, 1e-3, 1e-2, 1e-1)
BINS = ("below_1e-4", "1e-4_to_1e-3", "1e-3_to_0.01", "0.01_to_0.1", "above_0.1")
"""The bins of old probability between `EDGES`, as metrics name them."""
RARE = {"below_0.01": 3, "below_0.1": 4}
"""How many of the bins count as rare, in the metrics of that name."""
COUNTERFACTUALS: Mapping[str, ClipRule] = {
    "clip 0.2": FixedClip(),
    "Clip-Higher": FixedClip(0.2, 0.28),
    "DCPO": DCPO(),
    "Band": Band(),
}
"""Rules that are tried on the run's tensors, whatever its own."""

# Bounds are counted on these grids, so that quantiles can be read from sums: upper − 1, and lower.
_UPPER_GRID = tuple(10 ** (k / 10) for k in range(-30, 31))
_LOWER_GRID = tuple(k / 50 for k in range(51))
_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


@dataclass(frozen=True)
class Audit:
    """Sums over one or more batches; audits of the same rules add up with ``+``.

    >>> logp_old = torch.tensor([[0.08, 0.50]]).log()
    >>> logp = torch.tensor([[0.16, 0.55]]).log()
    >>> metrics = Audit.of(logp, logp_old, torch.tensor([1.0]), clip=FixedClip(0.2, 0.2)).metrics()
    >>> metrics["clip_high/0.01_to_0.1"], metrics["if/Band/clip_high"]
    (1.0, 0.0)
    """

    counterfactuals: tuple[str, ...]
    """Names of the rules tried; the run's own comes before them in ``sums``."""
    sums: Mapping[str, Float[Tensor, ...]]

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        logp: Float[Tensor, "batch time"],
        logp_old: Float[Tensor, "batch time"],
        advantages: Float[Tensor, "batch time"] | Float[Tensor, " batch"],
        mask: Tensor | None = None,
        *,
        clip: ClipRule,
        level: str = "token",
        logp_anchor: Float[Tensor, "batch time"] | None = None,
        entropy: Float[Tensor, "batch time"] | None = None,
        counterfactuals: Mapping[str, ClipRule] = COUNTERFACTUALS,
    ) -> Audit:
        """The sums of one batch, on its device and without a synchronisation.

        Args:
            logp: Log-probabilities of the sampled tokens under the policy in training; like every tensor here, as
                for `bandpo.policy_loss`.
            logp_old: The same under the old policy.
            advantages: One per token or per sequence.
            mask: 1 for tokens that count; all if omitted.
            clip: The run's rule.
            level: ``token`` or ``sequence``.
            logp_anchor: What the bounds surround, if not ``logp_old``.
            entropy: Entropy (nats) of the policy at each token. If omitted, ``−logp_old`` stands for it: its mean is
                an unbiased estimate of the old policy's entropy.
            counterfactuals: Rules to try on the same tensors, by name.
        """
        counted = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask != 0
        mask = counted.float()

        def clean(x: Tensor) -> Tensor:
            return x.detach().float().masked_fill(~counted, 0.0)

        per_token = advantages.unsqueeze(-1) if advantages.dim() < logp.dim() else advantages
        advantages, logp, logp_old = clean(per_token.expand_as(logp)), clean(logp), clean(logp_old)
        anchor = None if logp_anchor is None else clean(logp_anchor)
        judged = [
            judge(logp, logp_old, advantages, mask, clip=rule, level=level, logp_anchor=anchor)
            for rule in (clip, *counterfactuals.values())
        ]
        own = judged[0]
        edges = own.logp_anchor.new_tensor(EDGES).log()
        bins = torch.bucketize(own.logp_anchor, edges, right=True)
        # 1 where a token has this sign of advantage and lies in this bin of probability
        signs = torch.stack([advantages > 0, advantages < 0]).unsqueeze(1)
        cells = (signs & (bins == torch.arange(len(BINS), device=bins.device)[:, None, None])).float()
        mass = own.ratio * advantages.abs()
        blocked = torch.stack([j.low | j.high for j in judged]).float()

        def by_cell(values: Tensor) -> Tensor:
            """Sums of (rules, batch, time) by rule, sign and bin."""
            return torch.einsum("rbt,skbt->rsk", values.float(), cells)

        def on_grid(values: Tensor, grid: tuple[float, ...]) -> Tensor:
            places = torch.bucketize(values, values.new_tensor(grid)).flatten()
            return mask.new_zeros(len(grid) + 1).index_add_(0, places, mask.flatten())

        def total(values: Tensor) -> Tensor:
            return (values * mask).sum()

        band = clip if isinstance(clip, Band) else Band()
        bounds = clip.bounds(own.logp_anchor)
        sums = {
            "tokens": by_cell(torch.ones_like(mass).unsqueeze(0)),
            "mass": by_cell(mass.unsqueeze(0)),
            "outside": by_cell((own.below | own.above).unsqueeze(0)),
            "blocked": by_cell(blocked),
            "blocked_mass": by_cell(blocked * mass),
            "upper_grid": on_grid(torch.expm1(bounds.log_upper), _UPPER_GRID),
            "lower_grid": on_grid(bounds.lower, _LOWER_GRID),
            "upper": total(bounds.upper),
            "lower": total(bounds.lower),
            "counted": mask.sum(),
            "ratio": total(own.ratio),
            "log_ratio_abs": total(own.log_ratio.abs()),
            "approx_kl": total(own.ratio - 1 - own.log_ratio),
            "radius_used": total(
                band.divergence.spent(own.log_ratio, own.logp_anchor) / band.radius_for(own.logp_anchor)
            ),
            "entropy": total(-logp_old if entropy is None else clean(entropy)),
            "calls": mask.new_ones(()),
            "on_policy": (own.log_ratio.abs().max() < 1e-7).float(),
            "inert": 1 - blocked.flatten(1).amax(1),
        }
        return cls(tuple(counterfactuals), {name: x.double() for name, x in sums.items()})

    def __add__(self, other: Audit) -> Audit:
        if self.counterfactuals != other.counterfactuals:
            raise ValueError(f"audits of other rules: {self.counterfactuals} and {other.counterfactuals}")
        return Audit(self.counterfactuals, {name: x + other.sums[name] for name, x in self.sums.items()})

    @property
    def own(self) -> Audit:
        """The same without the counterfactuals, so that it adds up with audits of others or of none."""
        by_rule = ("blocked", "blocked_mass", "inert")
        return Audit((), {name: x[:1] if name in by_rule else x for name, x in self.sums.items()})

    def reduced(self, all_reduce: Callable[[Tensor], Tensor]) -> Audit:
        """The sums over all processes, by one call of ``all_reduce`` on one flat tensor, read to the CPU."""
        flat = all_reduce(torch.cat([x.flatten() for x in self.sums.values()])).cpu()
        sums: dict[str, Tensor] = {}
        for name, x in self.sums.items():
            sums[name], flat = flat[: x.numel()].view(x.shape), flat[x.numel() :]
        return Audit(self.counterfactuals, sums)

    def metrics(self) -> dict[str, float]:
        """Everything that docs/audit.md lists, without what is undefined (a rate over no tokens, an infinite mean)."""
        s = self.reduced(lambda flat: flat).sums
        counted, calls = s["counted"], s["calls"]
        tokens, mass, (positive, negative) = s["tokens"][0], s["mass"][0], (0, 1)
        found = {
            name: s[name] / counted for name in ("approx_kl", "radius_used", "entropy", "upper", "lower")
        }
        found |= {"ratio_mean": s["ratio"] / counted, "log_ratio_abs": s["log_ratio_abs"] / counted}
        found |= {"tokens": counted, "calls": calls, "on_policy": s["on_policy"] / calls}
        for rule, prefix in enumerate(["", *(f"if/{name}/" for name in self.counterfactuals)]):
            blocked, blocked_mass = s["blocked"][rule], s["blocked_mass"][rule, positive]
            found |= {
                f"{prefix}clip_high": blocked[positive].sum() / counted,
                f"{prefix}clip_low": blocked[negative].sum() / counted,
                f"{prefix}inert": s["inert"][rule] / calls,
                f"{prefix}blocked_mass": blocked_mass.sum() / mass[positive].sum(),
            }
            for name, rare in RARE.items():
                found[f"{prefix}blocked_mass_{name}"] = (
                    blocked_mass[:rare].sum() / mass[positive, :rare].sum()
                )
        outside = s["outside"][0] - s["blocked"][0]
        for k, name in enumerate(BINS):
            for sign, word in ((positive, "positive"), (negative, "negative")):
                found[f"tokens_{word}/{name}"] = tokens[sign, k]
                found[f"outside_{word}/{name}"] = outside[sign, k] / tokens[sign, k]
            found[f"mass_positive/{name}"] = mass[positive, k]
            found[f"clip_high/{name}"] = s["blocked"][0, positive, k] / tokens[positive, k]
            found[f"clip_low/{name}"] = s["blocked"][0, negative, k] / tokens[negative, k]
        for name, q in _QUANTILES.items():
            found[f"upper_{name}"] = torch.tensor(1 + _quantile(s["upper_grid"], _UPPER_GRID, q))
            found[f"lower_{name}"] = torch.tensor(_quantile(s["lower_grid"], _LOWER_GRID, q))
        values = {name: float(x) for name, x in found.items()}
        return {name: x for name, x in values.items() if math.isfinite(x)}


def _quantile(counts: Tensor, grid: tuple[float, ...], q: float) -> float:
    """The q-quantile of values counted in the cells that end at ``grid``, and one beyond: infinite there."""
    wanted, seen, left = q * float(counts.sum()), 0.0, 0.0
    for count, right in zip(map(float, counts), (*grid, math.inf), strict=True):
        if seen + count >= wanted and count:
            share = (wanted - seen) / count
            return left + share * (right - left) if math.isfinite(right) else math.inf
        seen, left = seen + count, right
    return math.nan
