"""Do the effects of the control show in the network of `bandpo_lab.toy.fast_loop`, with 64 updates on a batch?

    PYTHONPATH=research python -m studies.transfer rows.jsonl              # goes on with what is missing
    PYTHONPATH=research python -m studies.transfer rows.jsonl --count      # what is done
    PYTHONPATH=research python -m studies.transfer pilots.jsonl --pilots
    PYTHONPATH=research python -m studies.transfer rows.jsonl --report report.md

Data are fresh, and each answer is used once. The rules are pairs of an upper and a lower side, and the tables those of
`studies.control`. The terms and the predictions are in `transfer-predictions.md`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bandpo.core.batch import Batch as TokenBatch
from bandpo.core.methods import Method
from bandpo_lab.files.writing import drop_unfinished_line, replacing
from bandpo_lab.output.tables import Table
from bandpo_lab.study.interval import signed
from bandpo_lab.toy.fast_loop import MAX_GRAD_NORM, Batch, Settings, Training, log_probabilities, sample
from studies import control
from studies.control import (
    CLIP,
    FEWEST_SEEDS,
    NAMES,
    RARE,
    Cell,
    CellScores,
    Contrast,
    Key,
    Measured,
    Setting,
    minus,
    power_of,
    read_rows,
    rules,
)
from studies.equal_reward import entropy_at, entropy_at_equal_step
from studies.predictions import read_predictions, verdict

if TYPE_CHECKING:
    from torch import Tensor

MINIBATCHES = 64
PROMPTS = 32
"""The problems of a batch, each with 16 answers: with the network's usual 8 an update would be of two answers."""
HELD_OUT = 128
"""The held-out problems, with 32 answers each at the end of a run."""
COMMON_RATE = 2e-5
RATES = (COMMON_RATE, 4e-5)
"""The learning rates. Half the first and twice the second had less mean reward in the pilots."""
ABOVE = "Band over .8"
"""`BandAbove`."""
FACTORIAL = (
    CLIP,
    "1.28 over .8",
    "2 over .8",
    ABOVE,
    "1.2 over Band",
    "1.28 over Band",
    "2 over Band",
    "Band over Band",
)
"""All pairs of four upper sides and two lower ones."""
SAME_DOSE = "5 over .8"
"""The constant of 2, 3 and 5 that blocks nearest to the share of Band's upper side in the pilots at the common rate."""
RULES = {**rules(), SAME_DOSE: "FixedClip(0.2, 4.0)"}
"""The rules by name."""
CELL = Cell(
    "network, 64",
    "network",
    MINIBATCHES,
    RATES,
    range(3000, 3016),
    0.15,
    batches=30,
    arms=(*FACTORIAL, "3 over .8", SAME_DOSE),
)
"""The study. The level, a mean reward of five batches, is between 0.08 at the start and 0.2 at the end of a pilot."""
PILOT = replace(CELL, name="pilot", seeds=range(900, 904))
AT_ALL_RATES = (CLIP, ABOVE, SAME_DOSE, "Band over Band")
"""The rules that are run at both rates; the others are run at the common one."""
NAMED = (*AT_ALL_RATES, "2 over .8", "1.2 over Band")
"""The rules that a prediction names."""
PREDICTIONS = Path(__file__).parent / "transfer-predictions.md"


