"""`bandpo_lab.compare`: which method learns more in tables, at which learning rate, and with what certainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
import torch
from tqdm import tqdm

from bandpo._shown import as_html
from bandpo.errors import InvalidValue
from bandpo.loss import policy_loss
from bandpo.methods import Method
from bandpo.objectives import Objective
from bandpo.rule_check import check
from bandpo.rules import ClipRule, Unclipped
from bandpo.schedules import TrainingState
from bandpo.text import as_method
from bandpo_lab.interval import Interval
from bandpo_lab.page import Picture
from bandpo_lab.study.bandits import Outcome, World, rare_arm, simulate
from bandpo_lab.study.optimizers import OPTIMIZERS
from bandpo_lab.study.statistics import Curve, difference, student
from bandpo_lab.style import add_legend, line_styles, plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MethodLike = Method | ClipRule | Objective | str
"""Whatever names a method: an object, or its text."""
WORLD = rare_arm(0.002)
EQUAL = 0.02
"""Mean rewards that surely differ by less are called equal: one answer in fifty."""
WRONG = 0.05
"""How often any difference under one optimizer is claimed falsely."""
GAP = "{difference:+.3f} [{low:+.3f}, {high:+.3f}]"
DISAGREE = "depends on the optimizer"
"""The verdict where optimizers contradict each other."""
OPEN = "is left open"
"""The verdict where an interval holds 0 and more than a small difference."""


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
    """Train tables with each method and return which learns more: a screening of a minute, before a model is trained.

    A table is a policy of one decision: it chooses among 16 answers. One of them is rewarded 97 times in 100 and starts
    at p = 0.002, so it is a rare winner; the others are rewarded 5 times in 100. Training has 80 batches, each used
    once in 4 minibatches, with GRPO's advantages in groups of 16 and `bandpo.policy_loss`. Every method runs at every
    learning rate with every seed, which draws the same random numbers for all. It runs on fresh data and on data 4
    batches old, as asynchronous training has them, and under several optimizers, because which method wins depends on
    the optimizer. A method gains where it gains under all of them.

    What holds in a table need not hold in a network: see docs/when.md.

    Args:
        methods: Whatever ``method=`` takes, and objectives alone, which get no clip. What a notebook defines will do.
        baseline: One of them, with which the others are compared; by default the last.
        lags: Ages of the data in batches; each is a comparison of its own.
        optimizers: Names of `bandpo_lab.study.optimizers.OPTIMIZERS`; by default all: ``adam``, ``head-and-trunk``,
            ``shared-moment`` and ``momentum``.
        seeds: Of each method at each rate, at least 4.
        rates: Learning rates, at least one, where one optimizer is given; by default eight that go with each optimizer.
        samples: In a batch, a multiple of 16.
        world: Another task, such as ``zipf(0.002)`` or ``dominant(0.01)`` of `bandpo_lab.study.bandits`.

    Raises:
        ValueError: a method breaks `bandpo.check`, or needs what a table does not have: other tokens, a longer
            sequence, entropy, a controller. Or there are fewer than two methods, or a number does not fit, or rates are
            given for several optimizers.

    >>> from bandpo_lab import compare
    >>> one_optimizer = {"optimizers": ["shared-moment"], "rates": [0.08, 0.16]}
    >>> comparison = compare(["Unclipped()", "FixedClip(0.2)"], lags=[4], seeds=16, **one_optimizer)
    >>> comparison.verdicts[4, "Unclipped()"]
    'gains'
    """
    by_name = {_name(setting): _method(setting) for setting in methods}
    names = list(by_name)
    reference = "" if not names else names[-1]
    if baseline is not None:
        reference = _name(baseline)
    if len(names) < 2 or len(names) < len(methods) or reference not in names:
        listed = ", ".join(map(_name, methods)) or "none"
        raise InvalidValue(
            "give two or more methods, each once, and as baseline one of them; "
            f"got {listed}; baseline {reference!r}"
        )
    if seeds < 4 or not lags:
        raise InvalidValue(f"compare takes at least 4 seeds and one lag, got {seeds=}, {lags=}")
    unknown = [name for name in optimizers if name not in OPTIMIZERS]
    if unknown or not optimizers:
        listed = ", ".join(map(repr, unknown)) or "none"
        raise InvalidValue(f"optimizers must be of {', '.join(OPTIMIZERS)}, got {listed}")
    if rates is not None and len(optimizers) > 1:
        raise InvalidValue(
            f"learning rates mean another thing for each optimizer; give one optimizer with rates, got "
            f"{', '.join(optimizers)}"
        )
    for name, method in by_name.items():
        _check_alone(name, method)
    grids = {name: sorted(rates or OPTIMIZERS[name].rates) for name in optimizers}
    outcomes: dict[Case, Outcome] = {}
    # The tensors are small, so that several threads would wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # The progress bar is shown on a terminal only.
        for case in tqdm([Case(*key) for key in product(lags, optimizers, names)], disable=None, leave=False):
            outcomes[case] = simulate(
                world,
                by_name[case.method],
                grids[case.optimizer],
                seeds=seeds,
                samples=samples,
                epochs=1,
                lag=case.lag,
                optimizer=case.optimizer,
            )
    finally:
        torch.set_num_threads(threads)
    return Comparison(reference, grids, outcomes)


class Case(NamedTuple):
    """What names a simulation of a comparison."""

    lag: int
    optimizer: str
    method: str


def _name(method: MethodLike) -> str:
    return method if isinstance(method, str) else repr(method)


def _method(method: MethodLike) -> Method:
    return Method(Unclipped(), method) if isinstance(method, Objective) else as_method(method)


def _check_alone(name: str, method: Method) -> None:
    """Refuse a method by which a token's gradient depends on other tokens: a sample of a table has one."""
    check(method)
    for number in method.varying().values():
        if number.needs != "progress":
            raise InvalidValue(f"{name}: {number!r} needs {number.needs}, which a table does not have")
    # Twenty sequences of four tokens, which drift from little to much.
    draws = torch.Generator().manual_seed(0)
    logp_old, moved, advantages = (torch.randn(20, 4, generator=draws) for _ in range(3))
    logp_old = logp_old.exp().neg()
    logp = (logp_old + moved * torch.logspace(-2, 0.5, 20)[:, None]).clamp(max=-1e-3).requires_grad_()

    def loss(*tokens: torch.Tensor) -> torch.Tensor:
        state = TrainingState(progress=0.5)
        # Each row is one sequence, although the advantages differ from token to token.
        return policy_loss(*tokens, method=method, state=state, aggregation="sum", packed=False).loss

    tokens = logp, logp_old, advantages
    alone = [loss(*(x[k].view(1, 1) for x in map(torch.flatten, tokens))) for k in range(logp.numel())]
    (together,), (apart,) = (torch.autograd.grad(x, logp) for x in (loss(*tokens), torch.stack(alone).sum()))
    if not torch.allclose(together, apart, rtol=1e-3, atol=1e-6):
        raise InvalidValue(
            f"{name} weights a token by others, of its sequence or its batch. A sample of a table is one token, and "
            "tables of all seeds share a batch: compare it by bandpo-lab study"
        )


