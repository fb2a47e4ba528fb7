"""`bandpo_lab.compare`: train a small network with several methods side by side, and compare what they learn."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bandpo.audit.closing_lines import FEWEST_RARE_WINNERS
from bandpo.core._shown import as_html
from bandpo.core.methods import Method
from bandpo.core.objectives import Objective
from bandpo.core.rules import ClipRule, Unclipped
from bandpo.core.text import as_method, as_text
from bandpo_lab.errors import InvalidValue, RunProblem
from bandpo_lab.output.console import echo
from bandpo_lab.study.interval import Interval, signed, student
from bandpo_lab.study.jobs import run_in_processes
from bandpo_lab.toy.fast_loop import Run, Settings, check_folder, check_method, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MethodLike = Method | ClipRule | Objective | str
"""A method as an object or as its text."""
WINDOW = 5
"""The number of batches over which curves are averaged."""
LEVELS: Mapping[str, float] = {"multiplication": 0.5, "mental": 0.1}
"""The mean reward at which runs are compared, by task. Random rewards have none."""
EQUAL = 0.02
"""The largest difference of mean rewards that is called equal: one answer in fifty."""
ERROR_RATE = 0.05
"""The probability that any interval of a metric misses its true difference."""
ONE_SEED = (
    "One seed: two seeds of one rule often differ by more than two rules do. Several seeds give the differences "
    "with intervals."
)
"""The sentence under a table of one seed."""


def compare(
    methods: Sequence[Method | ClipRule | Objective | str],
    *,
    baseline: Method | ClipRule | Objective | str | None = None,
    seeds: int = 1,
    task: str = "multiplication",
    lag: int = 4,
    epochs: int = 1,
    minibatches: int = 4,
    rate: float = 2e-4,
    batches: int = 80,
    workers: int | None = None,
    folder: str | Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Train a network of 335k parameters with each method, on the same problems and with the same random numbers.

    Four methods take about a minute with one seed. The default is asynchronous training: the data are four batches old,
    each batch has four updates, and the model learns to multiply. It nearly always answers at once, and wrong; with a
    probability of 2 % it opens a scratchpad, and is then nearly always right. `bandpo_lab.toy.fast_loop` is the
    program.

    Results in this network need not hold for a large one: see docs/when.md.

    Args:
        methods: Methods, as objects or texts. An objective alone gets no clip rule. A class that was defined in a
            notebook is accepted; its runs are made in this process, one after the other.
        baseline: The method with which the others are compared; by default the first.
        seeds: The number of seeds, from 0. With several, differences are paired by seed and have intervals.
        task: ``multiplication``; ``mental``, where only direct answers count and much stays unsolved; or ``random``,
            where rewards are coins.
        lag: The age of the data in batches; 0 for fresh data.
        epochs: The number of times that each batch is used.
        minibatches: The number of updates in each epoch.
        rate: Adam's learning rate.
        batches: The number of batches.
        workers: The number of processes; by default one for each core.
        folder: The folder in which each run has a log, which ``rlvet diagnose`` reads, and from which the same call
            goes on if it was interrupted. Nothing is written if not given.
        say: A function that is called with lines of progress. Runs in other processes print theirs.

    Raises:
        ValueError: There are fewer than two methods, one is given twice or does not pass `bandpo.check`, or a number is
            out of its range.
        RunProblem: The folder has runs with other settings, or a run has failed.

    >>> from bandpo_lab import compare
    >>> sizes = {"task": "random", "batches": 3, "lag": 1}
    >>> comparison = compare(["FixedClip(0.2)", "BandPO()"], workers=1, **sizes)
    >>> [row["method"] for row in comparison.table]
    ['FixedClip(0.2)', 'BandPO()']
    """
    methods_by_name = {_name(method): _as_method(method) for method in methods}
    names = list(methods_by_name)
    baseline_name = names[0] if names else ""
    if baseline is not None:
        baseline_name = _name(baseline)
    if len(names) < 2 or len(names) < len(methods) or baseline_name not in names:
        listed = ", ".join(map(_name, methods)) or "none"
        raise InvalidValue(
            "give two or more methods, each once, and as baseline one of them; "
            f"got {listed}; baseline {baseline_name!r}"
        )
    if seeds < 1:
        raise InvalidValue(f"seeds={seeds}: choose at least 1")
    jobs: list[_Job] = []
    for seed in range(seeds):
        for name, method in methods_by_name.items():
            settings = Settings(as_text(method), task, lag, epochs, minibatches, rate, batches, seed=seed)
            run_folder = None if folder is None else Path(folder) / _folder_name(name, seed)
            jobs.append(_Job(name, settings, run_folder))
    for job in jobs[: len(names)]:
        check_method(job.settings)
    runs = _run(jobs, workers or os.cpu_count() or 1, say)
    return Comparison(baseline_name, runs)


