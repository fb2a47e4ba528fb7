"""The changes that frameworks make to the loss of a method, and the search for those that a loss has.

The gradient of a loss is known on several batches. Known changes are applied to the method, one and then several at a
time, until both gradients agree on all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from bandpo.certificate.gradient import PolicyTerm
from bandpo.certificate.tokens import LossBatch
from bandpo.core.aggregation import aggregate
from bandpo.core.batch import Batch
from bandpo.core.layout import Rows
from bandpo.core.loss import policy_loss
from bandpo.core.methods import Method
from bandpo.core.objectives import DropOutside, DualClip
from bandpo.core.rules import FixedClip, Unclipped

if TYPE_CHECKING:
    from torch import Tensor

COUNTING_EMPTY = {
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
"""For each aggregation that leaves out sequences without a counted token, the one that counts them."""
COUNTS_EMPTY = "empty sequences count in the mean"
MOST_CHANGES = 3
"""Largest number of changes that are applied together."""


@dataclass(frozen=True)
class Variant:
    """A method's loss with changes that frameworks make to it."""

    method: Method
    aggregation: str | None = None
    """See `bandpo.aggregate`; the method's if None."""
    normalizer: float | None = None
    """See `bandpo.aggregate`; under ``seq-mean-token-sum-norm`` the width of the batch if None."""
    of_rollout: bool = False
    """True if the ratio refers to the rollout engine's policy."""
    weighted: bool = True
    """True if importance weights are used, for batches that have them."""
    counts_empty: bool | None = None
    """True if sequences without a counted token count in a mean over sequences; None for that of ``aggregation``."""
    sums_padding: bool = False
    """True if padding is summed too, with each token times its sequence's length over the width."""
    sums_penalties: bool = False
    """True if the penalty is summed over tokens, while the rest of the loss is averaged."""
    clamp: float = math.inf
    """Largest \\|log r\\|. A clamped token has no gradient."""
    sequence_clamp: float = math.inf
    """Largest mean of log r over a sequence."""
    factor: float = 1.0
    """Factor of the loss."""

    @property
    def average(self) -> str:
        """The name of its aggregation, for `bandpo.aggregate`."""
        average = self.aggregation or self.method.aggregation or "token-mean"
        if self.counts_empty is None:
            return average
        if self.counts_empty:
            return COUNTING_EMPTY.get(average, average)
        not_counting_empty = {counting: plain for plain, counting in COUNTING_EMPTY.items()}
        return not_counting_empty.get(average, average)

    def describe(self) -> str:
        """Return its method, and its average if that is not the method's."""
        if self.aggregation is None or self.aggregation == self.method.aggregation:
            return repr(self.method)
        return f"{self.method!r} with aggregation={self.aggregation!r}"

    def averaged(self, values: Tensor, batch: LossBatch) -> Tensor:
        """Reduce values per token to a scalar."""
        if self.sums_padding:
            return (values * batch.mask.sum(1, keepdim=True)).sum() / values.numel()
        if self.sums_penalties:
            # The advantages are already divided by the number of tokens, see `loss`.
            return aggregate(values, batch.mask, "sum")
        normalizer = self.normalizer
        if normalizer is None and self.average in ("seq-mean-token-sum-norm", "dr_grpo"):
            normalizer = float(batch.mask.shape[1])
        return aggregate(values, batch.mask, self.average, normalizer=normalizer)

    def summed(self) -> Variant:
        """Return the variant without aggregation and factor, which is common to variants that only differ in these."""
        if self.sums_padding:
            return self.changed(factor=1.0)
        average = self.aggregation if self.sums_penalties else "sum"
        return self.changed(aggregation=average, normalizer=None, counts_empty=None, factor=1.0)

    def loss(self, batch: LossBatch) -> Tensor:
        """Compute the loss of a batch."""
        logp_old = batch.logp_rollout if self.of_rollout else batch.logp_old
        log_ratio = (batch.logp - logp_old).detach()

        # Clamped tokens and sequences get a logp without a gradient.
        clamped = log_ratio.clamp(-self.clamp, self.clamp)
        logp = batch.logp.where(log_ratio.abs() <= self.clamp, logp_old + clamped)
        if self.sequence_clamp < math.inf:
            count = batch.mask.sum(1, keepdim=True).clamp(min=1)
            mean = (log_ratio * batch.mask).sum(1, keepdim=True) / count
            logp = logp.where(mean <= self.sequence_clamp, logp.detach() - (mean - self.sequence_clamp))
        outputs = policy_loss(
            logp,
            logp_old,
            batch.advantages / batch.mask.sum() if self.sums_penalties else batch.advantages,
            torch.ones_like(batch.mask) if self.sums_padding else batch.mask,
            method=self.method,
            weights=batch.weights if self.weighted else None,
            aggregation=lambda values: self.averaged(values, batch),
            layout=Rows(),
        )
        return self.factor * outputs.loss

    def tokens(self, batch: LossBatch) -> Batch:
        """Return the validated batch, from which rules and objectives compute."""
        return Batch.read(
            batch.logp,
            batch.logp_rollout if self.of_rollout else batch.logp_old,
            batch.advantages,
            batch.mask,
            weights=batch.weights if self.weighted else None,
        )

    def changed(self, **changes: Any) -> Variant:
        """Return the variant with other fields."""
        return replace(self, **changes)

    def with_method(self, **changes: Any) -> Variant:
        """Return the variant with other fields of its method."""
        return replace(self, method=replace(self.method, **changes))

    def dual_clipped(self, max_ratio: float) -> Variant:
        """Return the variant with a dual clip of ``max_ratio`` in place of its own; without one for ``inf``."""
        objective = self.method.objective
        if isinstance(objective, DualClip):
            objective = objective.objective
        if max_ratio < math.inf:
            objective = DualClip(max_ratio, objective)
        return self.with_method(objective=objective)

    def limited(self, max_weight: float) -> Variant:
        """Return the variant with another limit of the weight; unchanged if its objective has none."""
        objective = self.method.objective
        if not isinstance(objective, DropOutside):
            return self
        return self.with_method(objective=replace(objective, max_weight=max_weight))

    def clipped(self, low: float, high: float) -> Variant:
        """Return the variant with another fixed clip; unchanged if its method has none."""
        if not isinstance(self.method.clip, FixedClip):
            return self
        return self.with_method(clip=FixedClip(low, high))

    def unclipped(self) -> Variant:
        """Return the variant without its fixed clip; unchanged if its method has none."""
        if not isinstance(self.method.clip, FixedClip):
            return self
        return self.with_method(clip=Unclipped())