class ManyUpdates(Training):
    """A run of the network that records how far ratios move, and what the rule drops of the gradient.

    Args:
        key: The run.
        cell: The cell.
    """

    def __init__(self, key: Key, cell: Cell = CELL):
        super().__init__(settings_of(key, cell), None)
        self.key = key
        # Sums over rare winners and over rare losers of the gradient, and of its part that the rule dropped.
        self.gradient = torch.zeros(2, 2)

    def train_batch(self) -> dict[str, float]:
        """Sample a batch, make the updates with it, and return the metrics."""
        settings = self.settings
        chosen = torch.randint(len(self.pool), (settings.prompts,), generator=self.numbers)
        problems = [self.pool[index] for index in chosen]
        batch = sample(self.network, problems, settings.samples, self.reward, self.numbers, self.luck)
        order = torch.randperm(len(batch.rewards), generator=self.numbers)
        log_ratio = torch.zeros(())
        for rows in order.chunk(settings.minibatches):
            log_ratio = self.learn(batch.select(rows), self.method)
        return {
            "step": len(self.log) + 1,
            "reward": float(batch.rewards.mean()),
            "entropy": float(batch.entropy.sum() / batch.mask.sum()),
            "spread": float(log_ratio.std()),
        }

    def learn(self, batch: Batch, method: Method) -> Tensor:
        """Make one update as `bandpo_lab.toy.fast_loop.update` does, and return the log-ratios of its tokens before it.

        The audit of that function, a fifth of a run's time, is left out; what the rule drops is read off the gradient.
        """
        self.optimizer.zero_grad()
        logp, _ = log_probabilities(self.network, batch)
        logp.retain_grad()
        mask, logp_old = (values[:, : logp.shape[1]] for values in (batch.mask, batch.logp))
        loss, _ = method.loss(TokenBatch.read(logp, logp_old, batch.advantages, mask), aggregation="grpo")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.weights.values(), MAX_GRAD_NORM)
        self.optimizer.step()
        with torch.no_grad():
            log_ratio = logp - logp_old
            rare = mask * (logp_old < math.log(RARE))
            gradient = (log_ratio.exp() * batch.advantages[:, None]).abs() * rare
            for index, is_side in enumerate((batch.advantages > 0, batch.advantages < 0)):
                of_side = gradient * is_side[:, None]
                self.gradient[index, 0] += of_side.sum()
                self.gradient[index, 1] += (of_side * (logp.grad == 0)).sum()
            return log_ratio[mask > 0]

    def row(self) -> dict[str, Any]:
        """Train, and return the row: the key, the means of a run, its scores on held-out problems, and its curves."""
        run = self.run(None)
        rewards, entropies, spreads = (run.curve(name) for name in ("reward", "entropy", "spread"))
        blocked = (self.gradient[:, 1] / self.gradient[:, 0]).nan_to_num(0.0).tolist()
        return {
            **self.key._asdict(),
            "AUC": round(sum(rewards) / len(rewards), 5),
            "end": run.scores["pass@1"],
            "pass@32": run.scores["pass@32"],
            "spread": round(sum(spreads) / len(spreads), 4),
            "blocked above": round(blocked[0], 4),
            "blocked below": round(blocked[1], 4),
            "curves": {
                "reward": [round(reward, 4) for reward in rewards],
                "entropy": [round(entropy, 4) for entropy in entropies],
            },
            "seconds": run.scores["seconds"],
        }


def settings_of(key: Key, cell: Cell = CELL) -> Settings:
    """Return the settings of a run."""
    return Settings(
        RULES[key.arm],
        task="mental",
        lag=0,
        minibatches=cell.minibatches,
        rate=key.rate,
        batches=cell.batches,
        seed=key.seed,
        prompts=PROMPTS,
        held_out=HELD_OUT,
    )


def pilots() -> Iterator[Key]:
    """Yield the pilots: six rules at the common rate, then at the others the four that also have a best rate."""
    first, second = PILOT.seeds[:2]
    for seed in PILOT.seeds:
        for arm in (CLIP, ABOVE, "3 over .8", "Band over Band", "2 over .8"):
            yield Key(PILOT.name, arm, COMMON_RATE, seed)
    for seed in (first, second):
        yield Key(PILOT.name, SAME_DOSE, COMMON_RATE, seed)
    for rate, seed in ((4e-5, first), (4e-5, second), (8e-5, first), (1e-5, first)):
        for arm in AT_ALL_RATES:
            yield Key(PILOT.name, arm, rate, seed)


def study() -> Iterator[Key]:
    """Yield the runs of the study: those of rules that a prediction names, seed by seed, then the others.

    The first runs were made in another order, all rules of the first seed. The order was changed when they took longer
    than planned.
    """
    for of_predictions in (True, False):
        for seed in CELL.seeds:
            for rate in CELL.rates:
                for arm in CELL.arms if rate == COMMON_RATE else AT_ALL_RATES:
                    if (arm in NAMED) == of_predictions:
                        yield Key(CELL.name, arm, rate, seed)


