"""Healthy courses that die at a known step, and how soon and how often the death is told.

    PYTHONPATH=tests:benchmarks/doctor python benchmarks/doctor/deaths.py --first 100

prints three tables: late deaths and their onsets, alarms on healthy prefixes, and each metric that stops in five ways.
The first seed decides on which courses. No limit was chosen on those of 7000 and later.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from log_scenarios import SHAPES, Course, Rows, healthy, rough

from rlvet import open_run
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log_checks import log_findings
from rlvet.checks.watch import LogWatch
from rlvet.errors import InvalidValue
from rlvet.runs.logs import Log
from rlvet.runs.setup import Setup

GOOD_STEPS = (300, 1000, 2000, 10_000)
"""Numbers of good steps before a death."""

NEAR = 2
"""Steps by which a reported onset may be off."""


def course(seed: int, steps: int) -> tuple[Rows, float]:
    """Return the log of a healthy run with a loss, and the smallest reward of its scale. Every second one is rough."""
    shape = [*SHAPES][seed % len(SHAPES)]
    draw = random.Random(f"loss {seed}")
    rows = (rough if seed % 2 else healthy)(seed, shape, steps)
    for row in rows:
        row["loss"] = 0.02 * draw.gauss(0, 1)
    return rows, Course(seed, shape).offset


Death = Callable[[dict[str, float], float, float, random.Random], None]
"""A function that changes a row after a death, given the smallest reward, the scale of rewards, and a generator."""


def _all(row: dict[str, float], floor: float, scale: float, draw: random.Random) -> None:
    row |= {"reward": floor, "frac_reward_zero_std": 1.0, "completions/clipped_ratio": 1.0}
    row |= {"kl": 8 + draw.random(), "grad_norm": 1e-5, "reward_std": 0.0}


def _nearly_all(row: dict[str, float], floor: float, scale: float, draw: random.Random) -> None:
    row["reward"] = floor + 0.04 * scale * draw.random()
    row["frac_reward_zero_std"] = 0.96 + 0.04 * draw.random()


def _entropy_and_groups(row: dict[str, float], floor: float, scale: float, draw: random.Random) -> None:
    row |= {"entropy": 0.002 * (1 + draw.random()), "frac_reward_zero_std": 1.0}


def _policy_and_gradient(row: dict[str, float], floor: float, scale: float, draw: random.Random) -> None:
    row |= {"kl": 10 + 10 * row["kl"] + draw.random(), "grad_norm": 100 * row["grad_norm"]}


def _null(row: dict[str, float], floor: float, scale: float, draw: random.Random) -> None:
    row |= dict.fromkeys(("reward", "reward_std", "frac_reward_zero_std"))


def _reward(row: dict[str, float], floor: float, scale: float, draw: random.Random) -> None:
    row["reward"] = floor


def _reward_null(row: dict[str, float], floor: float, scale: float, draw: random.Random) -> None:
    row["reward"] = None


OF_TWO: Mapping[str, Death] = {
    "everything": _all,
    "reward and groups, with noise": _nearly_all,
    "entropy and groups": _entropy_and_groups,
    "KL and gradient": _policy_and_gradient,
    "reward and groups null": _null,
}
"""Deaths that two or more metrics show, after five rows."""

OF_THE_REWARD: Mapping[str, Death] = {"reward": _reward, "reward null": _reward_null}
"""Deaths that the reward alone shows, after ten rows."""


def died(rows: Rows, floor: float, death: Death, dead: int, seed: int = 0) -> Rows:
    """Return a log with dead rows at its end. Their other metrics are drawn from its last rows."""
    draw = random.Random(f"death {seed}")
    scale = max(row["reward"] for row in rows) - floor
    result = list(rows)
    last_rows = rows[-50:]
    for number in range(1, dead + 1):
        row = {name: draw.choice(last_rows)[name] for name in rows[-1]}
        row["step"] = rows[-1]["step"] + number
        death(row, floor, scale, draw)
        result.append(row)
    return result


def stops(rows: Rows) -> list[float | None]:
    """Return the onsets of the findings that say to stop, or none."""
    return [finding.onset for finding in log_findings(Log.of(rows).rows) if finding.severity == "stop"]


def live_alarms(rows: Sequence[Mapping[str, object]], first: int = 0) -> list[tuple[int, str]]:
    """Return the numbers of rows at which a watch says to stop, each with the code.

    Args:
        rows: The log.
        first: Number of rows before the first one that is watched, as after a run was resumed.
    """
    watch = LogWatch(10)
    watch.start_after(first)
    alarms = []
    for count in range(first + 1, len(rows) + 1):
        growing = rows[:count]
        if watch.is_due(growing):
            findings = watch.check(growing, Setup())
            alarms += [(count, finding.code) for finding in findings if finding.severity == "stop"]
    return alarms


class Told(NamedTuple):
    """How many deaths are told: by the diagnosis, and by the watch."""

    deaths: int
    stops: int
    """Deaths with a finding that says to stop."""
    near: int
    """Deaths with such a finding whose onset is right."""
    live: int
    """Deaths that the watch announces by the last row."""


def late_deaths(death: Death, good: int, dead: int, seeds: Sequence[int]) -> Told:
    """Diagnose courses that died after a number of good steps."""
    counts = [0, 0, 0, 0]
    for seed in seeds:
        rows, floor = course(seed, good)
        rows = died(rows, floor, death, dead, seed)
        onsets = stops(rows)
        counts[0] += 1
        counts[1] += bool(onsets)
        counts[2] += any(onset is not None and abs(onset - (good + 1)) <= NEAR for onset in onsets)
        counts[3] += bool(live_alarms(rows, first=good))
    return Told(*counts)


KEYS = (
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "loss",
    "grad_norm",
    "entropy",
    "kl",
    "completions/mean_length",
    "completions/clipped_ratio",
    "clip_ratio/region_mean",
    "learning_rate",
)
"""The keys that stop in the grid. A part of the courses has further ones."""

OTHERS: Mapping[str, tuple[float, float]] = {
    "clip_high": (0.01, 0.002),
    "clip_low": (0.004, 0.001),
    "kl_old": (0.002, 5e-4),
    "mismatch_kl": (0.001, 3e-4),
    "mismatch": (0.02, 0.003),
    "mismatch_probs": (0.004, 5e-4),
    "importance_weight": (1.0, 0.01),
    "effective_samples": (0.9, 0.02),
    "staleness": (1.5, 0.2),
    "staleness_max": (3.0, 0.5),
    "explained_variance": (0.6, 0.05),
    "value_loss": (0.1, 0.02),
    "critic_grad_norm": (1.5, 0.3),
    "length_max": (900.0, 60.0),
    "length_finished": (300.0, 20.0),
    "memory": (60.0, 2.0),
    "step_time": (40.0, 5.0),
    "reward_max": (1.0, 0.1),
    "reward_min": (-1.0, 0.1),
    "advantage_max": (2.0, 0.2),
    "advantage_min": (-2.0, 0.2),
}
"""The other quantities, under their own names, each with its mean and noise."""

FINE = {
    **{(name, "0"): "nothing is clipped" for name in ("clip_high", "clip_low")},
    **{(name, "0"): "policies are equal" for name in ("kl_old", "mismatch_kl", "mismatch", "mismatch_probs")},
    **{(name, "0"): "data is fresh" for name in ("staleness", "staleness_max")},
    **{(name, "0"): "may be the extreme" for name in ("reward_max", "reward_min", "advantage_min")},
    **{
        (name, "frozen"): "may be constant"
        for name in OTHERS
        if name.endswith(("_max", "_min", "_finished"))
        or name in ("staleness", "memory", "step_time", "effective_samples")
    },
    ("length_finished", "null"): "no answer was finished",
    ("length_finished", "absent"): "no answer was finished",
    ("length_finished", "NaN"): "no answer was finished",
}
"""Pairs of another quantity and a way that are no death."""


def with_others(rows: Rows, seed: int) -> Rows:
    """Return a log with the other quantities too, each under one key, so that it stops with this key."""
    draw = random.Random(f"others {seed}")
    read = Log.of(rows).read
    replaced = {key for name in OTHERS for key in read.get(name, ())}
    return [
        {key: value for key, value in row.items() if key not in replaced}
        | {name: mean + noise * draw.gauss(0, 1) for name, (mean, noise) in OTHERS.items()}
        for row in rows
    ]


VITAL = ("reward", "reward_std", "frac_reward_zero_std", "loss", "grad_norm")
"""The keys without which a run is not judged: reward, groups, loss and gradient."""

STOPS: Mapping[str, Callable[[float], float | None]] = {
    "null": lambda value: None,
    "absent": lambda value: None,
    "NaN": lambda value: math.nan,
    "0": lambda value: 0.0,
    "frozen": lambda value: value,
}
"""Ways in which a metric stops: the value of a row, given the last one that was alive."""

NO_DEATH = {
    ("frac_reward_zero_std", "0"): "every group has signal",
    ("completions/clipped_ratio", "0"): "every answer is finished",
    ("clip_ratio/region_mean", "0"): "no token is clipped",
    ("learning_rate", "frozen"): "a constant learning rate is usual",
    ("loss", "0"): "every ratio is 1, and the gradient lives",
}
"""Pairs of a key and a way that are no death, each with what they mean."""

ONSETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Shares of a run after which a metric stops in the grid."""


