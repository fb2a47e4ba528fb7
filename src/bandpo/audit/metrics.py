"""What a method does to a run: sums over tokens, cheap enough to be taken on every batch, and their metrics.

The sums add up over micro-batches, steps and processes, so that every rate read from them is the rate over all
tokens. They stay on the device until they are read. docs/record.md explains every metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from bandpo import _checks
from bandpo._packed import check_unpacked
from bandpo._shown import as_html
from bandpo.audit.luck import hard_advantages
from bandpo.batch import Batch, Tokens
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.rules import DCPO, Band, ClipRule, FixedClip, bands
from bandpo.runs.metric_names import BINS, RARE
from bandpo.schedules import TrainingState
from bandpo.text import as_method

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

EDGES = (1e-4, 1e-3, 1e-2, 1e-1)
"""The old probabilities between the bins of `bandpo.runs.metric_names.BINS`."""
LOGGED = (
    "tokens",
    "on_policy",
    "inert",
    "clip_high",
    "clip_low",
    "approx_kl",
    "radius_used",
    "tokens_positive_below_0.1",
    "mass_positive_below_0.1",
    "clip_high_below_0.1",
    "blocked_mass_below_0.1",
    "if/Band/blocked_mass_below_0.1",
)
"""What a trainer logs of `Audit.metrics` unless it is asked for all: enough for the whole verdict of `bandpo audit`."""
COUNTERFACTUALS: Mapping[str, Method | ClipRule | str] = {
    "clip 0.2": FixedClip(),
    "Clip-Higher": FixedClip(0.2, 0.28),
    "DCPO": DCPO(),
    "Band": Band(),
}
"""Rules and methods that are tried on the run's tensors, whatever its own."""
KEPT_WHOLE = 1e-5
"""A share of gradient kept this near to 1 counts as 1: weights that are not the ratio itself round in float32."""


