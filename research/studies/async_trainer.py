"""Four clip rules in TRL's own asynchronous trainer, on data of three ages.

    PYTHONPATH=research python -m studies.async_trainer research/results/async-trainer --part 1/2
    PYTHONPATH=research python -m studies.async_trainer research/results/async-trainer --report report.md

The first trains the runs of one part of two that the folder does not contain, one after the other in one thread. The
second process takes part 2/2. Both go on where they were interrupted. Predictions: async_trainer-predictions.md, which
was committed before the first run.

TRL's `AsyncGRPOTrainer` trains on a CPU with `bandpo_lab.training.async_on_cpu`: its queue, its packing, its versions,
its loss and its optimizer, with a sampler in the same process in place of vLLM. The network, the task, the batches and
the optimizer are those of `studies.staleness`, whose loop is our own. Three things differ: TRL averages the loss over
the tokens of an update and not over those of each answer, an update has the answers to two prompts, and TRL requests
the data of an update before the update on the data before it, so a quarter of the data is one version older.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bandpo_lab.errors import InvalidValue
from bandpo_lab.files.writing import drop_unfinished_line, replacing
from bandpo_lab.output.tables import Table
from bandpo_lab.study.interval import signed, student
from bandpo_lab.tasks import multiplication
from rlvet.runs.files import read_jsonl
from studies.paper_setting import simulated_power
from studies.predictions import Prediction, read_predictions, verdict
from studies.rewards import any_opener

CLIP = "clip 0.2"
ARMS = {
    CLIP: "FixedClip(0.2)",
    "clip [.8, 2]": "FixedClip(0.2, 1.0)",
    "BandPO": "BandPO()",
    "BandAbove": "BandAbove()",
}
LAGS = (0, 2, 4)
"""The numbers of versions between the newest weights and those that sample."""
SEEDS = range(1, 13)
RATE = 1e-4
VERSIONS, UPDATES, PROMPTS, GROUP = 60, 4, 2, 16
"""The versions of the weights; the updates of a version; the prompts of an update; the answers to a prompt."""
SMALLEST = 0.03
"""The smallest effect of interest, in mean reward."""
BASE = Path(__file__).parents[1] / "results/staleness/bases/a"
"""The network at the start of each run: the first one of the study of stale data."""
PREDICTIONS = Path(__file__).parent / "async_trainer-predictions.md"
ROWS = "rows-{}-of-{}.jsonl"
"""The name of the file of a part."""
FEWEST_SEEDS = 4
"""The number of whole seeds from which on the study is shown."""


class Key(NamedTuple):
    """A training run."""

    lag: int
    arm: str
    seed: int


def keys() -> list[Key]:
    """Return the runs in order: seed by seed, with all lags and rules of a seed together."""
    return [Key(lag, arm, seed) for seed in SEEDS for lag in LAGS for arm in ARMS]


def train(key: Key, *, versions: int = VERSIONS, base: Path = BASE) -> dict[str, Any]:
    """Train one run, and return its row.

    A row has ``reward``, the mean reward of the answers that were sampled for each version; ``distance``, the mean abs
    log-ratio (nats) of the updates of each version; ``blocked``, the share of the gradient of rare winners (p < 0.1,
    A > 0) that the rule dropped, over all updates; ``age``, the mean age of the tokens, in updates; ``dropped``, the
    number of answers that TRL dropped because of their age; and ``seconds`` of the processor.

    Args:
        key: The run.
        versions: The number of versions.
        base: The folder of the network at the start.
    """
    # TRL warns that this trainer is experimental.
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import torch
    from transformers import AutoModelForCausalLM, PrinterCallback

    from bandpo.integrations.trl import BandAsyncGRPOConfig, BandAsyncGRPOTrainer
    from bandpo_lab.training.async_on_cpu import OldSampler, trl_on_a_cpu

    began = time.process_time()
    torch.set_num_threads(1)
    steps = versions * UPDATES
    # Each prompt is used once. TRL requests the data of one more update.
    data: Any = multiplication.dataset("train", (steps + 1) * PROMPTS, seed=key.seed)
    tokenizer = multiplication.tokenizer()
    sampler = OldSampler(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        tokenizer,
        data,
        lambda completions, answer, **_: any_opener(completions, answer),
        lag=key.lag,
        num_generations=GROUP,
        prompts=PROMPTS,
        max_new_tokens=multiplication.MAX_COMPLETION_LENGTH,
        seed=key.seed,
    )
    with tempfile.TemporaryDirectory() as folder, trl_on_a_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = BandAsyncGRPOConfig(
            folder,
            method=ARMS[key.arm],
            watched="off",
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            gradient_checkpointing=False,
            seed=key.seed,
            max_steps=steps,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            weight_decay=0.0,
            max_grad_norm=1.0,
            num_generations=GROUP,
            per_device_train_batch_size=PROMPTS * GROUP,
            token_budget=0,
            weight_sync_steps=UPDATES,
            # One more than is needed, so that no answer is dropped.
            max_staleness=key.lag + 2,
        )
        trainer = BandAsyncGRPOTrainer(
            str(base),
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            rollout_worker=sampler,
            weight_transfer=sampler,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    log: list[dict[str, Any]] = [row for row in trainer.state.log_history if "loss" in row]
    return {
        **key._asdict(),
        "seconds": round(time.process_time() - began, 1),
        "age": round(sum(row["age_mean"] for row in log) / len(log), 2),
        "dropped": int(sum(row.get("sample/dropped_stale_total") or 0 for row in log)),
        "blocked": _blocked(log),
        "reward": _means_of_versions(sampler.rewards[:steps]),
        "distance": _means_of_versions([row["audit_detail"]["audit/log_ratio_abs"] for row in log]),
    }


def _blocked(log: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the gradient of rare winners that the rule dropped, over all updates of a run."""
    mass = 0.0
    blocked = 0.0
    for row in log:
        of_update = row["audit/mass_positive_below_0.1"]
        mass += of_update
        blocked += of_update * row.get("audit/blocked_mass_below_0.1", 0.0)
    return round(blocked / mass, 4) if mass else 0.0