def stopped(rows: Rows, key: str, way: str, onset: float) -> Rows:
    """Return a log in which a metric stops in one way."""
    first = int(onset * len(rows))
    last = next(row[key] for row in reversed(rows[:first]) if row[key] or first < 2)
    result = [dict(row) for row in rows]
    for row in result[first:]:
        row[key] = STOPS[way](last)
        if way == "absent":
            del row[key]
    return result


def is_called_ok(rows: Rows) -> bool:
    """Return whether nothing but notes is said of a log."""
    log = Log.of(rows, names={name: name for name in OTHERS if name in rows[0]})
    return Diagnosis(log_findings(log.rows), rows=log.rows, log=log).headline.startswith("ok")


def grid(seed: int, keys: Sequence[str] = (*KEYS, *OTHERS), steps: int = 200) -> dict[tuple[str, str], int]:
    """Return, for each key and way, the number of onsets at which the log is called ok."""
    few, _ = course(seed, steps)
    many = with_others(few, seed)
    counts = {}
    for key in keys:
        rows = many if key in OTHERS else few
        if key not in rows[0]:
            continue
        for way in STOPS:
            if (key, way) not in (NO_DEATH | FINE):
                counts[key, way] = sum(is_called_ok(stopped(rows, key, way, onset)) for onset in ONSETS)
    return counts