def _name(method: MethodLike) -> str:
    return method if isinstance(method, str) else repr(method)


def _as_method(method: MethodLike) -> Method:
    return Method(Unclipped(), method) if isinstance(method, Objective) else as_method(method)


def _folder_name(name: str, seed: int) -> str:
    """Return the name of a run's folder.

    >>> _folder_name("FixedClip(0.2, 0.28)", 3)
    'FixedClip-0.2-0.28-seed-3'
    """
    words = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")
    return f"{words}-seed-{seed}"


class _Job(NamedTuple):
    """A run to make."""

    name: str
    settings: Settings
    folder: Path | None

    @property
    def title(self) -> str:
        """The name of the run in a line of progress."""
        return f"{self.name}, seed {self.settings.seed}"


def _run(jobs: Sequence[_Job], workers: int, say: Callable[[str], None] | None) -> dict[str, list[Run]]:
    """Make all runs, and return those of each method in order of the seeds.

    Raises:
        RunProblem: A folder has a run with other settings, or a run has failed in its process, which has printed the
            reason.
    """
    # Each process would print the same refusal, below a traceback.
    for job in jobs:
        if job.folder is not None:
            check_folder(job.settings, job.folder)
    runs: dict[int, Run] = {}
    # A class of a notebook exists in this process only.
    is_here = [workers == 1 or "__main__." in job.settings.method for job in jobs]
    elsewhere = [index for index, here in enumerate(is_here) if not here]
    calls = [
        partial(
            train,
            jobs[index].settings,
            jobs[index].folder,
            partial(_print, jobs[index].title) if say else None,
        )
        for index in elsewhere
    ]
    results = run_in_processes(calls, workers, preload=("bandpo_lab.toy.fast_loop",)) if calls else iter(())
    for position, result in results:
        index = elsewhere[position]
        if result.code or result.value is None:
            raise RunProblem(
                f"{jobs[index].title} has failed with status {result.code}; its process said why"
            )
        runs[index] = result.value
    for index, job in enumerate(jobs):
        if is_here[index]:
            prefix = f"{job.title}: "
            runs[index] = train(job.settings, job.folder, _prefixed(prefix, say) if say else None)
    by_name: dict[str, list[Run]] = {}
    for index, job in enumerate(jobs):
        by_name.setdefault(job.name, []).append(runs[index])
    return by_name


def _print(title: str, line: str) -> None:
    """Print a line of progress of a run in another process."""
    echo(f"{title}: {line}")


