"""Metrics of a method's effect on the tokens of a run, such as its clip rate, computed from sums over tokens.

The sums are cheap enough to be computed on every batch. They are added over micro-batches, steps and processes, so that
each rate is the rate over all tokens. They stay on the device until they are read. docs/audit.md explains every
metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from bandpo.audit.luck import hard_advantages
from bandpo.audit.metric_names import BINS, RARE
from bandpo.core import _checks
from bandpo.core._shown import as_html
from bandpo.core.batch import Batch, Tokens
from bandpo.core.errors import InvalidValue
from bandpo.core.methods import Method
from bandpo.core.rules import DCPO, Band, ClipRule, FixedClip, bands
from bandpo.core.text import as_method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

EDGES = (1e-4, 1e-3, 1e-2, 1e-1)
"""The old probabilities that separate the bins of `rlvet.runs.metric_names.BINS`."""
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
"""The metrics of `Audit.metrics` that a trainer logs by default: those that the verdict of `bandpo audit` needs."""
COUNTERFACTUALS: Mapping[str, Method | ClipRule | str] = {
    "clip 0.2": FixedClip(),
    "Clip-Higher": FixedClip(0.2, 0.28),
    "DCPO": DCPO(),
    "Band": Band(),
}
"""The rules and methods that are evaluated on the run's tensors by default, in addition to the run's own method."""
SHARE_TOLERANCE = 1e-5
"""Distance from 1 up to which a kept share of the gradient counts as 1. It covers rounding in float32."""


@dataclass(frozen=True)
class Audit:
    """Sums over the tokens of one or more batches. Audits of the same methods are added with ``+``.

    >>> logp_old = torch.tensor([[0.08, 0.50]]).log()
    >>> logp = torch.tensor([[0.16, 0.55]]).log()
    >>> batch = Batch.read(logp, logp_old, torch.tensor([1.0]))
    >>> metrics = Audit.from_batch(batch, method=FixedClip(0.2, 0.2)).metrics()
    >>> metrics["clip_high/0.01_to_0.1"], metrics["if/Band/clip_high"]
    (1.0, 0.0)
    """

    counterfactuals: tuple[str, ...]
    """Names of the methods that were evaluated in addition to the run's own, which comes first in ``sums``."""
    sums: Mapping[str, Float[Tensor, ...]]
    """The sums by name; see `_sums` for their shapes."""

    @classmethod
    @torch.no_grad()
    def from_batch(
        cls,
        batch: Batch,
        *,
        method: Method | ClipRule | str | None = None,
        counterfactuals: Mapping[str, Method | ClipRule | str] = COUNTERFACTUALS,
    ) -> Audit:
        """Compute the sums of one batch, on its device and without a synchronisation.

        Without entropies in the batch, ``−logp_old`` replaces them, whose mean is an unbiased estimate of the old
        policy's entropy. The metric ``luck`` needs ``group`` in the batch's training state.

        Args:
            batch: The batch, from `bandpo.Batch.read`.
            method: The run's method, as for `bandpo.policy_loss`.
            counterfactuals: Rules and methods to evaluate on the same tensors, by name. A rule is evaluated with PPO's
                surrogate at the run's level, a method as it is.

        Raises:
            TypeError: if a method is none.
            ValueError: if a row plainly holds several sequences, see `bandpo.policy_loss`. The run's method is checked
                with its own aggregation; counterfactuals without one, because no metric depends on it.
        """
        run = as_method(method)
        run.check_rows(batch, run.aggregation)
        for counterfactual in counterfactuals.values():
            method_at_level(run.level, counterfactual).check_rows(batch, None)
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
        """Compute the sums of one batch whose tokens with the run's method exist already, to reuse their properties.

        Args:
            batch: The batch.
            run: The run's method.
            tokens: ``run.tokens(batch)``.
            counterfactuals: As for `from_batch`.
            counted: 1 for the tokens that have a gradient, if a trainer leaves some tokens of ``batch.mask`` without.
        """
        tokens_by_method = [tokens]
        weights = [run.weight(tokens)]
        for counterfactual in counterfactuals.values():
            method = method_at_level(run.level, counterfactual)
            if method == run:
                tokens_by_method.append(tokens)
                weights.append(weights[0])
                continue
            method_tokens = method.tokens(batch)
            tokens_by_method.append(method_tokens)
            weights.append(method.weight(method_tokens))

        # The share of each token's unclipped gradient that each method keeps, (methods, batch, time).
        shares = [
            weight / method_tokens.ratio
            for weight, method_tokens in zip(weights, tokens_by_method, strict=True)
        ]
        mask = batch.mask if counted is None else counted
        return cls(tuple(counterfactuals), _sums(batch, tokens_by_method, torch.stack(shares), mask))

    def __add__(self, other: Audit) -> Audit:
        if self.counterfactuals != other.counterfactuals:
            raise InvalidValue(
                f"audits of different methods cannot be added: {self.counterfactuals} and {other.counterfactuals}"
            )
        return Audit(self.counterfactuals, {name: x + other.sums[name] for name, x in self.sums.items()})

    @property
    def without_counterfactuals(self) -> Audit:
        """The audit of the run's own method only, which can be added to audits with other counterfactuals."""
        return Audit((), {name: x[:1] if name in _BY_METHOD else x for name, x in self.sums.items()})

    def reduced(self, all_reduce: Callable[[Tensor], Tensor]) -> Audit:
        """Return the audit over all processes, on the CPU.

        Args:
            all_reduce: A function that sums a tensor over the processes. It is called once, with all sums in one flat
                tensor.
        """
        return self.with_sums(all_reduce(self.flat_sums).cpu())

    @property
    def flat_sums(self) -> Float[Tensor, " sums"]:
        """All sums in one flat tensor, as `with_sums` takes them."""
        return torch.cat([x.flatten() for x in self.sums.values()])

    def with_sums(self, flat: Float[Tensor, " sums"]) -> Audit:
        """Return an audit of the same methods with other sums.

        Args:
            flat: The other audit's `flat_sums`.
        """
        flat_by_name = flat.split([x.numel() for x in self.sums.values()])
        sums: dict[str, Float[Tensor, ...]] = {}
        for (name, x), values in zip(self.sums.items(), flat_by_name, strict=True):
            sums[name] = values.view(x.shape)
        return Audit(self.counterfactuals, sums)

    def _repr_html_(self) -> str:
        metrics = self.metrics()
        rows = [(name, f"{metrics[name]:.4g}") for name in LOGGED if name in metrics]
        return as_html("What a method did to the tokens of a batch", ["metric", "value"], rows)

    def metrics(self) -> dict[str, float]:
        """Compute the metrics that docs/audit.md lists, without undefined ones such as a rate over no tokens."""
        # One transfer of all sums to the CPU.
        sums = self.reduced(lambda flat: flat).sums
        counted = sums["counted"]
        calls = sums["calls"]
        means = ("approx_kl", "radius_used", "entropy", "ratio_mean", "log_ratio_abs")
        metrics = {name: sums[name] / counted for name in means}
        metrics |= {"tokens": counted, "calls": calls, "on_policy": sums["on_policy"] / calls}
        hard, common = sums["hard_advantages"]
        metrics["luck"] = common / hard

        prefixes = ["", *(f"if/{name}/" for name in self.counterfactuals)]
        for index, prefix in enumerate(prefixes):
            metrics |= _method_metrics(sums, index, prefix)
        metrics |= _bin_metrics(sums)
        values = {name: float(x) for name, x in metrics.items()}
        return {name: value for name, value in values.items() if math.isfinite(value)}


