"""The gate of the testbeds: settings in which the known effects of a clip show, as a study of them has to have.

    PYTHONPATH=research python -m studies.gate research/results/gate/rows.jsonl
    PYTHONPATH=research python -m studies.gate research/results/gate/rows.jsonl --report research/reports/gate/report.md

Two effects are looked for: Clip-Higher keeps entropy that clip 0.2 loses, and no bound at all differs from clip 0.2.
The grid has the updates of a batch, the age of the data, the learning rate (and so the share that is blocked), random
and true rewards. It runs in tables of logits, where 24 seeds take seconds, then in the network of
`bandpo_lab.toy.fast_loop`.
Every setting that was tried is a row. Its predictions, `gate-predictions.md`, were committed before the first run.

The same command goes on with what is missing. The tables take about ten minutes of one core, the network's cells 45 s a
run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bandpo_lab.files.writing import drop_unfinished_line, replacing
from bandpo_lab.output.tables import Table
from bandpo_lab.study.interval import Interval, student
from bandpo_lab.toy.fast_loop import Settings, train
from rlvet.runs.files import read_jsonl
from studies.bandits import Outcome, World, random_rewards, simulate, zipf
from studies.equal_reward import look
from studies.predictions import Prediction, read_predictions, verdict

CLIP = "clip 0.2"
ARMS = {
    CLIP: "FixedClip(0.2)",
    "Clip-Higher": "FixedClip(0.2, 0.28)",
    "clip [.8, 2]": "FixedClip(0.2, 1.0)",
    "only above": "FixedClip(1.0, 0.2)",
    "only below": "FixedClip(0.2, inf)",
    "no bound": "Unclipped()",
}
"""The rules. *Only above* has no lower bound, *only below* no upper one."""
SMALLEST = 0.03
"""The smallest effect of interest: in nats of entropy, and in mean reward."""
PREDICTIONS = Path(__file__).parent / "gate-predictions.md"
METRICS = ("entropy", "reward", "blocked")
"""The metrics of a row, each a list with a value for each seed.