def run_missing(file: Path, keys: Sequence[Key], cell: Cell = CELL) -> None:
    """Run what a file of rows does not have, and add it."""
    file.touch()
    drop_unfinished_line(file)
    done = {*read_rows(file)}
    # The order of sums, and so the bits, would depend on the number of threads.
    torch.set_num_threads(1)
    with file.open("a", encoding="utf-8") as lines:
        for key in keys:
            if key not in done:
                lines.write(json.dumps(ManyUpdates(key, cell).row()) + "\n")
                lines.flush()


# The report -----------------------------------------------------------------------------------------------------------

SMALLEST = {"entropy": 0.03, "entropy at reward": 0.03, "pass@32": 0.03, "end": 0.03, "AUC": 0.01}
"""The smallest effect of interest of each metric, in the network as in `studies.paper_setting`."""
PRIMARY = minus(ABOVE, SAME_DOSE)
PRIMARY_METRICS = ("pass@32", "end")
INTERACTION = "interaction of the two sides of Band"
PAIRS: dict[str, Contrast] = {
    f"{ABOVE} minus {SAME_DOSE}": PRIMARY,
    f"{ABOVE} minus 3 over .8": minus(ABOVE, "3 over .8"),
    f"{ABOVE} minus 2 over .8": minus(ABOVE, "2 over .8"),
    f"{ABOVE} minus Band over Band": minus(ABOVE, "Band over Band"),
    INTERACTION: control.PAIRS[INTERACTION],
}
"""The differences that are not from clip 0.2."""


def contrasts_of(kind: str) -> Mapping[str, Contrast]:
    """Return the contrasts of a table of `control.KINDS` by name."""
    if kind == "sides":
        return control.side_effects(("1.2", "1.28", "2", "Band"), (".8", "Band"))
    if kind == "pairs":
        return PAIRS
    return {arm: minus(arm, CLIP) for arm in CELL.arms if arm != CLIP}


def metric_of(row: Mapping[str, Any], metric: str, level: float) -> float:
    """Return a metric of a run; NaN for the entropy at a reward that the run never reaches.

    Args:
        row: A row of `ManyUpdates.row`.
        metric: A key of `SMALLEST`.
        level: The mean reward of five batches at which entropies are compared at equal reward.
    """
    curves = row["curves"]
    if metric == "entropy":
        return entropy_at_equal_step(curves["entropy"], "second half")
    if metric == "entropy at reward":
        return entropy_at(curves["reward"], curves["entropy"], level)
    return row[metric]


class Scores(CellScores):
    """The metrics of the study by rule, rate and seed.

    Args:
        rows: The rows.
        cell: The cell.
    """

    def __init__(self, rows: Mapping[Key, Mapping[str, Any]], cell: Cell = CELL):
        super().__init__(cell, rows, metric_of)

    def best_rate(self, arm: str) -> tuple[float, bool] | None:
        best = super().best_rate(arm)
        # No edge: the pilots had the rates beyond.
        return best and (best[0], False)


def primary_measures(settings: Sequence[Setting]) -> dict[tuple[str, str], Measured]:
    """Return the primary differences, at the common rate and at best rates, by setting and metric."""
    name = f"{ABOVE} minus {SAME_DOSE}"
    return {
        (setting.name, metric): setting.measured["pairs", name, metric]
        for setting in settings
        if setting.rate in (COMMON_RATE, control.BEST)
        for metric in PRIMARY_METRICS
        if ("pairs", name, metric) in setting.measured
    }