def _means_of_versions(values: Sequence[float]) -> list[float]:
    """Return the mean of the values of the updates of each version."""
    parts = [values[first : first + UPDATES] for first in range(0, len(values), UPDATES)]
    return [_mean(part) for part in parts]


def _mean(values: Sequence[float]) -> float:
    """Return the mean of values, rounded."""
    return round(sum(values) / len(values), 4)


# The rows and the report ----------------------------------------------------------------------------------------------


def read_rows(folder: Path) -> dict[Key, dict[str, Any]]:
    """Return the rows of the finished runs, of all parts, which may be compressed."""
    rows: dict[Key, dict[str, Any]] = {}
    for file in sorted(folder.glob("rows*.jsonl*")):
        for _, row in read_jsonl(file):
            rows[Key(row["lag"], row["arm"], row["seed"])] = row
    return rows


def whole_seeds(rows: Mapping[Key, Any]) -> list[int]:
    """Return the seeds of which every run is finished."""
    return [seed for seed in SEEDS if all(key in rows for key in keys() if key.seed == seed)]


def mean_reward(row: Mapping[str, Any]) -> float:
    """Return the mean reward of all answers of a run."""
    return sum(row["reward"]) / len(row["reward"])


def differences(rows: Mapping[Key, Mapping[str, Any]], lag: int, arm: str, minus: str) -> list[float]:
    """Return the differences of two rules in mean reward, by seed."""
    gaps: list[float] = []
    for seed in SEEDS:
        ours = rows.get(Key(lag, arm, seed))
        theirs = rows.get(Key(lag, minus, seed))
        if ours is not None and theirs is not None:
            gaps.append(mean_reward(ours) - mean_reward(theirs))
    return gaps


def lag_of(prediction: Prediction) -> int:
    """Return the lag of a prediction, whose world is ``lag 4``."""
    return int(prediction.world.removeprefix("lag "))


def verdicts_table(rows: Mapping[Key, Mapping[str, Any]], predictions: Sequence[Prediction]) -> Table:
    """Return the predicted differences in mean reward with their intervals, verdicts and power."""
    cells: list[list[str]] = []
    for prediction in predictions:
        gaps = differences(rows, lag_of(prediction), prediction.arm, prediction.minus)
        cell = [
            prediction.world,
            f"{prediction.arm} − {prediction.minus}",
            prediction.expects,
            str(len(gaps)),
        ]
        if len(gaps) < 2:
            cells.append([*cell, "–", "–", "–", "–"])
            continue
        interval = student(gaps)
        deviation = (sum((gap - interval.value) ** 2 for gap in gaps) / (len(gaps) - 1)) ** 0.5
        power = simulated_power(deviation, len(gaps), SMALLEST)
        cells.append(
            [
                *cell,
                signed(interval),
                verdict(interval, prediction.expects, SMALLEST),
                f"{deviation:.3f}",
                str(power),
            ]
        )
    header = ["setting", "difference", "predicted", "seeds", "mean reward", "verdict", "deviation", "power"]
    return Table(header, cells)


GAINS = (("BandAbove", CLIP), ("clip [.8, 2]", CLIP), ("BandPO", CLIP), ("BandAbove", "clip [.8, 2]"))
"""The differences of the page on old data: a rule, and the one that is subtracted."""
NAMES = {
    CLIP: "clip 0.2",
    "BandAbove": "`BandAbove()`",
    "BandPO": "`BandPO()`",
    "clip [.8, 2]": "a clip of [0.8, 2]",
}
"""The names of the rules on that page."""


def gains_table(rows: Mapping[Key, Mapping[str, Any]]) -> Table:
    """Return the table of the page on old data: the mean reward with clip 0.2 and the differences, by lag."""
    cells: list[list[str]] = []
    for lag in LAGS:
        of_clip = [row for key, row in rows.items() if (key.lag, key.arm) == (lag, CLIP)]
        age = _mean([row["age"] for row in of_clip])
        reward = _mean([*map(mean_reward, of_clip)])
        gains = [signed(student(differences(rows, lag, arm, minus))) for arm, minus in GAINS]
        cells.append([f"{lag} ({age:.1f})", f"{reward:.3f}", *gains])
    names = [f"{NAMES[arm]} minus {NAMES[minus]}" for arm, minus in GAINS]
    lag_name = f"lag, in versions of {UPDATES} updates (mean age, in updates)"
    return Table([lag_name, "mean reward with clip 0.2", *names], cells)