- ``entropy``: in nats per token, the mean over the last tenth of the batches.
- ``reward``: the mean over all batches.
- ``blocked``: the share of the gradient of rare winners (p < 0.1, A > 0) that the rule dropped, over all updates.
"""
WORLDS: dict[str, World] = {
    "random": random_rewards(decisions=4, answers=20),
    "true": zipf(0.02),
}
"""The tasks of the tables: rewards by chance, and a right answer of probability 0.02."""


@dataclass(frozen=True)
class Cell:
    """A setting, with all rules at all rates and seeds.

    Attributes:
        name: The name, which is unique.
        testbed: ``tables`` or ``network``.
        task: A name in `WORLDS`, or a task of `bandpo_lab.toy.fast_loop`.
        lag: The age of the data in batches.
        epochs: The number of times that a batch is used, in four updates each time.
        rates: The learning rates.
        seeds: The number of seeds.
        first_seed: The first seed. Seeds of the gate are not used by a study.
        answers: The number of answers of a batch, in groups of 16.
        optimizer: The optimizer of the tables.
        arms: The rules.
        batches: The number of batches.
        pilot: True if the cell was run before the predictions were written.
    """

    name: str
    testbed: str
    task: str
    lag: int
    epochs: int
    rates: Sequence[float]
    seeds: int = 24
    first_seed: int = 1001
    answers: int = 128
    optimizer: str = "adam"
    arms: Sequence[str] = tuple(ARMS)
    batches: int = 60
    pilot: bool = False


def _doubling(first: float, count: int) -> list[float]:
    """Return learning rates, each twice the one before."""
    return [first * 2**k for k in range(count)]


_PILOT_ARMS = (CLIP, "Clip-Higher")
_THREE = (CLIP, "Clip-Higher", "no bound")
_PILOT: dict[str, Any] = {"seeds": 8, "first_seed": 999, "arms": _PILOT_ARMS, "pilot": True}
_NETWORK_PILOT: dict[str, Any] = _PILOT | {"seeds": 1, "first_seed": 1000, "answers": 64, "batches": 30}
CELLS = [
    Cell("pilot, random, 4 x 4", "tables", "random", 0, 4, _doubling(0.003, 6), **_PILOT),
    Cell("pilot, random, 1 x 4", "tables", "random", 0, 1, _doubling(0.01, 6), **_PILOT),
    Cell("pilot, random, lag 4", "tables", "random", 4, 1, _doubling(0.003, 6), **_PILOT),
    Cell("random, 4 x 4", "tables", "random", 0, 4, _doubling(0.006, 6)),
    Cell("random, 1 x 4", "tables", "random", 0, 1, _doubling(0.02, 6)),
    Cell("random, lag 4", "tables", "random", 4, 1, _doubling(0.012, 6)),
    Cell("random, lag 4, 4 x 4", "tables", "random", 4, 4, _doubling(0.003, 6)),
    Cell("true, 4 x 4", "tables", "true", 0, 4, _doubling(0.006, 6)),
    Cell("true, 1 x 4", "tables", "true", 0, 1, _doubling(0.02, 6)),
    Cell("true, lag 4", "tables", "true", 4, 1, _doubling(0.012, 6)),
    Cell("random, 4 x 4, one group", "tables", "random", 0, 4, _doubling(0.006, 6), answers=16),
    Cell("random, 1 x 4, one group", "tables", "random", 0, 1, _doubling(0.02, 6), answers=16),
    Cell(
        "random, 4 x 4, shared trunk",
        "tables",
        "random",
        0,
        4,
        _doubling(0.0005, 6),
        optimizer="head-and-trunk",
    ),
    Cell("random, 16 x 4", "tables", "random", 0, 16, _doubling(0.003, 4)),
    Cell("pilot, network, random, 4 x 4", "network", "random", 0, 4, [5e-5, 1e-4], **_NETWORK_PILOT),
    Cell(
        "network, random, 4 x 4",
        "network",
        "random",
        0,
        4,
        [5e-5, 2.5e-5],
        seeds=6,
        answers=64,
        arms=_THREE,
        batches=30,
    ),
    Cell(
        "network, mental, 1 x 4",
        "network",
        "mental",
        0,
        1,
        [2e-4, 4e-4],
        seeds=6,
        answers=128,
        arms=_THREE,
        batches=40,
    ),
    Cell(
        "network, random, lag 4",
        "network",
        "random",
        4,
        1,
        [1e-4],
        seeds=6,
        answers=128,
        arms=_THREE,
        batches=40,
    ),
    Cell(
        "network, mental, 4 x 4",
        "network",
        "mental",
        0,
        4,
        [5e-5],
        seeds=6,
        answers=64,
        arms=_THREE,
        batches=40,
    ),
]
"""The cells in the order in which they run, so that the last are dropped first."""


class Key(NamedTuple):
    """A row: a rule at one rate, with all seeds in tables and with one seed in the network."""

    cell: str
    arm: str
    rate: float
    first_seed: int


def keys(cell: Cell) -> list[Key]:
    """Return the rows of a cell in the order in which they run: rate by rate, with all rules of a seed together."""
    first_seeds = [cell.first_seed]
    if cell.testbed == "network":
        first_seeds = [cell.first_seed + seed for seed in range(cell.seeds)]
    return [
        Key(cell.name, arm, rate, seed) for rate, seed, arm in product(cell.rates, first_seeds, cell.arms)
    ]


def run(cell: Cell, key: Key) -> Iterator[dict[str, Any]]:
    """Run a row, and yield it; in tables with the rows of all other rates, which are trained together."""
    if cell.testbed == "network":
        yield {**key._asdict(), **_run_network(cell, key)}
        return
    outcome = simulate(
        WORLDS[cell.task],
        ARMS[key.arm],
        cell.rates,
        seeds=cell.seeds,
        samples=cell.answers,
        epochs=cell.epochs,
        batches=cell.batches,
        lag=cell.lag,
        optimizer=cell.optimizer,
        first_seed=cell.first_seed,
    )
    for index, rate in enumerate(cell.rates):
        yield {**key._replace(rate=rate)._asdict(), **_metrics_of_tables(outcome, index)}


def _metrics_of_tables(outcome: Outcome, index: int) -> dict[str, list[float]]:
    """Return the metrics of a simulation at one of its rates."""
    tenth = max(1, outcome.entropy.shape[-1] // 10)
    values = {
        "entropy": outcome.entropy[index, :, -tenth:].mean(-1),
        "reward": outcome.auc[index],
        # NaN where a table had no rare winner.
        "blocked": outcome.blocked[index].nan_to_num(0.0),
    }
    return {name: [round(x, 4) for x in tensor.tolist()] for name, tensor in values.items()}


def _run_network(cell: Cell, key: Key) -> dict[str, list[float]]:
    """Train the network, and return its metrics as lists of one value."""
    settings = Settings(
        ARMS[key.arm],
        task=cell.task,
        lag=cell.lag,
        epochs=cell.epochs,
        rate=key.rate,
        batches=cell.batches,
        seed=key.first_seed,
        prompts=cell.answers // 16,
    )
    log = train(settings, None).log
    tenth = max(1, cell.batches // 10)
    blocked = 0.0
    mass = 0.0
    for line in log:
        batch_mass = line.get("audit/mass_positive_below_0.1", 0.0)
        mass += batch_mass
        blocked += batch_mass * line.get("audit/blocked_mass_below_0.1", 0.0)
    values = {
        "entropy": sum(line["entropy"] for line in log[-tenth:]) / tenth,
        "reward": sum(line["reward"] for line in log) / len(log),
        "blocked": blocked / mass if mass else 0.0,
    }
    return {name: [round(value, 4)] for name, value in values.items()}


# The report -----------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """A cell at one learning rate."""

    cell: Cell
    rate: float
    rows: dict[str, dict[int, dict[str, float]]]
    """The metrics by rule and seed."""

    def values(self, arm: str, metric: str) -> list[float]:
        """Return a metric of a rule by seed."""
        return [metrics[metric] for metrics in self.rows.get(arm, {}).values()]

    def differences(self, arm: str, minus: str, metric: str) -> list[float]:
        """Return the differences of two rules by seed."""
        ours = self.rows.get(arm, {})
        theirs = self.rows.get(minus, {})
        return [ours[seed][metric] - theirs[seed][metric] for seed in sorted(ours.keys() & theirs.keys())]

    def difference(self, arm: str, minus: str, metric: str) -> Interval | None:
        """Return the difference of two rules, paired by seed; None if fewer than two seeds have both."""
        differences = self.differences(arm, minus, metric)
        return student(differences) if len(differences) >= 2 else None

    @property
    def blocked(self) -> float:
        """The share that clip 0.2 blocked, the mean over seeds."""
        values = self.values(CLIP, "blocked")
        return sum(values) / len(values)

    @property
    def keeps_entropy(self) -> bool:
        """True if Clip-Higher surely ends with more entropy than clip 0.2."""
        interval = self.difference("Clip-Higher", CLIP, "entropy")
        return interval is not None and interval.low > 0

    @property
    def bound_matters(self) -> bool:
        """True if no bound surely differs from clip 0.2, by more than `SMALLEST`, in entropy or in reward."""
        for metric in ("entropy", "reward"):
            interval = self.difference("no bound", CLIP, metric)
            if interval is None:
                continue
            if abs(interval.value) > SMALLEST and (interval.low > 0 or interval.high < 0):
                return True
        return False


def read_settings(file: Path) -> list[Setting]:
    """Return the settings that have rows of clip 0.2, in order of the cells and the rates."""
    settings: dict[tuple[str, float], Setting] = {}
    cells = {cell.name: cell for cell in CELLS}
    for _, row in read_jsonl(file):
        cell = cells[row["cell"]]
        setting = settings.setdefault((cell.name, row["rate"]), Setting(cell, row["rate"], {}))
        by_seed = setting.rows.setdefault(row["arm"], {})
        for index in range(len(row["entropy"])):
            by_seed[row["first_seed"] + index] = {metric: row[metric][index] for metric in METRICS}
    order = {cell.name: index for index, cell in enumerate(CELLS)}
    complete = [setting for setting in settings.values() if CLIP in setting.rows]
    return sorted(complete, key=lambda setting: (order[setting.cell.name], setting.rate))


def table(settings: Sequence[Setting]) -> Table:
    """Return the table of all settings that were tried."""
    header = ["setting", "rate", "seeds", "blocked", "entropy"]
    header += [
        "Clip-Higher, entropy",
        "no bound, entropy",
        "no bound, reward",
        "only above − only below",
        "gate",
    ]
    rows: list[list[str]] = []
    for setting in settings:
        entropies = setting.values(CLIP, "entropy")
        differences = [
            setting.difference("Clip-Higher", CLIP, "entropy"),
            setting.difference("no bound", CLIP, "entropy"),
            setting.difference("no bound", CLIP, "reward"),
            setting.difference("only above", "only below", "entropy"),
        ]
        signs = [setting.keeps_entropy, setting.bound_matters]
        gate = {(True, True): "both", (True, False): "entropy", (False, True): "bound"}.get(
            (signs[0], signs[1]), ""
        )
        rows.append(
            [
                setting.cell.name,
                f"{setting.rate:.2g}",
                str(len(entropies)),
                f"{setting.blocked:.0%}",
                f"{sum(entropies) / len(entropies):.2f}",
                *("–" if d is None else f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" for d in differences),
                gate,
            ]
        )
    return Table(header, rows)


BINS = (0.0, 0.02, 0.1, 0.25, 0.5, 1.0)
"""The edges of the shares blocked by clip 0.2 in the table of signs."""


def kind(cell: Cell) -> str:
    """Return the kind of a cell in the table of signs: its testbed, its rewards, and how its data are used."""
    if cell.task != "random":
        use = "rewards for right answers"
    elif cell.epochs > 1:
        use = "random rewards, each answer used several times"
    elif cell.lag:
        use = "random rewards, old data used once"
    else:
        use = "random rewards, fresh data used once"
    return f"{cell.testbed}, {use}"


def signs_table(settings: Sequence[Setting]) -> Table:
    """Count where Clip-Higher surely had more and less entropy at equal step, by kind and by what clip 0.2 blocked.

    A cell of the table is "surely more / surely less / settings".
    """
    counts: dict[str, list[list[int]]] = {}
    bins = list(pairwise(BINS))
    for setting in settings:
        interval = setting.difference("Clip-Higher", CLIP, "entropy")
        if interval is None:
            continue
        of_kind = counts.setdefault(kind(setting.cell), [[0, 0, 0] for _ in bins])
        # A share of 100 % belongs to the last bin.
        index = next((k for k, (_, high) in enumerate(bins) if setting.blocked < high), len(bins) - 1)
        of_kind[index][0] += interval.low > 0
        of_kind[index][1] += interval.high < 0
        of_kind[index][2] += 1
    header = ["blocked by clip 0.2", *(f"{low:.0%} to {high:.0%}" for low, high in bins)]
    rows: list[list[str]] = []
    for name, of_kind in counts.items():
        rows.append(
            [name, *("–" if not total else f"{more} / {less} / {total}" for more, less, total in of_kind)]
        )
    return Table(header, rows)


def looked_at_table(settings: Sequence[Setting]) -> Table:
    """Return how many intervals of Clip-Higher minus clip 0.2 in entropy there are by kind, and how many exclude 0.

    They are adjusted for the number of intervals of the kind, and for that of all kinds.
    """
    by_kind: dict[str, list[list[float]]] = {}
    for setting in settings:
        differences = setting.differences("Clip-Higher", CLIP, "entropy")
        if len(differences) >= 2:
            by_kind.setdefault(kind(setting.cell), []).append(differences)
    total = sum(map(len, by_kind.values()))
    rows: list[list[str]] = []
    for name, every in by_kind.items():
        plain, own, of_all = (look(every, comparisons) for comparisons in (1, len(every), total))
        rows.append([name, str(plain.intervals), str(plain), str(own), str(of_all)])
    header = [
        "entropy at equal step, Clip-Higher",
        "intervals",
        "exclude 0",
        "adjusted for these",
        f"for all {total}",
    ]
    return Table(header, rows)


def verdicts_table(settings: Sequence[Setting], predictions: Sequence[Prediction]) -> Table:
    """Return the verdict on each prediction.

    The world of a prediction is a cell and a rate: ``random, 4 x 4 at 0.024``.
    """
    by_name = {f"{setting.cell.name} at {setting.rate:g}": setting for setting in settings}
    rows: list[list[str]] = []
    for prediction in predictions:
        setting = by_name.get(prediction.world)
        interval = setting and setting.difference(prediction.arm, prediction.minus, prediction.metric)
        measured = "not run"
        conclusion = "open"
        if interval:
            measured = f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
            conclusion = verdict(interval, prediction.expects, SMALLEST)
        terms = f"{prediction.arm} minus {prediction.minus}, {prediction.metric}"
        rows.append([prediction.world, terms, prediction.expects, measured, conclusion])
    return Table(["setting", "difference", "predicted", "measured", "verdict"], rows)


def page(file: Path) -> str:
    """Return the report of the rows as Markdown."""
    settings = read_settings(file)
    tried = [setting for setting in settings if not setting.cell.pilot]
    done = finished_keys(file)
    missing: list[str] = []
    for cell in CELLS:
        count = len(set(keys(cell)) - done)
        if count:
            missing.append(f"- {cell.name}: {count} of {len(keys(cell))}")
    both = [setting for setting in tried if setting.keeps_entropy and setting.bound_matters]
    lines = [
        "# The gate: where the known effects of a clip show",
        "",
        "Written by `python -m studies.gate` from `research/results/gate/rows.jsonl`. A study that compares rules "
        "needs a setting in which the best-known effects show: Clip-Higher keeps more entropy than clip 0.2 at equal "
        "step, and no bound differs from clip 0.2. Every setting that was tried is here, and its seeds are used by no "
        "study.",
        "",
        f"**{len(both)} of {len(tried)} settings show both effects**, "
        f"{sum(setting.cell.testbed == 'network' for setting in both)} of them in the network.",
        "",
        "Rows that were not run yet:" if missing else "All rows were run.",
        *(["", *missing] if missing else []),
        "",
        "## By the share that is blocked",
        "",
        "In how many settings Clip-Higher surely had more entropy than clip 0.2 at equal step, in how many surely "
        "less, and how many there are:",
        "",
        signs_table(tried).markdown(),
        "",
        "How many intervals these are, how many exclude 0, and how many still do if they are adjusted after "
        "Bonferroni:",
        "",
        looked_at_table(tried).markdown(),
        "",
        "## All settings",
        "",
        "*Blocked*: the share of the gradient of rare winners that clip 0.2 dropped. *Entropy*: of clip 0.2 at equal "
        "step, the mean over the last tenth of the batches, in nats per token. The rows have no entropy at equal "
        "reward; with random rewards, which no policy can learn, all rewards are equal at each step. The next columns "
        "are differences from clip 0.2, paired by seed, with Student's 95 % intervals. *Gate*: which effects are sure, "
        f"the second if it is larger than {SMALLEST} in entropy or in mean reward.",
        "",
        table(settings).markdown(),
        "",
        "## Predictions",
        "",
        verdicts_table(settings, read_predictions(PREDICTIONS)).markdown(),
        "",
        "Entropy is at equal step: the mean over the last tenth of the batches.",
    ]
    return "\n".join(lines) + "\n"


def all_keys() -> Iterator[tuple[Cell, Key]]:
    """Yield all rows in the order in which they run."""
    for cell in CELLS:
        for key in keys(cell):
            yield cell, key


def finished_keys(file: Path) -> set[Key]:
    """Return the rows that a file has."""
    return {Key(*(row[name] for name in Key._fields)) for _, row in read_jsonl(file)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the rows that the file does not have, or write the report."""
    parser = argparse.ArgumentParser(prog="python -m studies.gate")
    parser.add_argument("rows", type=Path, help="one line for each row; made if it is not there")
    parser.add_argument("--report", type=Path, help="only write the report to this file")
    parser.add_argument("--cell", choices=[cell.name for cell in CELLS], help="run one cell only")
    options = parser.parse_args(arguments)
    if options.report:
        text = page(options.rows)
        with replacing(options.report) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
        return
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    options.rows.touch()
    drop_unfinished_line(options.rows)
    # The order of sums, and so the bits, would depend on the number of threads.
    torch.set_num_threads(1)
    with options.rows.open("a", encoding="utf-8") as lines:
        done = finished_keys(options.rows)
        for cell, key in all_keys():
            if key in done or options.cell not in (None, cell.name):
                continue
            for row in run(cell, key):
                row_key = Key(*(row[name] for name in Key._fields))
                if row_key not in done:
                    done.add(row_key)
                    lines.write(json.dumps(row) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