@dataclass(frozen=True)
class Audit:
    """Sums over one or more batches; audits of the same methods add up with ``+``.

    >>> logp_old = torch.tensor([[0.08, 0.50]]).log()
    >>> logp = torch.tensor([[0.16, 0.55]]).log()
    >>> metrics = Audit.from_batch(logp, logp_old, torch.tensor([1.0]), method=FixedClip(0.2, 0.2)).metrics()
    >>> metrics["clip_high/0.01_to_0.1"], metrics["if/Band/clip_high"]
    (1.0, 0.0)
    """

    counterfactuals: tuple[str, ...]
    """Names of the methods tried; the run's own comes before them in ``sums``."""
    sums: Mapping[str, Float[Tensor, ...]]

    @classmethod
    @torch.no_grad()
    def from_batch(
        cls,
        logp: Float[Tensor, "batch time"],
        logp_old: Float[Tensor, "batch time"],
        advantages: Float[Tensor, "batch time"] | Float[Tensor, "batch 1"] | Float[Tensor, " batch"],
        mask: Tensor | None = None,
        *,
        method: Method | ClipRule | str | None = None,
        logp_anchor: Float[Tensor, "batch time"] | None = None,
        entropy: Float[Tensor, "batch time"] | None = None,
        counterfactuals: Mapping[str, Method | ClipRule | str] = COUNTERFACTUALS,
        group: Int[Tensor, " batch"] | None = None,
        segments: Int[Tensor, "batch time"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
        packed: bool | None = None,
    ) -> Audit:
        """Return the sums of one batch, on its device and without a synchronisation.

        Args:
            logp: Log-probabilities of the sampled tokens under the policy in training; like every tensor here, as
                for `bandpo.policy_loss`.
            logp_old: The same under the old policy.
            advantages: One per token or per sequence.
            mask: 1 for tokens that count; all if omitted.
            method: The run's method, as for `bandpo.policy_loss`.
            logp_anchor: What the bounds surround, if not ``logp_old``.
            entropy: Entropy (nats) of the policy at each token. If omitted, ``−logp_old`` stands for it: its mean is
                an unbiased estimate of the old policy's entropy.
            counterfactuals: Rules and methods to try on the same tensors, by name. A rule is tried with PPO's
                surrogate at the run's level, a method as it is.
            group: Index of each sequence's prompt, for the metric ``luck``, which is left out without it.
            segments: In a packed batch the number of each token's sequence, as for `bandpo.policy_loss`.
            cu_seqlens: In a packed batch where each sequence begins, as for `bandpo.policy_loss`.
            packed: Whether a row holds several sequences, as for `bandpo.policy_loss`. The run's method is checked with
                its own average, the methods that are tried without theirs, as no figure depends on it.

        Raises:
            TypeError, ValueError: see `bandpo.policy_loss`.
        """
        run = as_method(method)
        batch = Batch.read(
            logp,
            logp_old,
            advantages,
            mask,
            logp_anchor=logp_anchor,
            entropy=entropy,
            state=TrainingState(group=group),
            segments=segments,
            cu_seqlens=cu_seqlens,
        )
        check_unpacked(batch, advantages, run, run.aggregation, packed)
        for other in counterfactuals.values():
            check_unpacked(batch, advantages, tried_at(run.level, other), None, packed)
        return cls.of(batch, run, run.tokens(batch), counterfactuals)

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        batch: Batch,
        run: Method,
        tokens: Tokens,
        counterfactuals: Mapping[str, Method | ClipRule | str] = COUNTERFACTUALS,
        counted: Float[Tensor, "batch time"] | None = None,
    ) -> Audit:
        """The sums of one batch whose view under the run's own method is there already, with what it has computed.

        Args:
            batch: The batch.
            run: The run's method.
            tokens: ``run.tokens(batch)``.
            counterfactuals: As for `from_batch`.
            counted: 1 for the tokens that have a gradient, where a trainer leaves some of ``batch.mask`` without.
        """
        views, weights = [tokens], [run.weight(tokens)]
        for other in counterfactuals.values():
            tried = tried_at(run.level, other)
            if tried == run:
                views.append(tokens)
                weights.append(weights[0])
                continue
            view = tried.tokens(batch)
            views.append(view)
            weights.append(tried.weight(view))
        kept = torch.stack([weight / seen.ratio for weight, seen in zip(weights, views, strict=True)])
        return cls(
            tuple(counterfactuals), _sums(batch, views, kept, batch.mask if counted is None else counted)
        )

    def __add__(self, other: Audit) -> Audit:
        if self.counterfactuals != other.counterfactuals:
            raise InvalidValue(f"audits of other methods: {self.counterfactuals} and {other.counterfactuals}")
        return Audit(self.counterfactuals, {name: x + other.sums[name] for name, x in self.sums.items()})

    @property
    def without_counterfactuals(self) -> Audit:
        """The same for the run's own method alone; it adds up with audits of any counterfactuals."""
        return Audit((), {name: x[:1] if name in _BY_METHOD else x for name, x in self.sums.items()})

    def reduced(self, all_reduce: Callable[[Tensor], Tensor]) -> Audit:
        """The sums over all processes, by one call of ``all_reduce`` on one flat tensor, read to the CPU."""
        return self.with_sums(all_reduce(self.flat_sums).cpu())

    @property
    def flat_sums(self) -> Float[Tensor, " sums"]:
        """All sums in one tensor, as `with_sums` takes them."""
        return torch.cat([x.flatten() for x in self.sums.values()])

    def with_sums(self, flat: Float[Tensor, " sums"]) -> Audit:
        """Return the audit of the same methods with other sums.

        Args:
            flat: What `flat_sums` of that audit gives.
        """
        parts = flat.split([x.numel() for x in self.sums.values()])
        sums = {name: part.view(x.shape) for (name, x), part in zip(self.sums.items(), parts, strict=True)}
        return Audit(self.counterfactuals, sums)

    def _repr_html_(self) -> str:
        found = self.metrics()
        rows = [(name, f"{found[name]:.4g}") for name in LOGGED if name in found]
        return as_html("What a method did to the tokens of a batch", ["metric", "value"], rows)

    def metrics(self) -> dict[str, float]:
        """Everything that docs/record.md lists, without what is undefined (a rate over no tokens, an infinite mean)."""
        s = self.reduced(lambda flat: flat).sums
        counted, calls = s["counted"], s["calls"]
        tokens, mass, (positive, negative) = s["tokens"][0], s["mass"], (0, 1)
        means = ("approx_kl", "radius_used", "entropy", "ratio_mean", "log_ratio_abs")
        found = {name: s[name] / counted for name in means}
        found |= {"tokens": counted, "calls": calls, "on_policy": s["on_policy"] / calls}
        hard, common = s["hard_advantages"]
        found["luck"] = common / hard
        for rule, prefix in enumerate(["", *(f"if/{name}/" for name in self.counterfactuals)]):
            blocked, whole = s["blocked"][rule], mass[rule, positive]
            blocked_mass = s["blocked_mass"][rule, positive]
            found |= {
                f"{prefix}clip_high": blocked[positive].sum() / counted,
                f"{prefix}clip_low": blocked[negative].sum() / counted,
                f"{prefix}softened": s["softened"][rule] / counted,
                f"{prefix}amplified": s["amplified"][rule] / counted,
                f"{prefix}inert": s["inert"][rule] / calls,
                f"{prefix}blocked_mass": blocked_mass.sum() / whole.sum(),
            }
            for name, rare in RARE.items():
                found[f"{prefix}blocked_mass_{name}"] = blocked_mass[:rare].sum() / whole[:rare].sum()
        ends = {f"_{name}": slice(rare) for name, rare in RARE.items()}
        ends |= {f"/{name}": slice(k, k + 1) for k, name in enumerate(BINS)}
        for end, bins in ends.items():
            some = tokens[positive, bins].sum()
            found[f"tokens_positive{end}"] = some
            found[f"mass_positive{end}"] = mass[0, positive, bins].sum()
            found[f"clip_high{end}"] = s["blocked"][0, positive, bins].sum() / some
        for k, name in enumerate(BINS):
            found[f"tokens_negative/{name}"] = tokens[negative, k]
            found[f"clip_low/{name}"] = s["blocked"][0, negative, k] / tokens[negative, k]
        return {name: x for name, x in ((n, float(x)) for n, x in found.items()) if math.isfinite(x)}


