"""`bandpo_lab.compare`: which method learns more in tables, at which learning rate, and with what certainty."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, TypedDict

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
from bandpo_lab.study.statistics import Curve, difference, student
from bandpo_lab.study.tabular import RATES, Outcome, World, rare_arm, simulate
from bandpo_lab.style import add_legend, house_style, looks_of, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MethodLike = Method | ClipRule | Objective | str
"""Whatever names a method: an object, or its text."""
WORLD = rare_arm(0.002)
EQUAL = 0.02
"""Mean rewards that surely differ by less are called equal: one answer in fifty."""
OPTIMIZER = "Adam with one second moment a table"
"""How the optimizer is named in a sentence; the standard Adam, with one per parameter, may give another order."""
WRONG = 0.05
"""How often a sentence makes any false claim."""
GAP = "{difference:+.3f} [{low:+.3f}, {high:+.3f}]"


def compare(
    methods: Sequence[Method | ClipRule | Objective | str],
    *,
    baseline: Method | ClipRule | Objective | str | None = None,
    lags: Sequence[int] = (0, 4),
    seeds: int = 128,
    rates: Sequence[float] = RATES,
    samples: int = 128,
    world: World = WORLD,
) -> Comparison:
    """Train tables with each method and say which learns more: a screening in seconds, before any model is trained.

    A table is a policy of one decision: it chooses among 16 answers. One of them is rewarded 97 times in 100 and starts
    at p = 0.002, so it is a rare winner; the others are rewarded 5 times in 100. Training has 80 batches, each used
    once in 4 minibatches, with GRPO's advantages in groups of 16 and `bandpo.policy_loss`. Every method runs at every
    learning rate with every seed, which draws the same random numbers for all. It runs on fresh data and on data 4
    batches old, as asynchronous training has them.

    The optimizer is an Adam with one second moment for the whole table, not the standard Adam with one per parameter.
    Which method wins can depend on that, and what holds in a table need not hold in a network: see docs/when.md.

    Args:
        methods: Whatever ``method=`` takes, and objectives alone, which get no clip. What a notebook defines will do.
        baseline: One of them, with which the others are compared; by default the last.
        lags: Ages of the data in batches; each is a comparison of its own.
        seeds: Of each method at each rate, at least 4.
        rates: Learning rates, at least one.
        samples: In a batch, a multiple of 16.
        world: Another task, such as ``zipf(0.002)`` or ``dominant(0.01)`` of `bandpo_lab.study.tabular`.

    Raises:
        ValueError: a method breaks `bandpo.check`, or needs what a table does not have: other tokens, a longer
            sequence, entropy, a controller. Or there are fewer than two methods, or a number does not fit.

    >>> from bandpo_lab import compare
    >>> comparison = compare(["Unclipped()", "FixedClip(0.2)"], lags=[4], seeds=16, rates=[0.08, 0.16])
    >>> comparison.table[0]["verdict"]
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
    for name, method in by_name.items():
        _check_alone(name, method)
    outcomes: dict[tuple[int, str], Outcome] = {}
    # The tensors are small, so that several threads would wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # The progress bar is shown on a terminal only.
        for lag, name in tqdm([*product(lags, names)], disable=None, leave=False):
            outcomes[lag, name] = simulate(
                world, by_name[name], sorted(rates), seeds=seeds, samples=samples, epochs=1, lag=lag
            )
    finally:
        torch.set_num_threads(threads)
    return Comparison(reference, sorted(rates), outcomes)


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
    """Results of one method at one lag and learning rate."""

    lag: int
    method: str
    rate: float
    reward: float
    """Mean over all batches and seeds."""
    blocked: float
    """Share of tokens that the method blocked."""
    difference: float
    """Mean reward minus the baseline's."""
    low: float
    """Lower end of the interval of the difference."""
    high: float
    """Upper end of the interval of the difference."""
    verdict: str


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`: shown in a notebook, printed, or read by `sentence`, `table`, `by_rate` and `figure`."""

    baseline: str
    rates: Sequence[float]
    outcomes: Mapping[tuple[int, str], Outcome]
    """By lag and method."""

    @cached_property
    def curves(self) -> dict[tuple[int, str], Curve]:
        """Mean reward over all batches, by rate and seed."""
        return {key: Curve(self.rates, found.auc.double().numpy()) for key, found in self.outcomes.items()}

    @cached_property
    def table(self) -> list[Row]:
        """A row for each lag and method, each at the rate that is best for it on other seeds than it is scored on.

        ``difference`` is the mean reward minus the baseline's on the same seeds. Its interval, from ``low`` to
        ``high``, is a nested bootstrap's: seeds are drawn anew, and rates chosen anew each time. All intervals together
        hold the truth in 95 % of cases.
        """
        level = 1 - WRONG / sum(name != self.baseline for _, name in self.curves)
        return [self._row(*key, curve.best, curve, level, draws=4000) for key, curve in self.curves.items()]

    @cached_property
    def by_rate(self) -> list[Row]:
        """A row for each lag, method and rate: the difference at that rate, with an interval of 95 % of its own."""
        places = range(len(self.rates))
        return [self._row(*key, k, curve.at(k)) for key, curve in self.curves.items() for k in places]

    def _row(
        self, lag: int, name: str, place: int, curve: Curve, level: float = 0.95, draws: int = 1000
    ) -> Row:
        """Return the row of a method, by all of its curve or by one rate alone."""
        base, seeds = self.curves[lag, self.baseline], curve.scores.shape[1]
        base = base if len(curve.rates) == len(self.rates) else base.at(place)
        gap = difference(curve.drawn, base.drawn, [0] * seeds, draws=draws, level=level)
        return {
            "lag": lag,
            "method": name,
            "rate": self.rates[place],
            "reward": float(curve.drawn(np.ones((1, seeds)))[0]),
            "blocked": float(self.outcomes[lag, name].blocked[place].nanmean()),
            "difference": gap.value,
            "low": gap.low,
            "high": gap.high,
            "verdict": verdict(gap),
        }

    def _said(self, lag: int, form: str) -> str:
        """Of each method but the baseline, at one lag."""
        rows = (row for row in self.table if row["lag"] == lag and row["method"] != self.baseline)
        return ", ".join(form.format(**row) for row in rows)

    @property
    def sentence(self) -> str:
        """What was found. It claims a difference, or that there is none, where the interval does."""
        form, lags = "{method} {verdict} (" + GAP + ")", dict.fromkeys(lag for lag, _ in self.curves)
        found = "; ".join(f"on {data_name(lag)} {self._said(lag, form)}" for lag in lags)
        rates, seeds, _ = next(iter(self.outcomes.values())).rewards.shape
        terms = f"each at its best of {rates} learning rates, {seeds} seeds, {OPTIMIZER}"
        return f"Mean reward against {self.baseline}, {terms}: {found}."

    @house_style()
    def figure(self) -> Figure:
        """For each lag: mean reward by learning rate, and the course of training at each method's best rate."""
        from matplotlib.figure import Figure

        lags, names = (list(dict.fromkeys(part)) for part in zip(*self.curves, strict=True))
        figure, looks = Figure(figsize=(6.4, 1 + 2.8 * len(lags))), looks_of(names)
        seeds = next(iter(self.outcomes.values())).rewards.shape[1]
        for lag, (left, right) in zip(lags, figure.subplots(len(lags), 2, squeeze=False), strict=True):
            ends: list[float] = []
            for name in names:
                curve, look = self.curves[lag, name], looks[name].options()
                means, low, high = np.transpose([student(scores) for scores in curve.scores])
                left.errorbar(self.rates, means, [means - low, high - means], **look, capsize=2, label=name)
                course = self.outcomes[lag, name].rewards[curve.best].double().numpy().T
                means, low, high = np.transpose([student(rewards) for rewards in course])
                batches, ends = np.arange(1, len(means) + 1), [*ends, means[-1]]
                right.plot(batches, means, **look, markevery=0.2)
                right.fill_between(batches, low, high, color=look["color"], alpha=0.15, linewidth=0)
            left.set_title(textwrap.fill(f"{data_name(lag)}: {self._said(lag, '{method} {verdict}')}", 36))
            left.set(xscale="log", xlabel="learning rate", ylabel=f"mean reward (n = {seeds} seeds)")
            right.set_title(f"at its best rate\neach ends at {spread(ends)}")
            right.set(xlabel="batch", ylabel="reward", ylim=(0, 1))
        add_legend(figure, 2)
        return figure

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """The table as text: its header and its rows."""
        rows: list[list[str]] = []
        for row in self.table:
            edge = ", at the edge" if self.curves[row["lag"], row["method"]].at_edge else ""
            gap = "baseline" if row["method"] == self.baseline else GAP.format(**row)
            texts = (str(row["lag"]), row["method"], f"{row['reward']:.3f}", gap)
            rows.append([*texts, f"{row['rate']:.2g}{edge}", f"{row['blocked']:.0%}"])
        return ["lag", "method", "reward", "difference", "best rate", "blocked"], rows

    def __repr__(self) -> str:
        header, rows = self._cells()
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in (header, *rows)]
        return "\n".join([*lines, "", self.sentence])

    def _repr_html_(self) -> str:
        picture = Picture("compare", self.figure(), "").data_uri()
        return f'<div><img src="{picture}" alt="">{as_html(self.sentence, *self._cells())}</div>'


def verdict(gap: Interval) -> str:
    """What an interval of a difference lets one say.

    >>> [verdict(Interval(0.0, *ends)) for ends in ((0.01, 0.1), (-0.2, -0.1), (-0.01, 0.01), (-0.1, 0.1))]
    ['gains', 'loses', 'equals it within 0.02', 'is left open']
    """
    if gap.low > 0 or gap.high < 0:
        return "gains" if gap.low > 0 else "loses"
    return f"equals it within {EQUAL}" if gap.low >= -EQUAL and gap.high <= EQUAL else "is left open"


def data_name(lag: int) -> str:
    """How old the data are when they are trained on."""
    return f"data {lag} batches old" if lag else "fresh data"