def verdicts_table(settings: Sequence[Setting]) -> Table:
    """Return the verdict on each prediction; the primary ones on intervals that are adjusted for their number."""
    by_name = {setting.name: setting for setting in settings}
    primary = primary_measures(settings)
    cells: list[list[str]] = []
    for world, arm, other, metric, expects in read_predictions(PREDICTIONS):
        setting = by_name.get(world)
        found = setting and setting.scores.measure(minus(arm, other), metric, setting.rate)
        terms = [world, f"{arm} minus {other}, {NAMES[metric]}", expects]
        if found is None:
            cells.append([*terms, "not run", "–", "open"])
            continue
        is_primary = minus(arm, other) == PRIMARY and (world, metric) in primary
        interval = found.adjusted(len(primary)) if is_primary else found.interval
        measured = signed(interval) + (f", adjusted for {len(primary)}" if is_primary else "")
        conclusion = verdict(interval, expects, SMALLEST[metric])
        cells.append([*terms, measured, str(found.seeds), conclusion])
    return Table(["setting", "difference", "predicted", "measured", "seeds", "verdict"], cells)


def primary_table(settings: Sequence[Setting]) -> Table:
    """Return the primary differences, adjusted for their number and not."""
    primary = primary_measures(settings)
    cells: list[list[str]] = []
    for (name, metric), found in primary.items():
        adjusted = signed(found.adjusted(len(primary)))
        cells.append([name, NAMES[metric], signed(found.interval), adjusted, str(found.seeds)])
    header = ["setting", f"{ABOVE} minus {SAME_DOSE}", "95 %", f"adjusted for {len(primary)}", "seeds"]
    return Table(header, cells)


POWERED = {
    f"{ABOVE} minus {SAME_DOSE}": PRIMARY,
    f"{ABOVE} minus 3 over .8": minus(ABOVE, "3 over .8"),
    f"2 over .8 minus {CLIP}": control.CONTROL,
    f"Band over Band minus {CLIP}": minus("Band over Band", CLIP),
}
"""The differences of the table of power."""


def power_table(scores: CellScores, seeds: int | None = None) -> Table:
    """Return the power at the common rate, from the paired standard deviations of the rows.

    Args:
        scores: The metrics.
        seeds: The number of seeds, by default those of the rows.
    """
    cells: list[list[str]] = []
    for name, contrast in POWERED.items():
        texts = [name]
        for metric, smallest in SMALLEST.items():
            values = scores.differences(contrast, metric, COMMON_RATE)
            deviation = float(np.std(values, ddof=1)) if len(values) >= FEWEST_SEEDS else 0.0
            if not deviation:
                texts.append("–")
                continue
            powers = [
                power_of(deviation, seeds or len(values), effect) for effect in (smallest, 2 * smallest)
            ]
            texts.append(f"{deviation:.3f}: {powers[0]:.0%}, {powers[1]:.0%}")
        cells.append(texts)
    header = ["at the common rate", *(f"{NAMES[metric]}, {value:g}" for metric, value in SMALLEST.items())]
    return Table(header, cells)


TERMS = """\
The network of 335k parameters of `bandpo_lab.toy.fast_loop` and its task "mental", in which right direct answers are
rewarded; {batches} fresh batches of {answers} answers, each used once in one of {minibatches} updates. Rules are named
by their upper and their lower side. "Band over .8" is `BandAbove()`, "Band over Band" has the bounds of `BandPO()`,
"1.2 over .8" is clip 0.2, "1.28 over .8" is Clip-Higher, "{same_dose}" the constant of the dose of Band's upper side
in the pilots.

- **Entropy at equal step:** of the policy in nats a token, the mean over the second half of the batches. **At equal
  reward:** of the first five batches whose mean reward is at least {level:g}, over the seeds of which all compared runs
  reach it; their number is in parentheses.
- **pass@32** and **final reward:** of 32 answers to each of {held_out} held-out problems at the end. **Mean reward:**
  over all batches.
- **Blocked above, below:** the share of the gradient of rare winners and rare losers (p < 0.1) that a rule dropped.
  **Spread:** the standard deviation of the log-ratios in the last update on a batch, the mean over the batches.
- **Best:** the better of two rates by mean reward, chosen on other seeds than those that are scored, and chosen anew
  in each bootstrap sample; at equal reward, and in the table of means, the better one over all seeds. In the pilots
  half the first and twice the second rate had less mean reward.

Intervals are of 95 %, paired by seed. **Bold** ones exclude 0 also if they are adjusted after Bonferroni for the number
of all intervals in the tables of differences, {comparisons}."""
ORDER = """\
The first eleven were of the first seed and all rules. As they took longer than planned, the rules that a prediction
names came first from then on. A first report was written of 134 runs, with 13 seeds of these rules; the rest was run
afterwards, with the same program. A rule of fewer than four seeds is in the tables of means alone."""
POWER = """\
The paired standard deviation, and how often so many seeds find a difference of the smallest effect of interest, and of
twice that."""