def runs_table(rows: Mapping[Key, Mapping[str, Any]]) -> Table:
    """Return the means over seeds of each lag and rule."""
    cells: list[list[str]] = []
    for lag in LAGS:
        for arm in ARMS:
            of_cell = [rows[key] for key in keys() if key in rows and (key.lag, key.arm) == (lag, arm)]
            if not of_cell:
                continue
            tenth = max(1, VERSIONS // 10)
            ends = [sum(row["reward"][-tenth:]) / tenth for row in of_cell]
            cells.append(
                [
                    f"lag {lag}",
                    arm,
                    str(len(of_cell)),
                    f"{_mean([*map(mean_reward, of_cell)]):.3f}",
                    f"{_mean(ends):.3f}",
                    f"{_mean([row['blocked'] for row in of_cell]):.1%}",
                    f"{_mean([x for row in of_cell for x in row['distance']]):.3f}",
                    f"{_mean([row['age'] for row in of_cell]):.1f}",
                    str(sum(row["dropped"] for row in of_cell)),
                ]
            )
    header = ["setting", "rule", "seeds", "mean reward", "of the last tenth", "blocked"]
    return Table([*header, "mean abs log-ratio (nats)", "mean age (updates)", "dropped answers"], cells)


HOW_TO_READ = (
    "Student's intervals of 95 %, paired by seed, not adjusted for their number. Deviation: the standard deviation of "
    "a pair's difference over seeds. Power: with this deviation, the share of studies that would find a difference of "
    f"{SMALLEST:g}, of {2 * SMALLEST:g}, and that two equal rules are equal within {SMALLEST:g}."
)


def page(rows: Mapping[Key, Mapping[str, Any]]) -> str:
    """Return the report. Its tables have the seeds of which every run is finished."""
    done = sum(key in rows for key in keys())
    seconds = [row["seconds"] for row in rows.values()]
    seeds = whole_seeds(rows)
    rows = {key: row for key, row in rows.items() if key.seed in seeds}
    lines = [
        "# Four clip rules in TRL's asynchronous trainer",
        "",
        "Written by `python -m studies.async_trainer FOLDER --report FILE`, see [async_trainer.py]"
        "(../../studies/async_trainer.py). Its "
        "[predictions](../../studies/async_trainer-predictions.md) were committed before the first run.",
        "",
        f"{done} of {len(keys())} runs, {sum(seconds) / 3600:.1f} hours of one core.",
    ]
    if done < len(keys()):
        lines[-1] += (
            f" The study is not complete, and its verdicts are provisional: the tables have the {len(seeds)} of "
            f"{len(SEEDS)} seeds of which every run is finished."
        )
    lines += [
        "",
        "## Differences in mean reward",
        "",
        HOW_TO_READ,
        "",
        verdicts_table(rows, read_predictions(PREDICTIONS)).markdown(),
        "",
        "## All runs",
        "",
        "Blocked: the share of the gradient of rare winners (p < 0.1, A > 0) that the rule dropped.",
        "",
        runs_table(rows).markdown(),
        "",
    ]
    return "\n".join(lines)


def part_of(text: str) -> tuple[int, int]:
    """Return number and count of a part.

    Raises:
        ValueError: the text is no part.

    >>> part_of("2/3")
    (2, 3)
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise InvalidValue(f"{text!r} is no part: write 1/2 and 2/2 for the halves")
    return int(number), int(count)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the runs of a part that the folder does not contain, or write the report."""
    parser = argparse.ArgumentParser(prog="python -m studies.async_trainer")
    parser.add_argument("folder", type=Path, help="folder of the rows; made if it is not there")
    parser.add_argument("--part", type=part_of, default=(1, 1), help="a part of the runs, as 1/2")
    parser.add_argument("--count", action="store_true", help="only say how much is done")
    parser.add_argument("--report", type=Path, help="only write the report to this file")
    asked = parser.parse_args(arguments)
    number, count = asked.part
    mine = keys()[number - 1 :: count]
    asked.folder.mkdir(parents=True, exist_ok=True)
    file = asked.folder / ROWS.format(number, count)
    if file.exists():
        drop_unfinished_line(file)
    rows = read_rows(asked.folder)
    if asked.count:
        print(f"{sum(key in rows for key in mine)} of {len(mine)} runs")
        return
    if asked.report:
        with replacing(asked.report) as report:
            report.write_text(page(rows), encoding="utf-8")
        return
    with file.open("a", encoding="utf-8") as lines:
        for key in mine:
            if key not in rows:
                lines.write(json.dumps(train(key)) + "\n")
                lines.flush()


if __name__ == "__main__":
    main()
