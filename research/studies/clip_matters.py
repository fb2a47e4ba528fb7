"""Whether what clip 0.2 drops of the gradient on rare winners tells if any clip can matter in a setting.

    PYTHONPATH=research python -m studies.clip_matters

It reads the rows of two studies (`gate` and `staleness`) and trains nothing. A setting is a cell of a
study at one learning rate. These rules were fixed before any figure was computed:

- The number of a setting is the share of the gradient on rare winners (p < 0.1, A > 0) that clip 0.2 dropped in its own
  runs, the mean over seeds.
- A clip *matters* in a setting if an interval of 95 %, adjusted for the number of other rules (Bonferroni), of the
  paired difference of some rule's mean reward from that of clip 0.2 excludes 0. Only seeds that both have count, at
  least four.
- The verdict is "a clip can matter" from a threshold on, and "no clip can matter" below. For each cell the threshold is
  the one with most right verdicts on all other cells, the smallest one if several have, so that no setting of a cell
  judges itself.
- The verdict is compared with a vote: what most settings of the other cells are.

By these rules the number is right in 89 of 114 settings, and a vote in 71. Half of the settings have random rewards,
whose mean no rule can change, and which a threshold tells apart by their rates. This was seen after the figures.
Without them the number is right in 44 of 49 and a vote in 43, so `bandpo audit` gives no verdict by its size. It only
says that no clip can matter if no rule drops a hundredth (`NOTHING`), that one can matter little if none drops a
twentieth (`LITTLE`), and that one can otherwise; `count_weak` counts how often that is so. The rules named a third
study, `control`, to which runs were still being added. With the runs that it had then, the number was right in 52 of
60 settings with true rewards, and a vote in 53.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from bandpo_lab.study.interval import student
from rlvet.runs.effect import LITTLE, NOTHING
from rlvet.runs.files import read_jsonl
from studies.gate import CLIP

RESULTS = Path(__file__).parents[1] / "results"
FEWEST_SEEDS = 4
RANDOM = "random"
"""The word in the names of cells with random rewards."""
Arms = dict[str, dict[int, tuple[float, float]]]
"""By arm and seed, the mean reward and the blocked share of a run."""


class Setting(NamedTuple):
    """A cell of a study at one learning rate."""

    cell: str
    """The study and its cell."""
    rate: float
    blocked: float
    """The share of the gradient on rare winners that clip 0.2 dropped in its own runs."""
    matters: bool
    """True if another rule's mean reward surely differs from that of clip 0.2."""
    largest: float
    """The largest difference of another rule's mean reward from that of clip 0.2, by its size."""


class Verdicts(NamedTuple):
    """How many verdicts were right, each on a cell that did not fix its threshold."""

    settings: int
    right: int
    """Right verdicts by the number."""
    right_votes: int
    """Right verdicts by a vote of the other cells."""
    none: int
    """Settings of which the number says that no clip can matter."""
    right_none: int
    """Those of them in which none did."""
    wrong: Sequence[Setting]
    """The settings in which the number was wrong."""
    threshold: float
    """The threshold of all cells together."""


def read_settings(results: Path = RESULTS) -> list[Setting]:
    """Return the settings of the studies that have runs of clip 0.2 and of another rule."""
    runs: dict[tuple[str, float], Arms] = {}
    for cell, rate, arm, seed, reward, blocked in _runs(results):
        runs.setdefault((cell, rate), {}).setdefault(arm, {})[seed] = (reward, blocked)
    settings: list[Setting] = []
    for (cell, rate), arms in runs.items():
        clip = arms.pop(CLIP, {})
        shared = {arm: sorted(clip.keys() & seeds.keys()) for arm, seeds in arms.items()}
        shared = {arm: seeds for arm, seeds in shared.items() if len(seeds) >= FEWEST_SEEDS}
        if not shared:
            continue
        level = 1 - 0.05 / len(shared)
        intervals = [
            student([arms[arm][seed][0] - clip[seed][0] for seed in seeds], level)
            for arm, seeds in shared.items()
        ]
        matters = any(interval.low > 0 or interval.high < 0 for interval in intervals)
        largest = max((interval.value for interval in intervals), key=abs)
        settings.append(Setting(cell, rate, fmean(blocked for _, blocked in clip.values()), matters, largest))
    return settings


