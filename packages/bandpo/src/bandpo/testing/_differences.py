"""The comparison of a loss with a method on several batches, and the search for the cause of a difference.

`compare_loss` differentiates the loss once per batch. If it differs from the method, known changes are applied to the
method, one and then several at a time, until both gradients agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from bandpo.core.aggregation import aggregate
from bandpo.core.batch import Batch
from bandpo.core.gradient_check import TOLERANCE, near_discontinuity
from bandpo.core.gradient_check import compare as compare_gradient
from bandpo.core.layout import Rows
from bandpo.core.loss import policy_loss
from bandpo.core.methods import Method
from bandpo.core.objectives import DropOutside, DualClip
from bandpo.core.rules import FixedClip, Unclipped
from bandpo.testing._batches import LossBatch

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
UNEXPLAINABLE = ("it is not finite", "no gradient reached")
"""Beginnings of the causes of `bandpo.core.gradient_check` that no known change explains."""
EXAMPLES = 3
"""Number of tokens that a message names."""


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
        "sums the penalty over tokens": lambda variant: variant.changed(sums_penalties=True),
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
    gradient: Tensor
    """The gradient of the loss with respect to each token's log-probability, (batch, time)."""
    value: Tensor
    """The loss, a scalar."""
    compared: Tensor
    """Mask of the tokens to compare: all but those so close to a bound that rounding decides."""
    sums: dict[Variant, Tensor] = field(default_factory=dict)
    """The computed gradients of sums over tokens, by `Variant.summed`."""

    def expected(self, variant: Variant) -> Tensor:
        """Compute the gradient of a variant's loss with respect to each token's log-probability."""
        summed = variant.summed()
        if summed not in self.sums:
            self.sums[summed] = differentiated(summed.loss, self.batch)[0]
        if variant.sums_padding:
            return variant.factor * self.sums[summed]
        return variant.factor * self.share(variant) * self.sums[summed]

    def share(self, variant: Variant) -> Tensor:
        """Compute the weight of each token's loss in a variant's aggregation."""
        values = torch.zeros_like(self.batch.logp, requires_grad=True)
        return torch.autograd.grad(variant.averaged(values, self.batch), values)[0]

    def different(self, variant: Variant, tolerance: float) -> Tensor:
        """Compute which tokens have another gradient than the variant, beyond rounding. That of padding must be 0."""
        expected = self.expected(variant)
        # In float32 a ratio of e^40 has a relative error of 5e-6.
        unit = torch.maximum(self.gradient.abs(), expected.abs()) + 1 / self.batch.mask.sum()
        equal = (self.gradient - expected).abs() <= tolerance * unit
        return ~equal & self.compared


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_loss`."""

    method: str
    differences: tuple[str, ...] | None
    """Names of the changes that make the gradients equal; empty if they are, None if no known changes do."""
    shares: dict[str, float]
    """The share of the counted tokens whose gradients differ, by the name of the batch."""
    same_value: bool
    """True if, with these changes, the values of the losses are equal too."""
    cause: str
    """The likely cause of the difference; empty if there is none."""
    examples: tuple[str, ...]
    """The first tokens that differ, each with both numbers."""

    @property
    def equal(self) -> bool:
        """True if the loss has the method's gradient."""
        return self.differences == ()

    def __str__(self) -> str:
        if self.equal:
            return f"the loss has the gradient of {self.method}"
        shares = [f"{share:.2%} of the tokens of the batch {name!r}" for name, share in self.shares.items()]
        lines = [f"the loss does not have the gradient of {self.method}: {', '.join(shares)} differ."]
        lines += [f"  {example}" for example in self.examples]
        lines.append(f"Likely difference: {self.cause}.")
        return "\n".join(lines)


def compare_loss(
    loss: Callable[[LossBatch], Tensor],
    expected: Variant,
    batches: Sequence[LossBatch],
    *,
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Compare the gradient of a loss with a method's on every batch, and find the fewest changes that explain it.

    Args:
        loss: The loss as a function of a batch, differentiable with respect to the batch's ``logp``.
        expected: The method.
        batches: The batches of `loss_batches`.
        tolerance: The largest difference that counts as rounding, relative to the gradient or to that of a token with
            A = w = 1, whichever is larger.
    """
    cases: list[Case] = []
    for batch in batches:
        gradient, value = differentiated(loss, batch)
        cases.append(
            Case(batch, gradient, value, ~near_discontinuity(expected.method, expected.tokens(batch)))
        )

    different = [case.different(expected, tolerance) for case in cases]
    shares: dict[str, float] = {}
    for case, mask in zip(cases, different, strict=True):
        counted = mask & (case.batch.mask > 0)
        shares[case.batch.name] = float(counted.sum() / case.batch.mask.sum())
    first = next((index for index, mask in enumerate(different) if mask.any()), None)
    if first is None:
        same_value = _same_value(expected, cases)
        return Comparison(repr(expected.method), (), shares, same_value, "", ())

    cause = _cause(expected, cases[first])
    changes: tuple[str, ...] | None = None
    variant: Variant | None = None
    if not cause.startswith(UNEXPLAINABLE):
        changes, variant = _explanation(expected, cases, tolerance)
    return Comparison(
        method=repr(expected.method),
        differences=changes,
        shares=shares,
        same_value=variant is not None and _same_value(variant, cases),
        cause="; ".join(changes) if changes else cause,
        examples=tuple(_examples(expected, cases[first], different[first])),
    )


def differentiated(loss: Callable[[LossBatch], Tensor], batch: LossBatch) -> tuple[Tensor, Tensor]:
    """Return the gradient of the loss with respect to each token's log-probability, and the loss."""
    logp = batch.logp.clone().requires_grad_()
    value = loss(replace(batch, logp=logp))
    (gradient,) = torch.autograd.grad(value, logp, allow_unused=True)
    if gradient is None:
        gradient = torch.zeros_like(logp)
    return gradient, value.detach()


def _same_value(variant: Variant, cases: Sequence[Case]) -> bool:
    """Check whether the variant's loss has the loss's value on every batch, up to rounding."""
    for case in cases:
        expected = variant.loss(case.batch).detach()
        if not torch.isclose(expected, case.value.to(expected.dtype), rtol=1e-3, atol=1e-5):
            return False
    return True


def _explanation(
    expected: Variant, cases: Sequence[Case], tolerance: float
) -> tuple[tuple[str, ...] | None, Variant | None]:
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
    return None, None


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
    return not any(case.different(variant, tolerance).any() for case in cases)


def _factor(variant: Variant, case: Case, tolerance: float) -> float | None:
    """Return the factor between the gradients of the loss and the variant; None if it differs between tokens."""
    expected = case.expected(variant)
    nonzero = case.compared & (expected != 0)
    if not nonzero.any():
        return None
    factor = (case.gradient[nonzero] / expected[nonzero]).double().median().item()
    if not math.isfinite(factor) or factor == 0:
        return None
    if case.different(variant.changed(factor=factor), tolerance).any():
        return None
    return factor


def fitted_clip(expected: Variant, cases: Sequence[Case]) -> dict[str, Change]:
    """Find out at which ratios the loss under test clips, if the expected method has a fixed clip.

    Each bound lies between the outermost ratio at which the loss still has a gradient, and the next ratio, at which it
    has none. Of the numbers between them, the one with the fewest decimals is taken.

    Args:
        expected: The expected method.
        cases: The batches, with the gradient of the loss under test.

    Returns:
        One entry: a description, and the change of a variant to a fixed clip with these bounds. Empty if a bound does
        not appear in the batches, or if no bound fits all tokens.
    """
    if not isinstance(expected.method.clip, FixedClip):
        return {}
    ratios: list[Tensor] = []
    positive: list[Tensor] = []
    negative: list[Tensor] = []
    has_gradient: list[Tensor] = []
    for case in cases:
        tokens = expected.method.tokens(expected.tokens(case.batch))
        counted = case.batch.mask > 0
        ratios.append(tokens.ratio[counted])
        positive.append(case.batch.advantages[counted] > 0)
        negative.append(case.batch.advantages[counted] < 0)
        has_gradient.append(case.gradient[counted] != 0)
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
        return {}
    high = _roundest(kept_above.max().item() - 1, blocked_above.min().item() - 1)
    low = _roundest(1 - kept_below.min().item(), 1 - blocked_below.max().item())
    if low is None or high is None:
        return {}
    if not 0 <= low <= 1 or high < 0:
        return {}
    return {f"clips at {1 - low:g} and {1 + high:g}": lambda variant: variant.clipped(low, high)}


def _roundest(start: float, end: float) -> float | None:
    """Return the number with the fewest decimals in an interval; None if the interval is empty."""
    if start > end:
        return None
    for decimals in range(8):
        number = round((start + end) / 2, decimals)
        if start <= number <= end:
            return number
    return (start + end) / 2


def _cause(expected: Variant, case: Case) -> str:
    """Return the cause of a difference that `bandpo.core.gradient_check` names."""
    check = compare_gradient(
        case.gradient, expected.method, expected.tokens(case.batch), case.share(expected)
    )
    return check.cause or "none that is known"


def _examples(expected: Variant, case: Case, different: Tensor) -> Iterator[str]:
    """Describe the first tokens that differ."""
    expected_gradient = case.expected(expected)
    tokens = expected.tokens(case.batch)
    for row, column in different.nonzero()[:EXAMPLES].tolist():
        location = f"batch {case.batch.name!r}, sequence {row + 1}, token {column + 1}"
        numbers = f"{case.gradient[row, column]:.4g}, expected {expected_gradient[row, column]:.4g}"
        if case.batch.mask[row, column] == 0:
            yield f"{location}: {numbers}; the token does not count"
            continue
        ratio = tokens.log_ratio[row, column].exp()
        advantage = case.batch.advantages[row, column]
        yield f"{location}: {numbers}, at a ratio of {ratio:.4g} and an advantage of {advantage:.3g}"