def settings_of_rows(rows: Mapping[Key, Mapping[str, Any]]) -> list[Setting]:
    """Return each rate and the best ones, with the differences that have runs."""
    scores = Scores(rows)
    return [control.setting_of(scores, rate, contrasts_of) for rate in (*CELL.rates, control.BEST)]


def page(rows: Mapping[Key, Mapping[str, Any]]) -> str:
    """Return the report as Markdown."""
    settings = settings_of_rows(rows)
    scores = settings[0].scores
    comparisons = max(1, sum(len(setting.measured) for setting in settings))
    verdicts = verdicts_table(settings)
    counted = Counter(cells[-1] for cells in verdicts.rows)
    planned = [*study()]
    terms = TERMS.format(
        batches=CELL.batches,
        answers=PROMPTS * Settings.samples,
        minibatches=MINIBATCHES,
        same_dose=SAME_DOSE,
        level=CELL.level,
        held_out=HELD_OUT,
        comparisons=comparisons,
    )
    lines = [
        "# A control that shows: many updates a batch, in a network",
        "",
        "Written by `make figures` from `research/results/transfer/rows.jsonl.gz`. The terms, the rules and the "
        "predictions are those of `research/studies/transfer-predictions.md`, committed before the runs.",
        "",
        terms,
        "",
        f"There are {sum(key in rows for key in planned)} of {len(planned)} planned runs.",
        ORDER,
        "",
        "## The primary comparison",
        "",
        primary_table(settings).markdown(),
        "",
        "## The control",
        "",
        "It shows if entropy at equal step is above clip 0.2, surely and by at least 0.03 nats.",
        "",
        control.control_table(settings).markdown(),
        "",
        "## Predictions",
        "",
        f"Of {len(verdicts.rows)} predictions {counted['held']} held, {counted['failed']} failed, "
        f"{counted['undecided']} are undecided and {counted['open']} are open.",
        "",
        verdicts.markdown(),
        "",
        "## All differences",
        "",
    ]
    for setting in settings:
        lines += [control.means_table(scores, setting.rate).markdown(), ""]
        for kind in control.KINDS:
            table = control.differences_table(setting, kind, comparisons)
            lines += [table.markdown(), ""] if table.rows else []
    lines += [
        "## Intervals looked at",
        "",
        "They share runs and seeds, so they are not independent.",
        "",
        control.looked_at_table(settings, comparisons).markdown(),
        "",
        "## Power",
        "",
        POWER,
        "",
        power_table(scores).markdown(),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the file does not have, or write what the options ask for."""
    parser = argparse.ArgumentParser(prog="python -m studies.transfer")
    parser.add_argument("rows", type=Path, help="one line for each run; made if it is not there")
    parser.add_argument("--pilots", action="store_true", help="run the pilots, and not the study")
    parser.add_argument("--count", action="store_true", help="only print how much of the study is done")
    parser.add_argument(
        "--power", action="store_true", help="only print the power of 16 seeds, from the pilots"
    )
    parser.add_argument("--report", type=Path, help="only write the report to this file")
    options = parser.parse_args(arguments)
    if options.report:
        with replacing(options.report) as unfinished:
            unfinished.write_text(page(read_rows(options.rows)), encoding="utf-8")
        return
    if options.power:
        print(power_table(Scores(read_rows(options.rows), PILOT), seeds=len(CELL.seeds)).markdown())
        return
    keys = [*(pilots() if options.pilots else study())]
    if options.count:
        done = read_rows(options.rows)
        print(f"{sum(key in done for key in keys)} of {len(keys)} runs")
        return
    run_missing(options.rows, keys)


if __name__ == "__main__":
    main()
