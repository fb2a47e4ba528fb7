"""The map as tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from bandpo.where import BAND, BASELINE, UPPER
from bandpo_lab.study.cells import (
    MAIN,
    RULES,
    Cell,
    Score,
    Setting,
    difference,
    scores,
)

HIGH_RATE = 0.32
"""Where entropy is compared: the greatest learning rate but one of the quick map."""


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join([_row(head), "|" + "---|" * len(head), *map(_row, rows)])


def rare_arm_table(cells: Sequence[Cell]) -> str:
    """For each setting of the rare arm: rules, each at its own best rate, and what each side brings."""
    rows = []
    for setting, found in _of_world(cells, "rare arm").items():
        gap, half = difference(cells, setting, UPPER, BASELINE)
        below, below_half = difference(cells, setting, BAND, UPPER)
        equal = found[UPPER].equal_rate - found[BASELINE].equal_rate
        rows.append(
            [
                setting.optimizer,
                setting.updates,
                setting.samples,
                f"{setting.p:g}",
                *(f"{found[rule].auc:.2f}" for rule in MAIN),
                f"{gap:+.2f} ± {half:.2f}",
                f"{below:+.2f} ± {below_half:.2f}",
                f"{equal:+.2f}",
                " / ".join(f"{found[rule].half:.0f}" for rule in MAIN[:3]),
                " / ".join(f"{found[rule].lost:.0%}" for rule in MAIN[:3]),
            ]
        )
    head = [
        "optimizer",
        "updates",
        "samples",
        "p",
        *MAIN,
        "upper side",
        "lower side",
        "upper side at clip's rate",
    ]
    return _table([*head, "batches to half", "lost"], rows)


def other_worlds_table(cells: Sequence[Cell]) -> str:
    """Every rule in two stages and under coin flips."""
    two, coins = _of_world(cells, "two stages"), _of_world(cells, "coin flips")
    head = [
        "rule",
        *(f"{_short(s)}: reward" for s in two),
        *(f"{_short(s)}: entropy at the end" for s in coins),
    ]
    rows = [
        [
            rule,
            *(_with_error(found[rule]) for found in two.values()),
            *(_end_at_high_rate(cells, setting, rule) for setting in coins),
        ]
        for rule in RULES
    ]
    return _table(head, rows)


def all_map_tables(cells: Sequence[Cell]) -> str:
    """All of it."""
    return f"{rare_arm_table(cells)}\n\n{other_worlds_table(cells)}\n"


def _of_world(cells: Sequence[Cell], world: str) -> dict[Setting, dict[str, Score]]:
    found = scores(cells)
    return {setting: found[setting] for setting in sorted(found, key=_order) if setting.world == world}


def _order(setting: Setting) -> tuple[object, ...]:
    _, p, samples, updates, optimizer = astuple(setting)
    return optimizer, samples != 128, samples, updates, p


def _short(setting: Setting) -> str:
    return f"{setting.world}, {setting.updates} updates"


def _with_error(score: Score) -> str:
    return f"{score.auc:.3f} ± {score.half_width:.3f}{' (edge)' if score.at_edge else ''}"


def _end_at_high_rate(cells: Sequence[Cell], setting: Setting, rule: str) -> str:
    cell = next(cell for cell in cells if (cell.setting, cell.rule) == (setting, rule))
    return f"{cell.entropy_at_end[cell.rates.index(HIGH_RATE)]:.2f}"
