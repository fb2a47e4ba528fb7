"""Find the method whose gradient is nearest to that of a loss, whatever the loss is called.

`Atlas.nearest` runs a loss on random tokens of several spreads and on the records that the repository contains. The
gradient of each token is compared with that of each candidate: each published method here with its defaults, the
methods of scripts/conformance.txt, and each kind of clip with the numbers of the loss's settings. Each candidate is
tried with the trainer's old policy and with the engine's, and with each average.

Agreement alone flatters a method that blocks few tokens, if the loss blocks few. A candidate's score is therefore the
share of tokens that agree, times the overlap of the two sets of blocked tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bandpo import Method, aggregate, parse
from bandpo.certificate.gradient import TOLERANCE, near_discontinuity, slope
from bandpo.certificate.tokens import LossBatch, loss_batches
from bandpo.certificate.variants import COUNTING_EMPTY, Variant
from bandpo.core.methods import METHODS

RECORDS = Path(__file__).parents[1] / "packages/bandpo/tests/replay/records"
WIDE = 1.5
"""The standard deviation of log r in the batch ``wide``, as many steps after the data was generated."""
DRIFTS = {"sequences near": 8e-4, "sequences apart": 1.0}
"""The largest mean of log r over a sequence, in batches in which the tokens of a sequence move together. In them the
bounds of GSPO, and limits of a sequence's divergence, block some sequences and not others."""
AVERAGES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "sum")
PADDED = "padded-sum"
"""Each token times its sequence's length over the size of the batch, as in `Variant.sums_padding`."""
DEFAULT_BOUNDS = (0.2,)
CAPS = (3.0, 10.0, 20.0)
"""The dual clips and largest weights that frameworks have as defaults."""
BLOCKED = 1e-6
"""A token counts as blocked if its gradient is below this, relative to that of a token with A = w = 1."""
LEAST_CONDITION = 1.5
"""A condition on the ratio is stated if it admits ratios up to this."""
FINALISTS = 24
"""The number of candidates that are compared on all tokens, for each average."""
SAMPLED = 4
"""One of this many tokens selects them."""
BY_PROBABILITY = ("BandPO", "BandAbove", "DPPO")
"""The methods whose bounds depend on the probability of a token, of which the nearest one is named beside."""


@dataclass(frozen=True)
class Candidate:
    """A method with an old policy."""

    text: str
    """Text form of the method."""
    engine: bool
    """True if the ratio refers to the rollout engine's policy."""


def recorded_batches(folder: Path = RECORDS) -> Iterator[LossBatch]:
    """Yield the tokens of each record in the repository as one batch, with the name of its folder.

    Their two old policies are the same, because a record contains the one of its trainer's loss.
    """
    from bandpo.replay.record import as_batch
    from rlvet import open_run

    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            continue
        losses = [as_batch(loss) for loss in open_run(path).batches()]
        width = max(loss.mask.shape[1] for loss in losses)

        def joined(name: str, losses: Sequence[Any] = losses, width: int = width) -> Tensor:
            padded = [
                torch.nn.functional.pad(values, (0, width - values.shape[1]))
                for values in (getattr(loss, name).expand(loss.mask.shape) for loss in losses)
            ]
            return torch.cat(padded).float()

        old = joined("logp_old").clamp(max=-1e-6)
        new = (old + joined("log_ratio")).clamp(max=-1e-6)
        yield LossBatch(f"record {path.name}", new, old, old.clone(), joined("advantages"), joined("mask"))


def random_batches() -> list[LossBatch]:
    """Return the batches of `loss_batches`, one in which the policy moved far, and `DRIFTS`."""
    batches = {batch.name: batch for batch in loss_batches()}
    usual = batches["usual"]
    change = (usual.logp - usual.logp_old) / 0.5
    moved = {"wide": WIDE * change}
    for name, largest in DRIFTS.items():
        # From -largest to largest over the sequences, in an order that has nothing to do with their advantages.
        order = torch.randperm(len(change), generator=torch.Generator().manual_seed(len(name)))
        mean = largest * (2 * order / (len(change) - 1) - 1)[:, None]
        moved[name] = mean + largest / 10 * change
    for name, log_ratio in moved.items():
        logp = (usual.logp_old + log_ratio).clamp(max=-1e-6)
        batches[name] = replace(usual, name=name, logp=logp)
    return list(batches.values())