Change = Callable[[Variant], Variant]
KNOWN_CHANGES: tuple[dict[str, Change], ...] = (
    {
        "averages over tokens": lambda variant: variant.changed(aggregation="token-mean"),
        "averages per sequence": lambda variant: variant.changed(aggregation="seq-mean-token-mean"),
        "sums over each sequence": lambda variant: variant.changed(aggregation="seq-mean-token-sum"),
        "divides by the width of the batch": lambda variant: variant.changed(
            aggregation="seq-mean-token-sum-norm"
        ),
        "sums over all tokens": lambda variant: variant.changed(aggregation="sum"),
        "sums the padding too, each token times its sequence's length over the width": lambda variant: (
            variant.changed(sums_padding=True)
        ),
        "divides the advantages by the number of tokens before the loss": lambda variant: variant.changed(
            sums_penalties=True
        ),
    },
    {
        "ratio of each token": lambda variant: variant.with_method(level="token"),
        "ratio of the sequence": lambda variant: variant.with_method(level="sequence"),
    },
    {
        "dual clip of 3": lambda variant: variant.dual_clipped(3.0),
        "dual clip of 10": lambda variant: variant.dual_clipped(10.0),
        "no dual clip": lambda variant: variant.dual_clipped(math.inf),
    },
    {
        "weight at most 3": lambda variant: variant.limited(3.0),
        "weight without limit": lambda variant: variant.limited(math.inf),
    },
    {
        "log r clamped to ±20": lambda variant: variant.changed(clamp=20.0),
        "log r clamped to ±10": lambda variant: variant.changed(clamp=10.0),
        "the sequence's mean log r clamped at 10": lambda variant: variant.changed(sequence_clamp=10.0),
    },
    {"importance weights left out": lambda variant: variant.changed(weighted=False)},
    {
        "ratio to the trainer's old policy": lambda variant: variant.changed(of_rollout=False),
        "ratio to the rollout engine's policy": lambda variant: variant.changed(of_rollout=True),
    },
    {
        COUNTS_EMPTY: lambda variant: variant.changed(counts_empty=True),
        "empty sequences are left out of the mean": lambda variant: variant.changed(counts_empty=False),
    },
    {"no clip": lambda variant: variant.unclipped()},
)
"""Known changes by name, in groups of alternatives. The last group has the clips; see `fitted_clip`."""


