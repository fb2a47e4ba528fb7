"""The rollout engine against the trainer: how far apart they are before any update, and what that spends of a clip.

With μ the engine's policy, which sampled, π_old the trainer's at that time and π the policy in training,
``π/μ = π_old/μ · π/π_old``: *mismatch* times *movement*. A trainer's clip rate shows their product, or the second
alone; here the two are told apart. Like `bandpo.Audit`, a `Mismatch` is sums that add up over batches and processes.

Sources: the estimators k1 and k3 of a KL divergence, http://joschu.net/blog/kl-approx.html; effective sample size,
Kish, Survey Sampling, 1965.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bandpo import _checks
from bandpo.audit.metrics import BINS, bin_of
from bandpo.batch import Batch, Tokens
from bandpo.methods import Method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

EXTREME = math.log(2.0)
"""A token is extreme where engine and trainer differ by more than this factor, verl's default threshold."""
LOG_WEIGHT_LIMIT = 20.0
"""Log-weights are kept in ± this before the exponential, as verl does."""
LAG_STARTS = (0, 1, 2, 4, 8, 16)
LAGS = ("0", "1", "2-3", "4-7", "8-15", "16+", "unknown")
"""Groups of version lags, as metrics name them."""


@dataclass(frozen=True)
class Mismatch:
    """Sums over one or more batches; they add up with ``+``.

    >>> rollout, old = torch.tensor([[0.5, 0.1]]).log(), torch.tensor([[0.5, 0.3]]).log()
    >>> batch = Batch.read(old, old, torch.ones(1), logp_anchor=rollout)
    >>> found = Mismatch.from_batch(batch, Method(FixedClip(0.2))).figures()
    >>> found["extreme"], found["blocked_before"], found["blocked_moved"]
    (0.5, 0.5, 0.0)
    """

    sums: Mapping[str, Float[Tensor, "lags bins"]]
    """Over the tokens of each group of lags and bin of the engine's probability."""

    @classmethod
    @torch.no_grad()
    def from_batch(cls, batch: Batch, method: Method, lag: Tensor | None = None) -> Mismatch:
        """The sums of one batch, on its device.

        Args:
            batch: ``logp_old`` is the trainer's before any update on it, ``logp_anchor`` the engine's, of the tokens
                that it sampled; tokens where that is NaN are left out.
            method: Whose clip is looked at, at its level.
            lag: Versions by which the engine's weights were behind, one per token.
        """
        move, old, engine = batch.log_ratio, batch.logp_old, batch.logp_anchor
        assert engine is not None
        mask, rollout = batch.mask.masked_fill(engine.isnan(), 0.0), torch.where(engine.isnan(), old, engine)

        def at(anchor: Tensor, log_ratio: Tensor) -> Tokens:
            around = batch._replace(log_ratio=log_ratio, logp_old=anchor, mask=mask, logp_anchor=None)
            return method.tokens(around)

        g = old - rollout  # log(π_old/μ)
        before, moved, total = at(rollout, g), at(old, move), at(rollout, g + move)
        limited = g.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
        w = limited.exp()
        each = {
            "tokens": mask,
            "g": g,
            "w": w,
            "ww": w.square(),
            "kl_k3": torch.expm1(limited) - limited,
            "extreme": g.abs() > EXTREME,
            "blocked_before": before.blocked,
            "blocked_moved": moved.blocked,
            "blocked_total": total.blocked,
            "spent_before": before.interval_used.abs().clamp(max=1.0),
            "spent_moved": moved.interval_used.abs().clamp(max=1.0),
        }
        bins = bin_of(rollout)
        groups = torch.full_like(bins, len(LAGS) - 1)
        if lag is not None:
            found = torch.bucketize(lag.contiguous(), lag.new_tensor(LAG_STARTS), right=True) - 1
            groups = torch.where(found < 0, groups, found)  # a version from the future is of unknown lag
        wide = _checks.widest_float(old.device)
        cell, counted = (groups * len(BINS) + bins).flatten(), mask.to(wide)

        def by_cell(x: Tensor) -> Tensor:
            sums = counted.new_zeros(len(LAGS) * len(BINS)).index_add_(0, cell, (x * counted).flatten())
            return sums.view(len(LAGS), len(BINS))

        return cls({name: by_cell(x) for name, x in each.items()})

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch({name: x + other.sums[name] for name, x in self.sums.items()})

    @property
    def lags(self) -> list[str]:
        """The groups of lags that hold tokens."""
        return [name for name, n in zip(LAGS, self.sums["tokens"].sum(1).tolist(), strict=True) if n]

    def figures(self, *, lag: str | None = None, bin: str | None = None) -> dict[str, float]:
        """The figures over all tokens, or those of one group of lags, one bin of the engine's probability, or both.

        ``kl_k1``, ``kl_k3``: estimates of KL(μ ‖ π_old), nats per token. ``extreme``: share of tokens with π_old/μ
        outside of [½, 2]. ``ess``: effective sample size of the weights w = π_old/μ over the number of tokens,
        (Σ w)²/(n Σ w²). ``mean_weight``: 1 in expectation, if μ is what sampled. ``blocked_before``: share of
        tokens that the rule, around μ, blocks at π_old, before any update; ``blocked_moved``: around π_old, at π;
        ``blocked_total``: around μ, at π. ``spent_before``, ``spent_moved``: mean share of the interval used, at most
        1 a token.
        """
        lags = slice(None) if lag is None else LAGS.index(lag)
        bins = slice(None) if bin is None else BINS.index(bin)
        s = {name: float(x[lags, bins].sum()) for name, x in self.sums.items()}
        n = s["tokens"]
        if not n:
            return {"tokens": 0.0}
        return {
            "tokens": n,
            "kl_k1": 0.0 - s["g"] / n,
            "ess": s["w"] ** 2 / (n * s["ww"]),
            "mean_weight": s["w"] / n,
            **{
                name: x / n
                for name, x in s.items()
                if name.startswith(("kl_", "extreme", "blocked_", "spent_"))
            },
        }