CODES = ("run-died", "metric-lost")
"""The codes of findings on the life of a run."""


def healthy_alarms(seeds: Sequence[int], steps: int = 400, every: int = 7) -> list[tuple[int, int, str]]:
    """Return the seed, the number of rows and the code of each alarm on prefixes of healthy courses."""
    alarms = []
    for seed in seeds:
        rows = Log.of(course(seed, steps)[0]).rows
        for count in range(20 + seed % every, len(rows) + 1, every):
            findings = log_findings(rows[:count])
            alarms += [(seed, count, one.code) for one in findings if one.code in CODES]
    return alarms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=100, help="the first seed")
    parser.add_argument("--seeds", type=int, default=12, help="courses of each kind of death")
    parser.add_argument("--prefixes", type=int, default=300, help="healthy courses with one prefix each")
    parser.add_argument("--logs", type=Path, help="a folder of logs, whose prefixes are diagnosed")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    for dead, deaths in ((5, OF_TWO), (10, OF_THE_REWARD)):
        for name, death in deaths.items():
            for good in GOOD_STEPS:
                some = seeds[: 4 if good > 2000 else None]
                print(
                    f"{name}; {dead} dead rows after {good}: {late_deaths(death, good, dead, some)}",
                    flush=True,
                )
    alarms = []
    for seed in range(options.first, options.first + options.prefixes):
        draw = random.Random(f"prefix {seed}")
        rows = Log.of(course(seed, draw.choice((60, 120, 200, 400, 1000)))[0]).rows
        count = draw.randint(10, len(rows))
        alarms += [(seed, count, one.code) for one in log_findings(rows[:count]) if one.code in CODES]
    print(f"alarms on {options.prefixes} healthy prefixes: {len(alarms)} {alarms}", flush=True)
    oks: dict[tuple[str, str], int] = {}
    for seed in seeds:
        for pair, count in grid(seed).items():
            oks[pair] = oks.get(pair, 0) + count
    cases = len(ONSETS) * len(seeds)
    vital = {pair: count for pair, count in oks.items() if pair[0] in VITAL}
    print(f"ok of {len(vital) * cases} cases of {VITAL}: {sum(vital.values())}")
    print(f"ok of {len(oks) * cases} cases of all: {sum(oks.values())}")
    print({pair: count for pair, count in oks.items() if count})
    for path in sorted(options.logs.rglob("*")) if options.logs else ():
        if not path.is_file():
            continue
        try:
            rows = open_run(path).rows
        except (InvalidValue, OSError, UnicodeDecodeError):
            continue
        said = {}
        for count in sorted({*range(10, len(rows), max(1, len(rows) // 60)), len(rows)}):
            for finding in log_findings(rows[:count]):
                if finding.code in CODES:
                    said.setdefault(f"{finding.code} ({finding.severity})", (count, finding.cause))
        print(json.dumps({path.name: said}, ensure_ascii=False))


if __name__ == "__main__":
    main()
