"""`bandpo_lab.compare`: compare methods on small tables of logits, over learning rates, seeds and optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
import torch
from tqdm import tqdm

from bandpo.core._shown import as_html
from bandpo.core.loss import policy_loss
from bandpo.core.methods import Method
from bandpo.core.objectives import Objective
from bandpo.core.rule_check import check
from bandpo.core.rules import ClipRule, Unclipped
from bandpo.core.schedules import TrainingState
from bandpo.core.text import as_method
from bandpo_lab.errors import InvalidValue
from bandpo_lab.interval import Interval
from bandpo_lab.page import Picture
from bandpo_lab.study.bandits import Outcome, World, rare_arm, simulate
from bandpo_lab.study.optimizers import OPTIMIZERS
from bandpo_lab.study.statistics import Curve, difference, student
from bandpo_lab.style import add_legend, line_styles, plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MethodLike = Method | ClipRule | Objective | str
"""A method as an object or as its text."""
WORLD = rare_arm(0.002)
"""The default task."""
EQUAL = 0.02
"""The largest difference of mean rewards that is called equal: one answer in fifty."""
ERROR_RATE = 0.05
"""The probability that any difference under one optimizer is claimed falsely."""
INTERVAL = "{difference:+.3f} [{low:+.3f}, {high:+.3f}]"
"""The format of a difference with its interval."""
DISAGREE = "depends on the optimizer"
"""The verdict if optimizers contradict each other."""
OPEN = "is left open"
"""The verdict if an interval contains 0 and differences larger than `EQUAL`."""


def compare(
    methods: Sequence[Method | ClipRule | Objective | str],
    *,
    baseline: Method | ClipRule | Objective | str | None = None,
    lags: Sequence[int] = (0, 4),
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    seeds: int = 64,
    rates: Sequence[float] | None = None,
    samples: int = 128,
    world: World = WORLD,
) -> Comparison:
    """Train small tables with each method and compare the mean rewards.

    This takes about a minute and is a screening before a model is trained. A table is a policy of one decision among 16
    answers. One answer is rewarded with probability 0.97 and has the initial probability 0.002, so it is a rare winner;
    the others are rewarded with probability 0.05. Training has 80 batches, each used once in 4 minibatches, with GRPO's
    advantages in groups of 16 and `bandpo.policy_loss`.

    Every method runs at every learning rate with every seed, with the same random numbers for all methods. It runs on
    fresh data and on data that is 4 batches old, as in asynchronous training, and under several optimizers, because the
    best method depends on the optimizer. A method gains if it gains under all of them.

    Results on tables need not hold for networks: see docs/when.md.

    Args:
        methods: Methods, as objects or texts. An objective alone gets no clip rule. Classes defined in a notebook are
            accepted.
        baseline: The method with which the others are compared; by default the last.
        lags: The ages of the data in batches. Each is compared separately.
        optimizers: Names in `bandpo_lab.study.optimizers.OPTIMIZERS`; by default all: ``adam``, ``head-and-trunk``,
            ``shared-moment`` and ``momentum``.
        seeds: The number of seeds of each method at each learning rate, at least 4.
        rates: The learning rates, if there is one optimizer; by default eight for each optimizer.
        samples: The number of samples in a batch, a multiple of 16.
        world: The task, such as ``zipf(0.002)`` or ``dominant(0.01)`` of `bandpo_lab.study.bandits`.

    Raises:
        ValueError: A method does not pass `bandpo.check`, or depends on something that tables do not have: other
            tokens, longer sequences, entropy or a controller. Or there are fewer than two methods, a number is out of
            its range, or there are rates for several optimizers.

    >>> from bandpo_lab import compare
    >>> one_optimizer = {"optimizers": ["shared-moment"], "rates": [0.08, 0.16]}
    >>> comparison = compare(["Unclipped()", "FixedClip(0.2)"], lags=[4], seeds=16, **one_optimizer)
    >>> comparison.verdicts[4, "Unclipped()"]
    'gains'
    """
    methods_by_name = {_name(method): _as_method(method) for method in methods}
    names = list(methods_by_name)
    baseline_name = names[-1] if names else ""
    if baseline is not None:
        baseline_name = _name(baseline)
    if len(names) < 2 or len(names) < len(methods) or baseline_name not in names:
        listed = ", ".join(map(_name, methods)) or "none"
        raise InvalidValue(
            "give two or more methods, each once, and as baseline one of them; "
            f"got {listed}; baseline {baseline_name!r}"
        )
    if seeds < 4 or not lags:
        raise InvalidValue(f"compare takes at least 4 seeds and one lag, got {seeds=}, {lags=}")
    unknown = [name for name in optimizers if name not in OPTIMIZERS]
    if unknown or not optimizers:
        listed = ", ".join(map(repr, unknown)) or "none"
        raise InvalidValue(f"optimizers must be of {', '.join(OPTIMIZERS)}, got {listed}")
    if rates is not None and len(optimizers) > 1:
        raise InvalidValue(
            f"learning rates of different optimizers are not comparable; give one optimizer with rates, got "
            f"{', '.join(optimizers)}"
        )
    for name, method in methods_by_name.items():
        _check_token_independence(name, method)
    grids = {name: sorted(rates or OPTIMIZERS[name].rates) for name in optimizers}
    outcomes: dict[Case, Outcome] = {}
    # The tensors are so small that several threads would be slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # The progress bar is shown on a terminal only.
        for case in tqdm([Case(*key) for key in product(lags, optimizers, names)], disable=None, leave=False):
            outcomes[case] = simulate(
                world,
                methods_by_name[case.method],
                grids[case.optimizer],
                seeds=seeds,
                samples=samples,
                epochs=1,
                lag=case.lag,
                optimizer=case.optimizer,
            )
    finally:
        torch.set_num_threads(threads)
    return Comparison(baseline_name, grids, outcomes)


class Case(NamedTuple):
    """The key of a simulation in a comparison."""

    lag: int
    optimizer: str
    method: str


def _name(method: MethodLike) -> str:
    return method if isinstance(method, str) else repr(method)


def _as_method(method: MethodLike) -> Method:
    return Method(Unclipped(), method) if isinstance(method, Objective) else as_method(method)


def _check_token_independence(name: str, method: Method) -> None:
    """Check that a method can be compared on tables of logits, where each sample is a sequence of one token.

    Args:
        name: The name of the method, for errors.
        method: The method.

    Raises:
        ValueError: The gradient of a token depends on other tokens, or the method needs a quantity that tables do not
            have, such as the age of the data.
    """
    check(method)
    for number in method.varying().values():
        if number.needs != "progress":
            raise InvalidValue(f"{name}: {number!r} needs {number.needs}, which a table does not have")
    # Twenty sequences of four tokens, whose ratios are close to 1 in the first and far from 1 in the last.
    generator = torch.Generator().manual_seed(0)
    logp_old = torch.randn(20, 4, generator=generator).exp().neg()
    change = torch.randn(20, 4, generator=generator) * torch.logspace(-2, 0.5, 20)[:, None]
    advantages = torch.randn(20, 4, generator=generator)
    logp = (logp_old + change).clamp(max=-1e-3).requires_grad_()

    def loss(*tokens: torch.Tensor) -> torch.Tensor:
        state = TrainingState(progress=0.5)
        # Each row is one sequence, although the advantages differ between its tokens.
        return policy_loss(*tokens, method=method, state=state, aggregation="sum", packed=False).loss

    # The gradient of the batch must be that of the sum of the losses of single tokens.
    tokens = (logp, logp_old, advantages)
    flat_tokens = [tensor.flatten() for tensor in tokens]
    token_losses = [loss(*(tensor[k].view(1, 1) for tensor in flat_tokens)) for k in range(logp.numel())]
    (batch_gradient,) = torch.autograd.grad(loss(*tokens), logp)
    (token_gradient,) = torch.autograd.grad(torch.stack(token_losses).sum(), logp)
    if not torch.allclose(batch_gradient, token_gradient, rtol=1e-3, atol=1e-6):
        raise InvalidValue(
            f"{name} weights a token by others, of its sequence or its batch. A sample of a table is one token, and "
            "tables of all seeds share a batch: compare it by bandpo-lab study"
        )


class Row(TypedDict):
    """The results of one method at one lag and learning rate, under one optimizer."""

    lag: int
    optimizer: str
    method: str
    rate: float
    reward: float
    """The mean reward over all batches and seeds."""
    end: float
    """The mean reward over the last tenth of the batches and all seeds."""
    blocked: float
    """The share of the gradient of rare winners that the method dropped."""
    difference: float
    """The mean reward minus that of the baseline."""
    low: float
    """The lower end of the interval of the difference."""
    high: float
    """The upper end of the interval of the difference."""
    verdict: str
    """The conclusion from the interval, such as ``gains``."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`, which is shown as a table and a figure in a notebook.

    Attributes:
        baseline: The method with which the others are compared.
        rates: The learning rates of each optimizer.
        outcomes: The results of each simulation.
    """

    baseline: str
    rates: Mapping[str, Sequence[float]]
    outcomes: Mapping[Case, Outcome]

    @cached_property
    def curves(self) -> dict[Case, Curve]:
        """The mean reward over all batches of each simulation, by learning rate and seed."""
        return {
            case: Curve(self.rates[case.optimizer], outcome.auc.double().numpy())
            for case, outcome in self.outcomes.items()
        }

    @cached_property
    def table(self) -> list[Row]:
        """One row for each lag, optimizer and method, at the rate that is best on other seeds than it is scored on.

        ``difference`` is the mean reward minus that of the baseline on the same seeds. Its interval, from ``low`` to
        ``high``, is from a nested bootstrap, in which seeds are resampled and rates are chosen again each time. The
        joint coverage of all intervals of one optimizer is 95 %.
        """
        comparisons = {(case.lag, case.method) for case in self.curves if case.method != self.baseline}
        level = 1 - ERROR_RATE / len(comparisons)
        return [self._row(case, curve.best, curve, level, draws=4000) for case, curve in self.curves.items()]

    @cached_property
    def by_rate(self) -> list[Row]:
        """One row for each lag, optimizer, method and rate, with the 95 % interval of the difference at that rate."""
        rows: list[Row] = []
        for case, curve in self.curves.items():
            rows += [self._row(case, index, curve.at_rate(index)) for index in range(len(curve.rates))]
        return rows

    @cached_property
    def verdicts(self) -> dict[tuple[int, str], str]:
        """The verdict for each lag and each method except the baseline, under all optimizers.

        It is ``"gains"`` or ``"loses"`` only if that holds under every optimizer, and ``"depends on the optimizer"`` if
        one optimizer has a gain and another a loss.
        """
        by_method: dict[tuple[int, str], list[str]] = {}
        for row in self.table:
            if row["method"] != self.baseline:
                by_method.setdefault((row["lag"], row["method"]), []).append(row["verdict"])
        return {key: _common_verdict(verdicts) for key, verdicts in by_method.items()}

    def _row(self, case: Case, rate: int, curve: Curve, level: float = 0.95, draws: int = 1000) -> Row:
        """Return the row of a simulation, with the difference from the baseline of the same lag and optimizer.

        Args:
            case: The simulation.
            rate: The index of the learning rate for the columns ``rate``, ``end`` and ``blocked``.
            curve: The mean rewards by learning rate and seed, for the columns ``reward`` and ``difference``. If it has
                several rates, each bootstrap sample chooses the best one.
            level: The nominal coverage of the interval.
            draws: The number of bootstrap samples.
        """
        baseline = self.curves[case._replace(method=self.baseline)]
        seeds = curve.scores.shape[1]
        # If the curve has one rate only, compare it with the baseline at the same rate.
        if len(curve.rates) < len(baseline.rates):
            baseline = baseline.at_rate(rate)
        interval = difference(
            curve.resampled_scores, baseline.resampled_scores, [0] * seeds, draws=draws, level=level
        )
        outcome = self.outcomes[case]
        return {
            "lag": case.lag,
            "optimizer": case.optimizer,
            "method": case.method,
            "rate": self.rates[case.optimizer][rate],
            "reward": float(curve.resampled_scores(np.ones((1, seeds)))[0]),
            "end": float(outcome.end[rate].mean()),
            "blocked": float(outcome.blocked[rate].nanmean()),
            "difference": interval.value,
            "low": interval.low,
            "high": interval.high,
            "verdict": verdict(interval),
        }

    def _rows(self, lag: int, method: str) -> list[Row]:
        """Return the rows of a method at one lag, one for each optimizer."""
        return [row for row in self.table if (row["lag"], row["method"]) == (lag, method)]

    def _clause(self, lag: int, method: str) -> str:
        """Return the verdict on a method at one lag as a clause of a sentence, with the intervals."""
        rows = self._rows(lag, method)
        if self.verdicts[lag, method] == DISAGREE:
            texts = [("{verdict} under {optimizer} (" + INTERVAL + ")").format(**row) for row in rows]
            return f"{method} {DISAGREE}: it {', '.join(texts)}"
        texts = [("{optimizer} " + INTERVAL).format(**row) for row in rows]
        return f"{method} {self.verdicts[lag, method]} ({', '.join(texts)})"

    @property
    def sentence(self) -> str:
        """The result in words."""
        lags = dict.fromkeys(case.lag for case in self.curves)
        clauses: list[str] = []
        for lag in lags:
            method_clauses = [
                self._clause(lag, method) for verdict_lag, method in self.verdicts if verdict_lag == lag
            ]
            clauses.append(f"on {data_name(lag)} {', '.join(method_clauses)}")
        first = next(iter(self.outcomes.values()))
        rates, seeds, _ = first.rewards.shape
        titles = ", ".join(OPTIMIZERS[name].title for name in self.rates)
        terms = f"each at its best of {rates} learning rates, {seeds} seeds, trained by {titles}"
        return f"Mean reward against {self.baseline}, {terms}: {'; '.join(clauses)}."

    @plot_style()
    def figure(self) -> Figure:
        """Plot the mean reward by learning rate, with a row of panels for each lag and a column for each optimizer."""
        from matplotlib.figure import Figure

        lags = list(dict.fromkeys(case.lag for case in self.curves))
        methods = list(dict.fromkeys(case.method for case in self.curves))
        optimizers = list(self.rates)
        styles = line_styles(methods)
        seeds = next(iter(self.outcomes.values())).rewards.shape[1]
        width = max(4.2, 2.6 * len(optimizers))
        figure = Figure(figsize=(width, 1 + 2.6 * len(lags)))
        panels = figure.subplots(len(lags), len(optimizers), squeeze=False, sharey=True)
        for lag, row in zip(lags, panels, strict=True):
            for optimizer, axes in zip(optimizers, row, strict=True):
                for method in methods:
                    curve = self.curves[Case(lag, optimizer, method)]
                    intervals = [student(scores) for scores in curve.scores]
                    means, low, high = np.transpose(intervals)
                    options = styles[method].options()
                    axes.errorbar(
                        curve.rates, means, [means - low, high - means], **options, capsize=2, label=method
                    )
                axes.set_title(f"{optimizer}\n{data_name(lag)}")
                axes.set(xscale="log", xlabel="learning rate")
            row[0].set_ylabel(f"mean reward (n = {seeds} seeds)")
        add_legend(figure, 2)
        return figure

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the table as text: its header and its rows."""
        rows: list[list[str]] = []
        for row in self.table:
            case = Case(row["lag"], row["optimizer"], row["method"])
            edge = ", at the edge" if self.curves[case].at_edge else ""
            interval = "baseline" if case.method == self.baseline else INTERVAL.format(**row)
            rows.append(
                [
                    str(case.lag),
                    case.optimizer,
                    case.method,
                    f"{row['reward']:.3f}",
                    interval,
                    f"{row['end']:.3f}",
                    f"{row['rate']:.2g}{edge}",
                    f"{row['blocked']:.0%}",
                ]
            )
        header = ["lag", "optimizer", "method", "reward", "difference", "end", "best rate", "blocked"]
        return header, rows

    def __repr__(self) -> str:
        header, rows = self._cells()
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in (header, *rows)]
        return "\n".join([*lines, "", self.sentence])

    def _repr_html_(self) -> str:
        picture = Picture("compare", self.figure(), "").data_uri()
        return f'<div><img src="{picture}" alt="">{as_html(self.sentence, *self._cells())}</div>'


def _common_verdict(verdicts: Sequence[str]) -> str:
    """Return the verdict that holds under every optimizer.

    >>> _common_verdict(["gains", "gains"]), _common_verdict(["gains", "loses"]), _common_verdict(["gains", OPEN])
    ('gains', 'depends on the optimizer', 'is left open')
    """
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return DISAGREE if {"gains", "loses"} <= set(verdicts) else OPEN


def verdict(interval: Interval) -> str:
    """Return the verdict that follows from the interval of a difference.

    >>> [verdict(Interval(0.0, *ends)) for ends in ((0.01, 0.1), (-0.2, -0.1), (-0.01, 0.01), (-0.1, 0.1))]
    ['gains', 'loses', 'equals it within 0.02', 'is left open']
    """
    if interval.low > 0:
        return "gains"
    if interval.high < 0:
        return "loses"
    if interval.low >= -EQUAL and interval.high <= EQUAL:
        return f"equals it within {EQUAL}"
    return OPEN


def data_name(lag: int) -> str:
    """Return the age of the data in words."""
    return f"data {lag} batches old" if lag else "fresh data"
