"""The comparison of a loss with a method on several batches, and the search for what makes the difference.

`compare_loss` differentiates the loss once per batch. Where it differs from the method, known differences are tried on
the method's side, one and then several at a time, until the two agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from bandpo.batch import Batch
from bandpo.gradient_check import TOLERANCE, unsure
from bandpo.gradient_check import compare as compare_gradient
from bandpo.loss import aggregate, policy_loss
from bandpo.methods import Method
from bandpo.objectives import DropOutside, DualClip
from bandpo.rules import FixedClip, Unclipped
from bandpo.testing._batches import LossBatch

if TYPE_CHECKING:
    from torch import Tensor

COUNTING_EMPTY = {
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
"""Averages that count sequences without a counted token, by those that leave them out; see `bandpo.aggregate`."""
COUNTS_EMPTY = "empty sequences count in the mean"
MOST_CHANGES = 3
"""Differences that are tried at a time."""
NO_VARIANT = ("it is not finite", "no gradient reached")
"""How the causes begin that no known difference has; see `bandpo.gradient_check`."""
EXAMPLES = 3
"""Tokens that a message names."""


@dataclass(frozen=True)
class Variant:
    """A method's loss, with what frameworks do besides."""

    method: Method
    aggregation: str | None = None
    """See `bandpo.aggregate`; the method's if None."""
    normalizer: float | None = None
    """See `bandpo.aggregate`; under ``seq-mean-token-sum-norm`` the width of the batch if None."""
    of_rollout: bool = False
    """Whether the ratio refers to the rollout engine's policy."""
    weighted: bool = True
    """Whether importance weights are used, where the batch has any."""
    counts_empty: bool | None = None
    """Whether sequences without a counted token count in a mean over sequences; as ``aggregation`` says if None."""
    sums_padding: bool = False
    """Whether all tokens are summed, those that do not count too, each times its sequence's length over the width."""
    sums_penalties: bool = False
    """Whether the penalty is summed over tokens, while the rest is averaged."""
    clamp: float = math.inf
    """Largest \\|log r\\|. What a clamp holds has no gradient."""
    sequence_clamp: float = math.inf
    """Largest mean of log r over a sequence."""
    factor: float = 1.0
    """On the loss."""

    @property
    def average(self) -> str:
        """The name of its average, for `bandpo.aggregate`."""
        average = self.aggregation or self.method.aggregation or "token-mean"
        if self.counts_empty is None:
            return average
        if self.counts_empty:
            return COUNTING_EMPTY.get(average, average)
        return {counting: plain for plain, counting in COUNTING_EMPTY.items()}.get(average, average)

    def averaged(self, values: Tensor, batch: LossBatch) -> Tensor:
        """Reduce values of tokens to one number."""
        if self.sums_padding:
            return (values * batch.mask.sum(1, keepdim=True)).sum() / values.numel()
        if self.sums_penalties:
            # The mean over tokens is in the advantages.
            return aggregate(values, batch.mask, "sum")
        normalizer = self.normalizer
        if normalizer is None and self.average in ("seq-mean-token-sum-norm", "dr_grpo"):
            normalizer = float(batch.mask.shape[1])
        return aggregate(values, batch.mask, self.average, normalizer=normalizer)

    def summed(self) -> Variant:
        """Itself without average and factor. The variants that differ in these only have one sum in common."""
        if self.sums_padding:
            return self.changed(factor=1.0)
        average = self.aggregation if self.sums_penalties else "sum"
        return self.changed(aggregation=average, normalizer=None, counts_empty=None, factor=1.0)

    def loss(self, batch: LossBatch) -> Tensor:
        """Compute the loss of a batch."""
        logp_old = batch.logp_rollout if self.of_rollout else batch.logp_old
        moved = (batch.logp - logp_old).detach()
        count = batch.mask.sum(1, keepdim=True).clamp(min=1)
        mean = (moved * batch.mask).sum(1, keepdim=True) / count
        logp = batch.logp.where(moved.abs() <= self.clamp, logp_old + moved.clamp(-self.clamp, self.clamp))
        if self.sequence_clamp < math.inf:
            logp = logp.where(mean <= self.sequence_clamp, logp.detach() - (mean - self.sequence_clamp))
        outputs = policy_loss(
            logp,
            logp_old,
            batch.advantages / batch.mask.sum() if self.sums_penalties else batch.advantages,
            torch.ones_like(batch.mask) if self.sums_padding else batch.mask,
            method=self.method,
            weights=batch.weights if self.weighted else None,
            aggregation=lambda values: self.averaged(values, batch),
            packed=False,
        )
        return self.factor * outputs.loss

    def tokens(self, batch: LossBatch) -> Batch:
        """The batch as rules and objectives see it."""
        return Batch.read(
            batch.logp,
            batch.logp_rollout if self.of_rollout else batch.logp_old,
            batch.advantages,
            batch.mask,
            weights=batch.weights if self.weighted else None,
        )

    def changed(self, **changes: Any) -> Variant:
        """Itself with other fields."""
        return replace(self, **changes)

    def with_method(self, **changes: Any) -> Variant:
        """Itself with a method that has other fields."""
        return replace(self, method=replace(self.method, **changes))

    def dual_clipped(self, max_ratio: float) -> Variant:
        """Itself with a dual clip, or another one."""
        objective = self.method.objective
        single = objective.objective if isinstance(objective, DualClip) else objective
        return self.with_method(objective=DualClip(max_ratio, single) if max_ratio < math.inf else single)

    def limited(self, max_weight: float) -> Variant:
        """Itself with another limit of the weight, where the objective has one."""
        objective = self.method.objective
        if not isinstance(objective, DropOutside):
            return self
        return self.with_method(objective=replace(objective, max_weight=max_weight))

    def clipped(self, low: float, high: float) -> Variant:
        """Itself with another fixed clip, where the method has one."""
        return (
            self.with_method(clip=FixedClip(low, high)) if isinstance(self.method.clip, FixedClip) else self
        )

    def unclipped(self) -> Variant:
        """Itself without its fixed clip, where the method has one."""
        return self.with_method(clip=Unclipped()) if isinstance(self.method.clip, FixedClip) else self