POSITIVE = 0
NEGATIVE = 1
"""Indices of the two signs of the advantage in the sums by cell."""


def _method_metrics(sums: Mapping[str, Tensor], index: int, prefix: str) -> dict[str, Tensor]:
    """Compute the metrics of one method.

    Args:
        sums: The sums of an audit.
        index: The method's index in the sums.
        prefix: The prefix of the metrics' names.
    """
    counted = sums["counted"]
    blocked = sums["blocked"][index]
    mass = sums["mass"][index, POSITIVE]
    blocked_mass = sums["blocked_mass"][index, POSITIVE]
    metrics = {
        f"{prefix}clip_high": blocked[POSITIVE].sum() / counted,
        f"{prefix}clip_low": blocked[NEGATIVE].sum() / counted,
        f"{prefix}softened": sums["softened"][index] / counted,
        f"{prefix}amplified": sums["amplified"][index] / counted,
        f"{prefix}inert": sums["inert"][index] / sums["calls"],
        f"{prefix}blocked_mass": blocked_mass.sum() / mass.sum(),
    }
    for name, bins in RARE.items():
        metrics[f"{prefix}blocked_mass_{name}"] = blocked_mass[:bins].sum() / mass[:bins].sum()
    return metrics


def _bin_metrics(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute the metrics of the run's own method by bins of the old probability."""
    tokens = sums["tokens"][0]
    blocked = sums["blocked"][0]
    mass = sums["mass"][0]
    metrics: dict[str, Tensor] = {}
    bins_by_suffix = {f"_{name}": slice(bins) for name, bins in RARE.items()}
    bins_by_suffix |= {f"/{name}": slice(k, k + 1) for k, name in enumerate(BINS)}
    for suffix, bins in bins_by_suffix.items():
        tokens_positive = tokens[POSITIVE, bins].sum()
        metrics[f"tokens_positive{suffix}"] = tokens_positive
        metrics[f"mass_positive{suffix}"] = mass[POSITIVE, bins].sum()
        metrics[f"clip_high{suffix}"] = blocked[POSITIVE, bins].sum() / tokens_positive
    for k, name in enumerate(BINS):
        metrics[f"tokens_negative/{name}"] = tokens[NEGATIVE, k]
        metrics[f"clip_low/{name}"] = blocked[NEGATIVE, k] / tokens[NEGATIVE, k]
    return metrics


def method_at_level(level: str, method: Method | ClipRule | str) -> Method:
    """Return the method to evaluate on a run whose ratios have this level: a rule at the level, a method as it is."""
    counterfactual = as_method(method)
    return replace(counterfactual, level=level) if counterfactual.only_rule else counterfactual


def logged(metrics: Mapping[str, float], *, detail: bool = False) -> dict[str, float]:
    """Return the metrics that a trainer logs, under the names that `bandpo audit` reads: ``audit/…``.

    Args:
        metrics: The result of `Audit.metrics`.
        detail: True to log all metrics, False for those in `LOGGED`.

    >>> logged({"clip_high": 0.01, "upper_p90": 2.5})
    {'audit/clip_high': 0.01}
    """
    return {f"audit/{name}": value for name, value in metrics.items() if detail or name in LOGGED}


def gradient_size(tokens: Tokens, batch: Batch) -> Float[Tensor, "batch time"]:
    """Return the size of each token's unclipped gradient, r·abs(A), times its importance weight if it has one.

    Args:
        tokens: The tokens with a method, which determines the level of the ratio.
        batch: The batch that they are of.
    """
    size = tokens.ratio * tokens.advantages.abs()
    weights = batch.token_weights
    return size if weights is None else size * weights


def lost_share(shares: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the share of each token's gradient that a method takes away, from the share that it keeps."""
    return 1 - shares.clamp(max=1.0)


_BY_METHOD = ("mass", "blocked", "blocked_mass", "softened", "amplified", "inert")
"""The sums whose first dimension is the method, the run's own first."""


def _sums(
    batch: Batch,
    tokens_by_method: Sequence[Tokens],
    shares: Float[Tensor, "methods batch time"],
    mask: Float[Tensor, "batch time"],
) -> dict[str, Tensor]:
    """Compute the sums of one batch.

    Sums by cell have the shape (methods, signs, bins), where a cell is a sign of the advantage and a bin of the old
    probability. Other sums by method have the shape (methods,), and the rest are scalars.

    Args:
        batch: The batch.
        tokens_by_method: The tokens with each method, the run's own first.
        shares: The share of each token's unclipped gradient that each method keeps.
        mask: 1 for the tokens that are summed.
    """
    run_tokens = tokens_by_method[0]
    group = batch.state.group
    advantages = run_tokens.advantages

    # The bin of each token: the number of edges at or below p. (A tensor of the edges would be copied from the host
    # with each call.)
    bins = torch.stack([run_tokens.logp_anchor >= math.log(edge) for edge in EDGES]).sum(0)
    # 1 for a counted token with this sign of advantage in this bin, (signs, bins, batch, time).
    signs = torch.stack([advantages > 0, advantages < 0]).unsqueeze(1)
    bin_numbers = torch.arange(len(BINS), device=bins.device)[:, None, None]
    cells = (signs & (bins == bin_numbers)) * mask.to(run_tokens.ratio)

    # The size of each token's unclipped gradient, and the tokens whose gradient a method drops or changes, all
    # (methods, batch, time).
    mass = torch.stack([gradient_size(tokens, batch) for tokens in tokens_by_method])
    has_advantage = mask * (advantages != 0)
    blocked = (shares <= 0) * has_advantage
    changed = ((shares - 1).abs() > SHARE_TOLERANCE) * has_advantage

    # On small batches the cost of an operation does not depend on its size, so sums of one kind are computed together:
    # first the sums by cell, then the sums over all counted tokens.
    values_by_cell = {"mass": mass, "blocked": blocked, "blocked_mass": mass * lost_share(shares)}
    stacked = torch.cat(
        [torch.ones_like(mask).unsqueeze(0), *(values.to(cells) for values in values_by_cell.values())]
    )
    cell_sums = torch.tensordot(stacked, cells, dims=((1, 2), (2, 3)))  # pyright: ignore[reportArgumentType]

    values_of_tokens = {
        "ratio_mean": run_tokens.ratio,
        "log_ratio_abs": run_tokens.log_ratio.abs(),
        "approx_kl": batch.log_ratio.exp() - 1 - batch.log_ratio,
        "radius_used": _radius_used(run_tokens),
        "entropy": -run_tokens.logp_old if run_tokens.entropy is None else run_tokens.entropy,
    }
    softened = changed * (shares > 0) * (shares < 1)
    amplified = changed * (shares > 1)
    stacked = torch.cat([torch.stack(list(values_of_tokens.values())), softened, amplified])
    totals = (stacked * mask).sum((-1, -2))

    methods = len(tokens_by_method)
    tokens, *sums_by_method = cell_sums.split([1, methods, methods, methods])
    of_tokens, softened_sums, amplified_sums = totals.split([len(values_of_tokens), methods, methods])
    sums = {
        "tokens": tokens,
        **dict(zip(values_by_cell, sums_by_method, strict=True)),
        **dict(zip(values_of_tokens, of_tokens, strict=True)),
        "softened": softened_sums,
        "amplified": amplified_sums,
        "counted": mask.sum(),
        "calls": mask.new_ones(()),
        "on_policy": (run_tokens.log_ratio.abs().max() < 1e-7).float(),
        "inert": 1 - changed.flatten(1).amax(1),
        "hard_advantages": mask.new_zeros(2) if group is None else hard_advantages(batch, group),
    }
    return {name: x.to(_checks.widest_float(x.device)) for name, x in sums.items()}


def _radius_used(tokens: Tokens) -> Tensor:
    """Compute the divergence of each token's ratio as a share of the radius; the largest share of several bands.

    A rule without a band is measured with the default `Band`.
    """
    shares: list[Tensor] = []
    for band in bands(tokens.rule).values() or (Band(),):
        divergence = band.divergence.divergence_of_ratio(tokens.log_ratio_anchor, tokens.logp_anchor)
        shares.append(divergence / band.radius_for(tokens.logp_anchor))
    return torch.stack(shares).amax(0)