def numbered_texts(numbers: Iterable[float]) -> Iterator[str]:
    """Yield the text form of each kind of clip with these numbers as bounds, radii and caps."""
    numbers = list(numbers)
    bounds = sorted({n for n in (*numbers, *DEFAULT_BOUNDS) if 0 < n <= 5})
    caps = sorted({n for n in (*numbers, *CAPS) if n > 1})
    shifted = sorted({n - 1 for n in numbers if n > 1})  # TRL gives 1 + ε as the bound of its weights
    for low, high in itertools.product([*bounds, 1.0], [*bounds, *shifted]):
        if low > 1:
            continue
        clip = f"FixedClip({low:g}, {high:g})"
        yield f"{'PPO' if low == high else 'DAPO'}({low:g}, {high:g})"
        yield f"GRPO({low:g}, {high:g})"
        yield f"Method({clip})"
        yield f"GSPO({low:g}, {high:g})"
        yield f"CISPO({low:g}, {high:g})"
        yield f"IcePop({low:g}, {high:g})"
        yield f"Method({clip}, DropOutside(inf))"
        for cap in sorted({*caps, 1 + high}):
            if cap > 1 + high - 1e-9:
                yield f"Method({clip}, DualClip({cap:g}))"
                yield f"Method({clip}, DualClip({cap:g}), level='sequence')"
    for bound in bounds:
        if bound < 1:
            yield from _by_probability(bound, caps)
        yield f"GMPO({bound:g})"
        yield f"SPO({bound:g})"
        yield f"DRO({bound:g})"
        yield f"M2PO({bound:g})"
    yield "Method(Unclipped())"
    yield "Method(Unclipped(), level='sequence')"


def _by_probability(radius: float, caps: Sequence[float]) -> Iterator[str]:
    for divergence in ("KL()", "TotalVariation()"):
        for cap in (*caps, math.inf):
            yield f"DPPO({divergence}, {radius:g}, {cap:g})"
            yield f"BandPO({divergence}, {radius:g}, {cap:g}, {cap:g})"
        yield f"BandAbove({divergence}, {radius:g})"