def _prefixed(prefix: str, say: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: say(prefix + line)


# What is compared -----------------------------------------------------------------------------------------------------


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean over each value and those before it in a window of five batches.

    >>> smooth([1, 2, 3, 4, 5, 6])
    [1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    """
    windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def blocked_so_far(log: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the share of the gradient of rare winners (p < 0.1, A > 0) that was blocked in all batches so far.

    It is NaN before the first rare winner.
    """
    blocked = 0.0
    total = 0.0
    shares: list[float] = []
    for line in log:
        mass = line.get("audit/mass_positive_below_0.1", 0.0)
        total += mass
        blocked += mass * line.get("audit/blocked_mass_below_0.1", 0.0)
        shares.append(blocked / total if total else math.nan)
    return shares


METRICS: Mapping[str, str] = {
    "reward": "mean reward",
    "batches": "batches to {level:g}",
    "entropy": "entropy at {level:g}",
    "end": "end",
    "pass@32": "pass@32",
    "last_entropy": "entropy of last 5",
    "blocked": "blocked",
}
"""The metrics of a run, each with its column in the table.

- ``reward``: the mean reward over all batches.
- ``batches``: the number of batches until the mean reward of five batches is at the level of `LEVELS`; infinite if
  never.
- ``entropy``: the entropy (nats per token) of those five batches; NaN if never.
- ``end``: the share of right answers to held-out problems after training; ``pass@32``, with 32 answers to each.
- ``last_entropy``: the mean entropy in the last five batches.
- ``blocked``: the share of the gradient of rare winners that the method blocked, over all updates.
"""


def metrics(run: Run) -> dict[str, float]:
    """Compute the metrics of a run, of which `METRICS` says what they are."""
    rewards = smooth(run.curve("reward"))
    entropies = smooth(run.curve("entropy"))
    level = LEVELS.get(run.settings.task, math.inf)
    reached = next((batch for batch, reward in enumerate(rewards) if reward >= level), None)
    return {
        "reward": sum(run.curve("reward")) / len(run.log),
        "batches": math.inf if reached is None else reached + 1,
        "entropy": math.nan if reached is None else entropies[reached],
        "end": run.scores["pass@1"],
        "pass@32": run.scores["pass@32"],
        "last_entropy": entropies[-1],
        "blocked": blocked_so_far(run.log)[-1],
    }


@dataclass(frozen=True)
class Outcomes:
    """The metrics of the runs of several methods with the same seeds.

    Attributes:
        baseline: The method with which the others are compared.
        metrics: The metrics of each run, by method and in order of the seeds.
    """

    baseline: str
    metrics: Mapping[str, Sequence[Mapping[str, float]]]

    def values(self, method: str, metric: str) -> list[float]:
        """Return a metric of `METRICS` for each seed."""
        return [run[metric] for run in self.metrics[method]]

    @property
    def comparisons(self) -> int:
        """The number of differences from one method that a metric has."""
        return len(self.metrics) - 1

    @property
    def intervals(self) -> str:
        """The kind of the intervals of differences, in words.

        >>> methods = {"FixedClip(0.2)": [], "BandPO()": [], "BandAbove()": []}
        >>> Outcomes("FixedClip(0.2)", methods).intervals
        '95 % intervals adjusted for 2 comparisons (Bonferroni)'
        """
        plain = f"{100 * (1 - ERROR_RATE):.0f} % intervals"
        if self.comparisons == 1:
            return plain
        return f"{plain} adjusted for {self.comparisons} comparisons (Bonferroni)"

    def difference(self, method: str, metric: str, minus: str | None = None) -> Interval | None:
        """Return a metric minus that of another method, paired by seed, with Student's interval.

        The intervals of one metric contain all true differences from one method with a probability of 95 %, by
        Bonferroni's correction.

        Args:
            method: The method.
            metric: The metric.
            minus: The other method; by default the baseline.

        Returns:
            The difference; None with one seed, or if a seed has no finite value.
        """
        others = self.values(self.baseline if minus is None else minus, metric)
        differences = [
            ours - theirs for ours, theirs in zip(self.values(method, metric), others, strict=True)
        ]
        if len(differences) < 2 or not all(map(math.isfinite, differences)):
            return None
        return student(differences, level=1 - ERROR_RATE / self.comparisons)


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`, which is shown as a table and a figure in a notebook.

    Attributes:
        baseline: The method with which the others are compared.
        runs: The runs of each method, in order of the seeds.
    """

    baseline: str
    runs: Mapping[str, Sequence[Run]]

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return len(self.runs[self.baseline])

    @property
    def settings(self) -> Settings:
        """The settings of the first run, of which all runs share those that are not the method or the seed."""
        return self.runs[self.baseline][0].settings

    @cached_property
    def outcomes(self) -> Outcomes:
        """The metrics of the runs."""
        return Outcomes(
            self.baseline, {method: [metrics(run) for run in runs] for method, runs in self.runs.items()}
        )

    def values(self, method: str, metric: str) -> list[float]:
        """Return a metric of `METRICS` for each seed."""
        return self.outcomes.values(method, metric)

    def difference(self, method: str, metric: str) -> Interval | None:
        """Return a metric minus that of the baseline, with its interval: see `Outcomes.difference`."""
        return self.outcomes.difference(method, metric)

    @property
    def table(self) -> list[dict[str, str | float | None]]:
        """One row for each method: its name, and the mean of each metric over the seeds.

        A mean is None where a seed has no finite value, such as the batches to a level that it never reached.
        """
        rows: list[dict[str, str | float | None]] = []
        for method in self.runs:
            row: dict[str, str | float | None] = {"method": method}
            for metric in METRICS:
                values = self.values(method, metric)
                mean = sum(values) / len(values)
                row[metric] = mean if math.isfinite(mean) else None
            rows.append(row)
        return rows

    @property
    def differences(self) -> list[dict[str, str | list[float] | None]]:
        """One row for each method except the baseline, with the value and the interval of each difference."""
        rows: list[dict[str, str | list[float] | None]] = []
        for method in self.runs:
            if method == self.baseline:
                continue
            row: dict[str, str | list[float] | None] = {"method": method}
            for metric in METRICS:
                interval = self.difference(method, metric)
                row[metric] = None if interval is None else list(interval)
            rows.append(row)
        return rows

    @property
    def sentence(self) -> str:
        """The result in words."""
        settings = self.settings
        data = f"data {settings.lag} batches old" if settings.lag else "fresh data"
        terms = (
            f"{settings.task}, {data}, {settings.epochs} × {settings.minibatches} updates, rate {settings.rate:g}, "
            f"{settings.batches} batches"
        )
        if self.seeds == 1:
            return f"{terms}. {ONE_SEED}"
        clauses: list[str] = []
        for method in self.runs:
            interval = None if method == self.baseline else self.difference(method, "reward")
            if interval is not None:
                clauses.append(f"{method} {verdict(interval)} ({signed(interval)})")
        against = f"Mean reward against {self.baseline}, {self.seeds} seeds, {terms}"
        return f"{against}: {', '.join(clauses)}; {self.outcomes.intervals}."

    def _columns(self) -> dict[str, str]:
        """Return the columns of the table by metric, without those that the task does not have."""
        level = LEVELS.get(self.settings.task)
        titles: dict[str, str] = {}
        for metric, title in METRICS.items():
            if level is not None:
                titles[metric] = title.format(level=level)
            elif "{" not in title:
                titles[metric] = title
        return titles

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the table of means as text: its header and its rows."""
        columns = self._columns()
        rows: list[list[str]] = []
        for row in self.table:
            cells = [str(row["method"])]
            for metric in columns:
                cells.append(_shown(metric, row[metric]))
            rows.append(cells)
        return ["method", *columns.values()], rows

    def _difference_cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the table of differences as text: its header and its rows."""
        columns = {metric: title for metric, title in self._columns().items() if metric != "blocked"}
        rows: list[list[str]] = []
        for method in self.runs:
            if method == self.baseline:
                continue
            cells = [method]
            for metric in columns:
                interval = self.difference(method, metric)
                cells.append("–" if interval is None else signed(interval, 1 if metric == "batches" else 3))
            rows.append(cells)
        return [f"minus {self.baseline}", *columns.values()], rows

    def _blocked_sentence(self) -> str:
        """Return what each method dropped of the gradient on the rare winners of its own runs, in words."""
        count = min(sum(map(_rare_winners, runs)) for runs in self.runs.values())
        if count < FEWEST_RARE_WINNERS:
            return (
                f"Rare winners (p < 0.1, A > 0) are too few to say what each clip did to them: {count:.0f}."
            )
        first, *others = self.table
        clauses = [f"{first['method']} dropped {_shown('blocked', first['blocked'])}"]
        for row in others:
            clauses.append(f"{row['method']} {_shown('blocked', row['blocked'])}")
        return f"Of the gradient on rare winners (p < 0.1, A > 0) of its own runs, {', '.join(clauses)}."

    def __repr__(self) -> str:
        parts = [aligned(*self._cells()), self._blocked_sentence()]
        if self.seeds > 1:
            parts.append(aligned(*self._difference_cells()))
        return "\n\n".join([*parts, self.sentence])

    def _repr_html_(self) -> str:
        html = as_html(self.sentence, *self._cells())
        if self.seeds > 1:
            html += as_html("", *self._difference_cells())
        try:
            from bandpo_lab.output.page import Picture

            picture = Picture("compare", self.figure(), "").data_uri()
        except ModuleNotFoundError:  # matplotlib or jinja2
            return f"<div>{html}</div>"
        return f'<div><img src="{picture}" alt="">{html}</div>'

    def figure(self) -> Figure:
        """Plot reward, entropy and the blocked share by batch, averaged over five batches and over the seeds."""
        from matplotlib.figure import Figure

        from bandpo_lab.output.style import add_legend, line_styles, plot_style

        panels: dict[str, Callable[[Run], list[float]]] = {"Mean reward": _smooth_curve("reward")}
        if self.settings.task == "multiplication":
            panels["Answers with a scratchpad"] = _smooth_curve("scratchpad")
        panels["Entropy (nats per token)"] = _smooth_curve("entropy")
        panels["Blocked so far, of rare winners"] = lambda run: blocked_so_far(run.log)
        columns = 2 if len(panels) == 4 else len(panels)
        rows = len(panels) // columns
        with plot_style():
            figure = Figure(figsize=(4.5 * columns, 0.8 + 2.6 * rows))
            styles = line_styles(self.runs)
            axes_of_panels = figure.subplots(rows, columns, squeeze=False).flat
            for axes, (title, curve) in zip(axes_of_panels, panels.items(), strict=True):
                for method, runs in self.runs.items():
                    style = styles[method]
                    curves = [curve(run) for run in runs]
                    means = [sum(values) / len(values) for values in zip(*curves, strict=True)]
                    batches = range(1, len(means) + 1)
                    axes.plot(
                        batches, means, color=style.colour, linestyle=style.line, marker="", label=method
                    )
                axes.set(title=title, xlabel="batch", ylim=(0, None))
            add_legend(figure, 2)
        return figure


def _rare_winners(run: Run) -> float:
    """Return the number of rare winners of a run, each counted once for each update that uses it."""
    return sum(line.get("audit/tokens_positive_below_0.1", 0.0) for line in run.log)


def _smooth_curve(name: str) -> Callable[[Run], list[float]]:
    return lambda run: smooth(run.curve(name))


def _shown(metric: str, value: str | float | None) -> str:
    """Return the mean of a metric as text."""
    if not isinstance(value, (int, float)):
        return "never" if metric == "batches" else "–"
    if metric == "batches":
        return f"{value:.1f}"
    return f"{value:.0%}" if metric == "blocked" else f"{value:.3f}"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in (header, *rows))


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
    return "is left open"