class Row(TypedDict):
    """Results of one method at one lag and learning rate, under one optimizer."""

    lag: int
    optimizer: str
    method: str
    rate: float
    reward: float
    """Mean over all batches and seeds."""
    end: float
    """Mean over the last tenth of the batches and all seeds."""
    blocked: float
    """Share of the gradient of rare winners that the method dropped."""
    difference: float
    """Mean reward minus the baseline's."""
    low: float
    """Lower end of the interval of the difference."""
    high: float
    """Upper end of the interval of the difference."""
    verdict: str


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`: shown in a notebook, printed, or read by its properties.

    Attributes:
        baseline: The method with which the others are compared.
        rates: Learning rates of each optimizer.
        outcomes: Results of each simulation.
    """

    baseline: str
    rates: Mapping[str, Sequence[float]]
    outcomes: Mapping[Case, Outcome]

    @cached_property
    def curves(self) -> dict[Case, Curve]:
        """Mean reward over all batches, by rate and seed."""
        return {
            case: Curve(self.rates[case.optimizer], outcome.auc.double().numpy())
            for case, outcome in self.outcomes.items()
        }

    @cached_property
    def table(self) -> list[Row]:
        """A row for each lag, optimizer and method, each at the rate that is best on other seeds than it is scored on.

        ``difference`` is the mean reward minus the baseline's on the same seeds. Its interval, from ``low`` to
        ``high``, is a nested bootstrap's: seeds are drawn anew, and rates chosen anew each time. All intervals of one
        optimizer together hold the truth in 95 % of cases.
        """
        compared = {(case.lag, case.method) for case in self.curves if case.method != self.baseline}
        level = 1 - WRONG / len(compared)
        return [self._row(case, curve.best, curve, level, draws=4000) for case, curve in self.curves.items()]

    @cached_property
    def by_rate(self) -> list[Row]:
        """A row for each lag, optimizer, method and rate: the difference at that rate, with its own 95 % interval."""
        return [
            self._row(case, place, curve.at_rate(place))
            for case, curve in self.curves.items()
            for place in range(len(curve.rates))
        ]

    @cached_property
    def verdicts(self) -> dict[tuple[int, str], str]:
        """The verdict on each lag and method but the baseline, under all optimizers together.

        ``"gains"`` and ``"loses"`` only where they hold under every optimizer, and ``"depends on the optimizer"`` where
        one optimizer has a gain and another a loss.
        """
        by_method: dict[tuple[int, str], list[str]] = {}
        for row in self.table:
            if row["method"] != self.baseline:
                by_method.setdefault((row["lag"], row["method"]), []).append(row["verdict"])
        return {key: _common_verdict(verdicts) for key, verdicts in by_method.items()}

    def _row(self, case: Case, place: int, curve: Curve, level: float = 0.95, draws: int = 1000) -> Row:
        """Return the row of a simulation, by all of its curve or by one rate alone."""
        base = self.curves[case._replace(method=self.baseline)]
        seeds = curve.scores.shape[1]
        if len(curve.rates) < len(base.rates):
            base = base.at_rate(place)
        gap = difference(curve.resampled_scores, base.resampled_scores, [0] * seeds, draws=draws, level=level)
        outcome = self.outcomes[case]
        return {
            "lag": case.lag,
            "optimizer": case.optimizer,
            "method": case.method,
            "rate": self.rates[case.optimizer][place],
            "reward": float(curve.resampled_scores(np.ones((1, seeds)))[0]),
            "end": float(outcome.end[place].mean()),
            "blocked": float(outcome.blocked[place].nanmean()),
            "difference": gap.value,
            "low": gap.low,
            "high": gap.high,
            "verdict": verdict(gap),
        }

    def _rows(self, lag: int, method: str) -> list[Row]:
        """Return the rows of a method at one lag, one for each optimizer."""
        return [row for row in self.table if (row["lag"], row["method"]) == (lag, method)]

    def _clause(self, lag: int, method: str) -> str:
        """Return what the intervals say of a method at one lag."""
        rows = self._rows(lag, method)
        if self.verdicts[lag, method] != DISAGREE:
            under = f"{rows[0]['optimizer']} " if len(rows) == 1 else ""
            gaps = ", ".join((GAP if len(rows) == 1 else "{optimizer} " + GAP).format(**row) for row in rows)
            return f"{method} {self.verdicts[lag, method]} ({under}{gaps})"
        parts = ", ".join(("{verdict} under {optimizer} (" + GAP + ")").format(**row) for row in rows)
        return f"{method} {DISAGREE}: it {parts}"

    @property
    def sentence(self) -> str:
        """The result in words. It claims a difference, or that there is none, where the intervals do."""
        lags = dict.fromkeys(case.lag for case in self.curves)
        clauses: list[str] = []
        for lag in lags:
            of_lag = [self._clause(lag, method) for age, method in self.verdicts if age == lag]
            clauses.append(f"on {data_name(lag)} {', '.join(of_lag)}")
        first = next(iter(self.outcomes.values()))
        rates, seeds, _ = first.rewards.shape
        titles = ", ".join(OPTIMIZERS[name].title for name in self.rates)
        terms = f"each at its best of {rates} learning rates, {seeds} seeds, trained by {titles}"
        return f"Mean reward against {self.baseline}, {terms}: {'; '.join(clauses)}."

    @plot_style()
    def figure(self) -> Figure:
        """Draw mean reward by learning rate, a row of panels for each lag and a column for each optimizer."""
        from matplotlib.figure import Figure

        lags = list(dict.fromkeys(case.lag for case in self.curves))
        methods = list(dict.fromkeys(case.method for case in self.curves))
        optimizers = list(self.rates)
        looks = line_styles(methods)
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
                    options = looks[method].options()
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
            gap = "baseline" if case.method == self.baseline else GAP.format(**row)
            rows.append(
                [
                    str(case.lag),
                    case.optimizer,
                    case.method,
                    f"{row['reward']:.3f}",
                    gap,
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


def verdict(gap: Interval) -> str:
    """Return what an interval of a difference lets one say.

    >>> [verdict(Interval(0.0, *ends)) for ends in ((0.01, 0.1), (-0.2, -0.1), (-0.01, 0.01), (-0.1, 0.1))]
    ['gains', 'loses', 'equals it within 0.02', 'is left open']
    """
    if gap.low > 0 or gap.high < 0:
        return "gains" if gap.low > 0 else "loses"
    return f"equals it within {EQUAL}" if gap.low >= -EQUAL and gap.high <= EQUAL else OPEN


def data_name(lag: int) -> str:
    """Return how old the data are when they are trained on, in words."""
    return f"data {lag} batches old" if lag else "fresh data"