@dataclass(frozen=True, eq=False)
class Case:
    """A batch with the value and the gradient of the loss on it."""

    batch: LossBatch
    value: Tensor
    """The loss, a scalar."""
    term: PolicyTerm
    """Its gradient with respect to each token's log-probability, and that of the expected method."""
    sums: dict[Variant, Tensor] = field(default_factory=dict)
    """The computed gradients of sums over tokens, by `Variant.summed`."""

    @classmethod
    def of(cls, loss: Callable[[LossBatch], Tensor], expected: Variant, batch: LossBatch) -> Case:
        """Differentiate a loss."""
        gradient, value = _differentiated(loss, batch)
        return cls(batch, value, _policy_term(gradient, expected, batch))

    def compared_with(self, variant: Variant) -> PolicyTerm:
        """Return the gradient of the loss, beside what it should be for another method."""
        return _policy_term(self.term.gradient, variant, self.batch)

    def expected(self, variant: Variant) -> Tensor:
        """Compute the gradient of a variant's loss with respect to each token's log-probability."""
        summed = variant.summed()
        if summed not in self.sums:
            self.sums[summed] = _differentiated(summed.loss, self.batch)[0]
        if variant.sums_padding:
            return variant.factor * self.sums[summed]
        return variant.factor * _share(variant, self.batch) * self.sums[summed]

    def is_equal_to(self, variant: Variant, tolerance: float) -> bool:
        """Return True if the loss has a variant's gradient, up to rounding."""
        return self.term.is_equal_to(self.expected(variant), tolerance)

    def has_value_of(self, variant: Variant) -> bool:
        """Return True if the loss has a variant's value, up to rounding."""
        expected = variant.loss(self.batch).detach()
        return torch.allclose(expected, self.value.to(expected.dtype), rtol=1e-3, atol=1e-5)


def _policy_term(gradient: Tensor, expected: Variant, batch: LossBatch) -> PolicyTerm:
    """Return the gradient of a loss, beside what it should be."""
    share = _share(expected, batch)
    place = f"batch {batch.name!r}, "
    return PolicyTerm(gradient, expected.method, expected.tokens(batch), share, place=place)


def _share(variant: Variant, batch: LossBatch) -> Tensor:
    """Compute the weight of each token's loss in a variant's aggregation."""
    values = torch.zeros_like(batch.logp, requires_grad=True)
    return torch.autograd.grad(variant.averaged(values, batch), values)[0]


def _differentiated(loss: Callable[[LossBatch], Tensor], batch: LossBatch) -> tuple[Tensor, Tensor]:
    """Return the gradient of the loss with respect to each token's log-probability, and the loss."""
    logp = batch.logp.clone().requires_grad_()
    value = loss(replace(batch, logp=logp))
    (gradient,) = torch.autograd.grad(value, logp, allow_unused=True)
    if gradient is None:
        gradient = torch.zeros_like(logp)
    return gradient, value.detach()


def explanation(
    expected: Variant, cases: Sequence[Case], tolerance: float
) -> tuple[tuple[str, ...], Variant] | None:
    """Return the fewest known changes that make all gradients equal, and the variant with them; None if none do."""
    groups = [*KNOWN_CHANGES[:-1], KNOWN_CHANGES[-1] | fitted_clip(expected, cases)]
    # The batch 'usual' comes first, because it distinguishes most variants.
    ordered = sorted(cases, key=lambda case: case.batch.name != "usual")
    # A factor counts as a change, so variants with a factor are tried with those of one change more.
    with_factor: list[tuple[tuple[str, ...], Variant]] = []
    for changes in range(MOST_CHANGES + 1):
        next_with_factor: list[tuple[tuple[str, ...], Variant]] = []
        for names, variant in _variants(expected, groups, changes):
            if _equal(variant, ordered, tolerance):
                return names, variant
            factor = _factor(variant, ordered[0], tolerance)
            if factor is not None:
                name = f"every token is {factor:.4g} times as expected"
                next_with_factor.append(((*names, name), variant.changed(factor=factor)))
        for names, variant in with_factor:
            if _equal(variant, ordered, tolerance):
                return names, variant
        with_factor = next_with_factor
    return None