Change = Callable[[Variant], Variant]
KNOWN: tuple[dict[str, Change], ...] = (
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
"""Known differences, in groups of which at most one acts. The last group has the clips; see `fitted_clip`."""


@dataclass(frozen=True, eq=False)
class Case:
    """A batch and what the loss gives on it."""

    batch: LossBatch
    gradient: Tensor
    """Of the loss by each token's log-probability."""
    value: Tensor
    """The loss."""
    compared: Tensor
    """Tokens to compare: all but those so near to a bound that rounding decides."""
    sums: dict[Variant, Tensor] = field(default_factory=dict)
    """The gradients of sums over tokens that were computed."""

    def expected(self, variant: Variant) -> Tensor:
        """Compute the gradient of a variant's loss by each token's log-probability."""
        summed = variant.summed()
        if summed not in self.sums:
            self.sums[summed] = differentiated(summed.loss, self.batch)[0]
        if variant.sums_padding:
            return variant.factor * self.sums[summed]
        return variant.factor * self.share(variant) * self.sums[summed]

    def share(self, variant: Variant) -> Tensor:
        """Compute what each token's loss counts for in a variant's average."""
        values = torch.zeros_like(self.batch.logp, requires_grad=True)
        return torch.autograd.grad(variant.averaged(values, self.batch), values)[0]

    def different(self, variant: Variant, tolerance: float) -> Tensor:
        """Whether each token's gradient is not the variant's, to rounding. A token that does not count has none."""
        expected = self.expected(variant)
        # In float32 a ratio of e^40 is known to 5e-6.
        unit = torch.maximum(self.gradient.abs(), expected.abs()) + 1 / self.batch.mask.sum()
        equal = (self.gradient - expected).abs() <= tolerance * unit
        return ~equal & self.compared


@dataclass(frozen=True)
class Comparison:
    """How a loss differs from a method."""

    method: str
    differences: tuple[str, ...] | None
    """What would make the gradients equal: nothing if they are; None if nothing known does."""
    shares: dict[str, float]
    """Of the counted tokens, the share whose gradients differ, by the name of the batch."""
    same_value: bool
    """Whether the loss itself is the same too, with the differences made up for."""
    cause: str
    """What the difference points to; empty if there is none."""
    examples: tuple[str, ...]
    """The first tokens that differ, each with both numbers."""

    @property
    def equal(self) -> bool:
        """Whether the loss has the method's gradient."""
        return self.differences == ()

    def __str__(self) -> str:
        if self.equal:
            return f"the loss has the gradient of {self.method}"
        shares = ", ".join(
            f"{share:.2%} of the tokens of the batch {name!r}" for name, share in self.shares.items()
        )
        return "\n".join(
            [
                f"the loss does not have the gradient of {self.method}: {shares} differ.",
                *(f"  {example}" for example in self.examples),
                f"Likely difference: {self.cause}.",
            ]
        )


def compare_loss(
    loss: Callable[[LossBatch], Tensor],
    expected: Variant,
    batches: Sequence[LossBatch],
    *,
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Compare the gradient of a loss with a method's on every batch, and find the fewest known differences.

    Args:
        loss: The loss as a function of a batch, differentiable by the batch's ``logp``.
        expected: The method.
        batches: From `loss_batches`.
        tolerance: The largest difference that counts as rounding, relative to the gradient or to what a token with a
            weight of 1 counts for.
    """
    cases = []
    for batch in batches:
        gradient, value = differentiated(loss, batch)
        cases.append(Case(batch, gradient, value, ~unsure(expected.method, expected.tokens(batch))))

    different = [case.different(expected, tolerance) for case in cases]
    shares = {
        case.batch.name: float((one & (case.batch.mask > 0)).sum() / case.batch.mask.sum())
        for case, one in zip(cases, different, strict=True)
    }
    first = next((index for index, one in enumerate(different) if one.any()), None)
    if first is None:
        same_value = _same_value(expected, cases)
        return Comparison(repr(expected.method), (), shares, same_value, "", ())

    cause = _cause(expected, cases[first])
    hopeless = any(cause.startswith(reason) for reason in NO_VARIANT)
    named, variant = (None, None) if hopeless else _explanation(expected, cases, tolerance)
    return Comparison(
        repr(expected.method),
        named,
        shares,
        variant is not None and _same_value(variant, cases),
        "; ".join(named) if named else cause,
        tuple(_examples(expected, cases[first], different[first])),
    )


def differentiated(loss: Callable[[LossBatch], Tensor], batch: LossBatch) -> tuple[Tensor, Tensor]:
    """Return the gradient of the loss by each token's log-probability, and the loss."""
    logp = batch.logp.clone().requires_grad_()
    value = loss(replace(batch, logp=logp))
    (gradient,) = torch.autograd.grad(value, logp, allow_unused=True)
    return torch.zeros_like(logp) if gradient is None else gradient, value.detach()


def _same_value(variant: Variant, cases: Sequence[Case]) -> bool:
    values = ((variant.loss(case.batch).detach(), case.value) for case in cases)
    return all(bool(torch.isclose(one, other.to(one.dtype), rtol=1e-3, atol=1e-5)) for one, other in values)


def _explanation(
    expected: Variant, cases: Sequence[Case], tolerance: float
) -> tuple[tuple[str, ...] | None, Variant | None]:
    """Return the fewest known differences that make all gradients equal, and the variant that has them."""
    fitted = fitted_clip(expected, cases)
    groups = [*KNOWN[:-1], {**KNOWN[-1], **fitted}]
    # The batch 'usual' tells most variants apart.
    ordered = sorted(cases, key=lambda case: case.batch.name != "usual")
    with_factor: list[tuple[tuple[str, ...], Variant]] = []
    for changes in range(MOST_CHANGES + 1):
        # A factor is a change too.
        one_more: list[tuple[tuple[str, ...], Variant]] = []
        for names, variant in _variants(expected, groups, changes):
            if _equal(variant, ordered, tolerance):
                return names, variant
            factor = _factor(variant, ordered[0], tolerance)
            if factor is not None:
                name = f"every token is {factor:.4g} times as expected"
                one_more.append(((*names, name), variant.changed(factor=factor)))
        for names, variant in with_factor:
            if _equal(variant, ordered, tolerance):
                return names, variant
        with_factor = one_more
    return None, None


def _variants(
    expected: Variant, groups: Sequence[dict[str, Change]], changes: int
) -> Iterator[tuple[tuple[str, ...], Variant]]:
    """Generate the variants with so many changes of different groups, each of which changes something."""
    for chosen in itertools.combinations(groups, changes):
        for names in itertools.product(*chosen):
            variant = expected
            for group, name in zip(chosen, names, strict=True):
                changed = group[name](variant)
                if changed == variant:
                    break
                variant = changed
            else:
                yield names, variant


def _equal(variant: Variant, cases: Sequence[Case], tolerance: float) -> bool:
    return not any(case.different(variant, tolerance).any() for case in cases)


def _factor(variant: Variant, case: Case, tolerance: float) -> float | None:
    """Return the one factor between both gradients, if there is one."""
    expected = case.expected(variant)
    live = case.compared & (expected != 0)
    if not live.any():
        return None
    factor = (case.gradient[live] / expected[live]).double().median().item()
    if (
        not math.isfinite(factor)
        or factor == 0
        or case.different(variant.changed(factor=factor), tolerance).any()
    ):
        return None
    return factor


def fitted_clip(expected: Variant, cases: Sequence[Case]) -> dict[str, Change]:
    """Return the fixed clip whose bounds the blocked tokens show, as a change, if there is one.

    A bound lies between the last ratio that has a gradient and the first that has none.
    """
    if not isinstance(expected.method.clip, FixedClip):
        return {}
    above: list[Tensor] = []
    below: list[Tensor] = []
    kept_above: list[Tensor] = []
    kept_below: list[Tensor] = []
    for case in cases:
        tokens = expected.method.tokens(expected.tokens(case.batch))
        ratio, advantages = tokens.ratio, case.batch.advantages
        counted, kept = case.batch.mask > 0, case.gradient != 0
        above.append(ratio[counted & (advantages > 0) & ~kept])
        below.append(ratio[counted & (advantages < 0) & ~kept & (ratio < 1)])
        kept_above.append(ratio[counted & (advantages > 0) & kept])
        kept_below.append(ratio[counted & (advantages < 0) & kept])
    first_above, first_below = torch.cat(above), torch.cat(below)
    last_above, last_below = torch.cat(kept_above), torch.cat(kept_below)
    if not all(one.numel() for one in (first_above, first_below, last_above, last_below)):
        return {}
    high = _roundest(last_above.max().item() - 1, first_above.min().item() - 1)
    low = _roundest(1 - last_below.min().item(), 1 - first_below.max().item())
    if low is None or high is None or not 0 <= low <= 1 or high < 0:
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
    """What `bandpo.gradient_check` makes of a difference."""
    check = compare_gradient(
        case.gradient, expected.method, expected.tokens(case.batch), case.share(expected)
    )
    return check.cause or "none that is known"


def _examples(expected: Variant, case: Case, different: Tensor) -> Iterator[str]:
    """Name the first tokens that differ."""
    wanted, tokens = case.expected(expected), expected.tokens(case.batch)
    for row, column in different.nonzero()[:EXAMPLES].tolist():
        where = f"batch {case.batch.name!r}, sequence {row + 1}, token {column + 1}"
        numbers = f"{case.gradient[row, column]:.4g}, expected {wanted[row, column]:.4g}"
        if case.batch.mask[row, column] == 0:
            yield f"{where}: {numbers}; the token does not count"
        else:
            ratio, advantage = tokens.log_ratio[row, column].exp(), case.batch.advantages[row, column]
            yield f"{where}: {numbers}, at a ratio of {ratio:.4g} and an advantage of {advantage:.3g}"