def tried_at(level: str, method: Method | ClipRule | str) -> Method:
    """What is tried on a run of this level: a rule at that level, a method as it is."""
    tried = as_method(method)
    return replace(tried, level=level) if tried.only_rule else tried


def logged(metrics: Mapping[str, float], *, detail: bool = False) -> dict[str, float]:
    """What a trainer logs of `Audit.metrics`, under the names that `bandpo audit` reads: ``audit/…``.

    Args:
        metrics: What `Audit.metrics` gives.
        detail: All of them, instead of those in `LOGGED`.

    >>> logged({"clip_high": 0.01, "upper_p90": 2.5})
    {'audit/clip_high': 0.01}
    """
    return {f"audit/{name}": value for name, value in metrics.items() if detail or name in LOGGED}


_BY_METHOD = ("mass", "blocked", "blocked_mass", "softened", "amplified", "inert")
"""The sums whose first dimension counts methods, the run's own first."""


def _sums(
    batch: Batch,
    views: Sequence[Tokens],
    kept: Float[Tensor, "methods batch time"],
    mask: Float[Tensor, "batch time"],
) -> dict[str, Tensor]:
    """The sums of one batch; ``kept`` is the share of each token's gradient that each method keeps."""
    own = views[0]
    group = batch.state.group
    advantages = own.advantages
    # The number of edges at or below p. A tensor of the edges would be copied from the host with each call.
    bins = torch.stack([own.logp_anchor >= math.log(edge) for edge in EDGES]).sum(0)
    # 1 where a counted token has this sign of advantage and lies in this bin of probability
    signs = torch.stack([advantages > 0, advantages < 0]).unsqueeze(1)
    cells = (signs & (bins == torch.arange(len(BINS), device=bins.device)[:, None, None])) * mask.to(
        own.ratio
    )
    mass = torch.stack([tokens.ratio for tokens in views]) * advantages.abs()
    token_weights = batch.token_weights
    if token_weights is not None:
        mass = mass * token_weights
    moved = mask * (advantages != 0)
    blocked = (kept <= 0) * moved
    changed = ((kept - 1).abs() > KEPT_WHOLE) * moved

    # On small batches an operation costs the same whatever its size, so sums of one kind are taken together: first
    # those of each cell, then those of all counted tokens.
    by_method = {"mass": mass, "blocked": blocked, "blocked_mass": mass * (1 - kept.clamp(max=1.0))}
    in_cells = torch.cat(
        [torch.ones_like(mask).unsqueeze(0), *(values.to(cells) for values in by_method.values())]
    )
    cell_sums = torch.tensordot(in_cells, cells, dims=((1, 2), (2, 3)))

    of_tokens = {
        "ratio_mean": own.ratio,
        "log_ratio_abs": own.log_ratio.abs(),
        "approx_kl": batch.log_ratio.exp() - 1 - batch.log_ratio,
        "radius_used": _radius_used(own),
        "entropy": -own.logp_old if own.entropy is None else own.entropy,
    }
    softened = changed * (kept > 0) * (kept < 1)
    amplified = changed * (kept > 1)
    totals = (torch.cat([torch.stack(list(of_tokens.values())), softened, amplified]) * mask).sum((-1, -2))

    methods = len(views)
    tokens, *sums_by_method = cell_sums.split([1, methods, methods, methods])
    total_by_name = dict(zip(of_tokens, totals[: len(of_tokens)], strict=True))
    sums = {
        "tokens": tokens,
        **dict(zip(by_method, sums_by_method, strict=True)),
        **total_by_name,
        "softened": totals[len(of_tokens) : len(of_tokens) + methods],
        "amplified": totals[len(of_tokens) + methods :],
        "counted": mask.sum(),
        "calls": mask.new_ones(()),
        "on_policy": (own.log_ratio.abs().max() < 1e-7).float(),
        "inert": 1 - changed.flatten(1).amax(1),
        "hard_advantages": mask.new_zeros(2) if group is None else hard_advantages(batch, group),
    }
    return {name: x.to(_checks.widest_float(x.device)) for name, x in sums.items()}


def _radius_used(tokens: Tokens) -> Tensor:
    """Share of the radius that each token's move spends; of several bands in a rule the one that is spent most."""
    shares = [
        band.divergence.divergence_of_ratio(tokens.log_ratio_anchor, tokens.logp_anchor)
        / band.radius_for(tokens.logp_anchor)
        for band in bands(tokens.rule).values() or (Band(),)
    ]
    return torch.stack(shares).amax(0)