def _runs(results: Path) -> Iterator[tuple[str, float, str, int, float, float]]:
    """Yield the cell, rate, arm, seed, mean reward and blocked share of each run of the studies."""
    for _, row in read_jsonl(results / "gate/rows.jsonl"):
        pairs = zip(row["reward"], row["blocked"], strict=True)
        for seed, (reward, blocked) in enumerate(pairs, row["first_seed"]):
            yield f"gate, {row['cell']}", row["rate"], row["arm"], seed, reward, blocked or 0.0
    for _, row in read_jsonl(results / "staleness/runs.jsonl.gz"):
        known = [share for share in row["blocked"] if share is not None]
        reward = fmean(row["reward"])
        share = fmean(known) if known else 0.0
        yield f"staleness, {row['cell']}", row["rate"], row["arm"], row["seed"], reward, share


def best_threshold(settings: Sequence[Setting]) -> float:
    """Return the smallest threshold with most right verdicts: that a clip can matter from it on, and none below."""
    shares = sorted({setting.blocked for setting in settings})
    candidates = [0.0, *((low + high) / 2 for low, high in pairwise(shares)), 1.01]
    return max(candidates, key=lambda threshold: (_right(settings, threshold), -threshold))


def _right(settings: Sequence[Setting], threshold: float) -> int:
    return sum((setting.blocked >= threshold) == setting.matters for setting in settings)


def judge(settings: Sequence[Setting]) -> Verdicts:
    """Judge the settings of each cell by a threshold and by a vote of all other cells."""
    right = right_votes = none = right_none = 0
    wrong: list[Setting] = []
    for cell in dict.fromkeys(setting.cell for setting in settings):
        others = [setting for setting in settings if setting.cell != cell]
        threshold = best_threshold(others)
        vote = 2 * sum(setting.matters for setting in others) >= len(others)
        for setting in settings:
            if setting.cell != cell:
                continue
            can_matter = setting.blocked >= threshold
            right += can_matter == setting.matters
            right_votes += vote == setting.matters
            none += not can_matter
            right_none += not can_matter and not setting.matters
            if can_matter != setting.matters:
                wrong.append(setting)
    return Verdicts(len(settings), right, right_votes, none, right_none, wrong, best_threshold(settings))


class Weak(NamedTuple):
    """What happened in settings in which clip 0.2 dropped nothing, and in the others."""

    nothing: int
    """Settings in which it dropped less than `NOTHING`."""
    largest: float
    """The largest difference of a rule's mean reward from that of clip 0.2 in these."""
    little: int
    """Settings in which it dropped more than that, and less than `LITTLE`."""
    largest_little: float
    """The largest difference in these."""
    others: int
    """All settings in which it dropped at least `NOTHING`."""
    mattered: int
    """Those of them in which a clip mattered."""


def count_weak(settings: Sequence[Setting]) -> Weak:
    """Count the settings by the weak verdict, which has no threshold that a setting could fix."""
    nothing = [setting for setting in settings if setting.blocked < NOTHING]
    others = [setting for setting in settings if setting.blocked >= NOTHING]
    little = [setting for setting in others if setting.blocked < LITTLE]
    return Weak(
        len(nothing),
        max(abs(setting.largest) for setting in nothing),
        len(little),
        max(abs(setting.largest) for setting in little),
        len(others),
        sum(setting.matters for setting in others),
    )


def with_true_rewards(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings whose rewards depend on the answers."""
    return [setting for setting in settings if RANDOM not in setting.cell]


def main() -> None:
    """Print the verdicts."""
    settings = read_settings()
    true = with_true_rewards(settings)
    for title, chosen in {"all": settings, "true rewards": true}.items():
        verdicts = judge(chosen)
        print(title, {name: value for name, value in verdicts._asdict().items() if name != "wrong"})
    print(count_weak(true))
    for setting in judge(true).wrong:
        print(
            f"wrong: {setting.cell}, rate {setting.rate:g}: dropped {setting.blocked:.1%}, "
            f"{'matters' if setting.matters else 'none matters'} ({setting.largest:+.3f})"
        )


if __name__ == "__main__":
    main()