def _variants(
    expected: Variant, groups: Sequence[dict[str, Change]], changes: int
) -> Iterator[tuple[tuple[str, ...], Variant]]:
    """Generate the variants with a number of changes, at most one of each group, all of which have an effect.

    Args:
        expected: The method.
        groups: The changes by name, in groups of alternatives.
        changes: The number of changes.
    """
    for combination in itertools.combinations(groups, changes):
        for names in itertools.product(*combination):
            variant = expected
            for group, name in zip(combination, names, strict=True):
                changed = group[name](variant)
                if changed == variant:
                    break
                variant = changed
            else:
                yield names, variant


def _equal(variant: Variant, cases: Sequence[Case], tolerance: float) -> bool:
    """Check whether the loss has the variant's gradient on every batch."""
    return all(case.is_equal_to(variant, tolerance) for case in cases)


def _factor(variant: Variant, case: Case, tolerance: float) -> float | None:
    """Return the factor between the gradients of the loss and the variant; None if it differs between tokens."""
    expected = case.expected(variant)
    nonzero = case.term.counted & (expected != 0)
    if not nonzero.any():
        return None
    factor = (case.term.gradient[nonzero] / expected[nonzero]).double().median().item()
    if not math.isfinite(factor) or factor == 0:
        return None
    return factor if case.is_equal_to(variant.changed(factor=factor), tolerance) else None


def fitted_clip(expected: Variant, cases: Sequence[Case]) -> dict[str, Change]:
    """Return the change of a method with a fixed clip to the bounds of the loss under test, by its description.

    It is empty if the expected method has no fixed clip, or if the loss has none.

    Args:
        expected: The expected method.
        cases: The batches, with the gradient of the loss under test.
    """
    if not isinstance(expected.method.clip, FixedClip):
        return {}
    bounds = fitted_bounds(expected.method, cases)
    if bounds is None:
        return {}
    low, high = bounds
    return {f"clips at {1 - low:g} and {1 + high:g}": lambda variant: variant.clipped(low, high)}


def fitted_bounds(method: Method, cases: Sequence[Case]) -> tuple[float, float] | None:
    """Find out at which ratios, 1 − low and 1 + high, a loss clips.

    Each bound lies between the outermost ratio at which the loss still has a gradient, and the next ratio, at which it
    has none. Of the numbers between them, the one with the fewest decimals is taken.

    Args:
        method: The method that determines the ratio: of a token, or of a sequence.
        cases: The batches, with the gradient of the loss.

    Returns:
        Low and high; None if a bound does not appear in the batches, or if none fits all tokens.
    """
    ratios: list[Tensor] = []
    positive: list[Tensor] = []
    negative: list[Tensor] = []
    has_gradient: list[Tensor] = []
    for case in cases:
        tokens = method.tokens(case.term.batch)
        counted = case.batch.mask > 0
        ratios.append(tokens.ratio[counted])
        positive.append(case.batch.advantages[counted] > 0)
        negative.append(case.batch.advantages[counted] < 0)
        has_gradient.append(case.term.gradient[counted] != 0)
    ratio = torch.cat(ratios)
    is_positive = torch.cat(positive)
    is_negative = torch.cat(negative)
    is_kept = torch.cat(has_gradient)

    # With A < 0, tokens are also blocked at ratios above 1, by a dual clip.
    blocked_above = ratio[is_positive & ~is_kept]
    blocked_below = ratio[is_negative & ~is_kept & (ratio < 1)]
    kept_above = ratio[is_positive & is_kept]
    kept_below = ratio[is_negative & is_kept]
    if not all(x.numel() for x in (blocked_above, blocked_below, kept_above, kept_below)):
        return None
    high = _roundest(kept_above.max().item() - 1, blocked_above.min().item() - 1)
    low = _roundest(1 - kept_below.min().item(), 1 - blocked_below.max().item())
    if low is None or high is None:
        return None
    if not 0 <= low <= 1 or high < 0:
        return None
    return low, high


def _roundest(start: float, end: float) -> float | None:
    """Return the number with the fewest decimals in an interval; None if the interval is empty."""
    if start > end:
        return None
    for decimals in range(8):
        number = round((start + end) / 2, decimals)
        if start <= number <= end:
            return number
    return (start + end) / 2