class Atlas:
    """The candidates' gradients on a set of batches, computed once.

    Args:
        batches: The batches; those of `random_batches` and of the records if None.
        texts: Text forms of further candidates.
    """

    def __init__(self, batches: Sequence[LossBatch] | None = None, texts: Iterable[str] = ()) -> None:
        self.batches = [*random_batches(), *recorded_batches()] if batches is None else list(batches)
        self.counted = torch.cat([(batch.mask > 0).flatten() for batch in self.batches])
        self.advantages = torch.cat([batch.advantages.flatten() for batch in self.batches])[self.counted]
        self.lengths = [int((batch.mask > 0).sum()) for batch in self.batches]
        # The gradient of a token with A = w = 1 in a mean over the batch.
        self.unit = torch.cat([torch.full((n,), 1 / n) for n in self.lengths])
        self.averages = {name: self._shares(name) for name in (*AVERAGES, *COUNTING_EMPTY.values(), PADDED)}
        self.published = list(dict.fromkeys([*(f"{name}()" for name in METHODS), *texts]))
        self._methods: dict[str, Method | None] = {}
        self._slopes: dict[Candidate, Tensor] = {}

    def _shares(self, average: str) -> Tensor:
        """Return the weight of each counted token's loss in an average."""
        shares: list[Tensor] = []
        for batch in self.batches:
            values = torch.zeros_like(batch.mask, requires_grad=True)
            if average == PADDED:
                total = (values * batch.mask.sum(1, keepdim=True)).sum() / values.numel()
            else:
                width = float(batch.mask.shape[1])
                by_width = average in ("seq-mean-token-sum-norm", "dr_grpo")
                total = aggregate(values, batch.mask, average, normalizer=width if by_width else None)
            shares.append(torch.autograd.grad(total, values)[0][batch.mask > 0])
        return torch.cat(shares)

    def method(self, text: str) -> Method | None:
        """Return the method of a text form; None if its numbers are not valid."""
        if text not in self._methods:
            try:
                self._methods[text] = parse(text, Method)
            except ValueError:
                self._methods[text] = None
        return self._methods[text]

    def slope(self, candidate: Candidate) -> Tensor:
        """Return the derivative of each counted token's loss, before any average."""
        if candidate not in self._slopes:
            method = self.method(candidate.text)
            assert method is not None
            variant = Variant(method, of_rollout=candidate.engine)
            slopes = [slope(method, variant.tokens(batch))[batch.mask > 0] for batch in self.batches]
            self._slopes[candidate] = torch.cat(slopes).float()
        return self._slopes[candidate]

    def gradient(self, loss: Callable[[LossBatch], Tensor]) -> Tensor:
        """Return the gradient of a loss with respect to each counted token's log-probability."""
        gradients: list[Tensor] = []
        for batch in self.batches:
            logp = batch.logp.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(replace(batch, logp=logp)), logp, allow_unused=True)
            gradients.append((torch.zeros_like(logp) if gradient is None else gradient)[batch.mask > 0])
        return torch.cat(gradients).float()

    def _reaches_padding(self, loss: Callable[[LossBatch], Tensor]) -> bool:
        """Return True if a token that does not count has a gradient."""
        batch = self.batches[0]
        logp = batch.logp.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(replace(batch, logp=logp)), logp, allow_unused=True)
        return gradient is not None and bool((gradient[batch.mask == 0] != 0).any())

    def candidates(self, numbers: Iterable[float], namesake: str | None = None) -> list[Candidate]:
        """Return the candidates for a loss with these numbers in its settings, the namesake and plain ones first."""
        first = [] if namesake is None else [namesake]
        texts = dict.fromkeys([*first, *self.published, *numbered_texts(numbers)])
        return [
            Candidate(text, engine)
            for text, engine in itertools.product(texts, (False, True))
            if self.method(text) is not None
        ]

    # --- the search ---------------------------------------------------------------------------------------------------

    def different(self, gradient: Tensor, expected: Tensor, unit: Tensor | None = None) -> Tensor:
        """Return which tokens have another gradient, beyond rounding.

        Args:
            gradient: The gradient of a loss, by token.
            expected: Another one, or several in further first dimensions.
            unit: The gradient of a token with A = w = 1; that in a mean over the batch if None.
        """
        least = self.unit if unit is None else unit
        size = torch.maximum(torch.maximum(gradient.abs(), expected.abs()), least)
        return ~((gradient - expected).abs() <= TOLERANCE * size)

    def blocked(self, gradient: Tensor) -> Tensor:
        """Return which tokens have no gradient, though their advantage is not 0."""
        return (gradient.abs() <= BLOCKED * self.unit) & (self.advantages != 0)

    def score(self, gradient: Tensor, expected: Tensor, unit: Tensor | None = None) -> float:
        """Return the share of tokens that agree, as the mean over the batches, times the overlap of blocked tokens."""
        agree = (~self.different(gradient, expected, unit)).float()
        share = torch.stack([part.mean() for part in agree.split(self.lengths)]).mean()
        return float(share * overlap(self.blocked(gradient), self.blocked(expected)))

    def nearest(
        self, loss: Callable[[LossBatch], Tensor], numbers: Iterable[float] = (), namesake: str | None = None
    ) -> dict[str, Any]:
        """Return the entry of a loss: the nearest method, how near it is, and what differs.

        Args:
            loss: The loss as a function of a batch, differentiable with respect to ``logp``.
            numbers: The numbers of its settings.
            namesake: The method that is preferred among equals.
        """
        gradient = self.gradient(loss)
        if not gradient.isfinite().all():
            raise ValueError("the gradient of the loss is not finite")
        candidates = self.candidates(numbers, namesake)
        slopes = torch.stack([self.slope(candidate) for candidate in candidates])
        few = slopes[:, ::SAMPLED]
        found: list[tuple[float, float, float, int, str, float]] = []
        for average, shares in self.averages.items():
            # A part of the tokens selects the candidates that are compared on all of them.
            agree = ~self.different(gradient[::SAMPLED], few * shares[::SAMPLED], shares[::SAMPLED])
            first = _largest(agree.float().mean(-1), FINALISTS)
            for index in first:
                score = self.score(gradient, slopes[index] * shares, shares)
                found.append(self._entry(candidates, index, average, score, 1.0))
            if agree[first[0]].all():
                continue
            # Another factor is only tried where it could win, because it needs a median.
            for index in self._proportional(gradient[::SAMPLED], few * shares[::SAMPLED]):
                expected = slopes[index] * shares
                factor = self._factor(gradient, expected)
                if factor is not None:
                    score = self.score(gradient, factor * expected, factor * shares)
                    found.append(self._entry(candidates, index, average, score, factor))
        _, _, _, index, average, factor = min(found)
        best = candidates[index]
        other = Candidate(best.text, not best.engine)
        either = torch.equal(self.slope(best), self.slope(other))
        entry = self.compared(gradient, best, average, factor)
        if entry["identical"] and self._reaches_padding(loss):
            entry |= {"identical": False, "condition": "the token counts"}
        entry["old_policy"] = "any" if either else "engine" if best.engine else "trainer"
        entry["others"] = self.within(gradient, best, average, factor, candidates)
        return entry

    def _entry(
        self, candidates: Sequence[Candidate], index: int, average: str, score: float, factor: float
    ) -> tuple[float, float, float, int, str, float]:
        """Return a sort key of a candidate: the best score, then the plainest statement."""
        method = self.method(candidates[index].text)
        assert method is not None
        own = method.aggregation
        # An average of the method's own needs no mention, and one that is nowhere stated contradicts nothing.
        plain = 0 if own == _without_empty(average) else 1 if own is None else 2
        counts_empty = average != _without_empty(average)
        trainer = candidates[index].engine != (method.old_policy == "rollout")
        return (
            -round(score, 5),
            (factor != 1.0) + counts_empty / 2,
            plain + trainer / 2,
            index,
            average,
            factor,
        )

    def _proportional(self, gradient: Tensor, expected: Tensor) -> list[int]:
        """Return the candidates whose directions are nearest to that of the gradient."""
        sign = ((gradient.sign() == expected.sign()).float()).mean(-1)
        small = 1e-3 * self.unit.min()
        logs = (gradient.abs() + small).log() - (expected.abs() + small).log()
        spread = (logs - logs.median(-1, keepdim=True).values).abs().mean(-1)
        return _largest(sign - spread, FINALISTS // 4)

    def _factor(self, gradient: Tensor, expected: Tensor) -> float | None:
        both = ~self.blocked(gradient) & ~self.blocked(expected)
        if not both.any():
            return None
        factor = (gradient[both] / expected[both]).double().median().item()
        rounded = float(f"{factor:.4g}")
        return rounded if rounded > 0 and math.isfinite(rounded) and abs(rounded - 1) > TOLERANCE else None

    # --- what is said of a candidate ----------------------------------------------------------------------------------

    def ties(self, candidate: Candidate) -> Tensor:
        """Return which counted tokens are so near to a bound that rounding decides.

        If a method selects some tokens of a batch, as `KLCov` does, these are also the tokens that have an equal in it.
        """
        method = self.method(candidate.text)
        assert method is not None
        variant = Variant(method, of_rollout=candidate.engine)
        marks: list[Tensor] = []
        for batch in self.batches:
            counted = batch.mask > 0
            mark = near_discontinuity(method, variant.tokens(batch))[counted]
            if method.whole_batch:
                tensors = (batch.logp, batch.logp_old, batch.logp_rollout, batch.advantages)
                tokens = torch.stack([tensor[counted] for tensor in tensors], 1)
                _, which, number = tokens.unique(dim=0, return_inverse=True, return_counts=True)
                mark = mark | (number[which] > 1)
            marks.append(mark)
        return torch.cat(marks)

    def log_ratio(self, candidate: Candidate) -> Tensor:
        """Return log r of each counted token, to the candidate's old policy."""
        ratios = [
            (batch.logp - (batch.logp_rollout if candidate.engine else batch.logp_old))[batch.mask > 0]
            for batch in self.batches
        ]
        return torch.cat(ratios)

    def compared(
        self, gradient: Tensor, candidate: Candidate, average: str, factor: float = 1.0
    ) -> dict[str, Any]:
        """Return the comparison of a gradient with one candidate."""
        shares = factor * self.averages[average]
        expected = self.slope(candidate) * shares
        different = self.different(gradient, expected, shares) & ~self.ties(candidate)
        shares = {
            batch.name: round(1 - part.float().mean().item(), 4)
            for batch, part in zip(self.batches, different.split(self.lengths), strict=True)
        }
        entry: dict[str, Any] = {
            "method": candidate.text,
            "engine": candidate.engine,
            "average": average,
            "factor": factor,
            "identical": not different.any().item(),
            "agree": shares,
            "blocked": round(overlap(self.blocked(gradient), self.blocked(expected)).item(), 4),
        }
        if different.any():
            # Which tokens a method of the whole batch selects is no condition on a token.
            entry["condition"] = (
                "" if parse(candidate.text, Method).whole_batch else self.condition(candidate, different)
            )
            entry["first"] = self._first(gradient, expected, candidate, different)
        return entry

    def _first(
        self, gradient: Tensor, expected: Tensor, candidate: Candidate, different: Tensor
    ) -> dict[str, Any]:
        """Return the first token that differs, with both gradients relative to that of A = w = 1."""
        index = int(different.nonzero()[0])
        batch = next(i for i, end in enumerate(itertools.accumulate(self.lengths)) if index < end)
        logp_old = torch.cat(
            [(b.logp_rollout if candidate.engine else b.logp_old)[b.mask > 0] for b in self.batches]
        )
        return {
            "batch": self.batches[batch].name,
            "p": float(f"{logp_old[index].exp():.3g}"),
            "ratio": float(f"{self.log_ratio(candidate)[index].exp():.4g}"),
            "advantage": float(f"{self.advantages[index]:.3g}"),
            "loss": float(f"{gradient[index] / self.unit[index]:.3g}"),
            "method": float(f"{expected[index] / self.unit[index]:.3g}"),
        }

    def condition(self, candidate: Candidate, different: Tensor) -> str:
        """Return a condition under which no token differs; empty if there is none that is short."""
        log_ratio = self.log_ratio(candidate).double()
        conditions = {"": different}
        for name, part in (("A > 0", self.advantages > 0), ("A < 0", self.advantages < 0)):
            conditions[name] = different & part
        for name, part in conditions.items():
            if name and not part.any():
                return name
        for name, part in conditions.items():
            bound = self._below(log_ratio, part)
            if bound is not None:
                return " and ".join(filter(None, (name, bound)))
        return ""

    def _below(self, log_ratio: Tensor, different: Tensor) -> str | None:
        """Return the largest limit of r, or of |log r|, below which no token differs."""
        if not different.any():
            return None
        for size, text in ((log_ratio, "r ≤ {}"), (log_ratio.abs(), "|log r| ≤ {}")):
            least = size[different].min()
            below = size[size < least]
            if not below.numel() or least <= 0:
                continue
            start, end = below.max().item(), least.item()
            if text.startswith("r"):
                start, end = math.exp(min(start, 80)), math.exp(min(end, 80))
            least_bound = LEAST_CONDITION if text.startswith("r") else math.log(LEAST_CONDITION)
            bound = roundest(start, end)
            if bound > least_bound:
                return text.format(f"{bound:g}")
        return None

    def within(
        self, gradient: Tensor, best: Candidate, average: str, factor: float, candidates: Sequence[Candidate]
    ) -> list[dict[str, Any]]:
        """Return the other methods of `BY_PROBABILITY` that agree on all tokens up to a ratio, the nearest first."""
        family = best.text.partition("(")[0]
        found: dict[str, dict[str, Any]] = {}
        for candidate in candidates:
            name = candidate.text.partition("(")[0]
            if name not in BY_PROBABILITY or name == family or candidate.engine != best.engine:
                continue
            entry = self.compared(gradient, candidate, average, factor)
            condition = entry.get("condition", "")
            mean = sum(entry["agree"].values()) / len(entry["agree"])
            if not condition.startswith("r ≤") or float(condition[4:]) < 2 or mean < 0.8:
                continue
            if name not in found or mean > found[name]["agree"]:
                found[name] = {"method": candidate.text, "condition": condition, "agree": round(mean, 4)}
        return sorted(found.values(), key=lambda one: -one["agree"])


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Return the number of tokens in both sets divided by the number in either, 1 if both are empty."""
    both = (one & other).sum(-1).float()
    either = (one | other).sum(-1).float()
    return torch.where(either > 0, both / either.clamp(min=1), torch.ones_like(both))


def roundest(start: float, end: float) -> float:
    """Return the number with the fewest digits in ``[start, end)``."""
    for digits in range(1, 8):
        number = float(f"{(start + end) / 2:.{digits}g}")
        if start <= number < end:
            return number
    return start


def _largest(values: Tensor, count: int) -> list[int]:
    """Return the indices of the largest values, among equals the first ones."""
    return values.sort(descending=True, stable=True).indices[:count].tolist()


def _without_empty(average: str) -> str:
    return {counting: plain for plain, counting in COUNTING_EMPTY.items()}.get(average, average)


def numbers_of(settings: Mapping[str, Any]) -> list[float]:
    """Return the numbers among a loss's settings."""
    return [
        float(value)
        for value in settings.values()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
