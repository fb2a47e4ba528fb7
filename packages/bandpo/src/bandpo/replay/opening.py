"""The lines of `bandpo audit` about kinds of tokens and about the policy that the bounds surround.

The first lines, on what each rule drops, are those of `rlvet.runs.effect`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bandpo.replay.record import RUN
from rlvet.runs.effect import FEWEST_RARE_WINNERS, percent

if TYPE_CHECKING:
    from bandpo.replay.kinds import KindRow
    from rlvet.runs.effect import Effect

NAMED_KINDS = 3
"""Largest number of kinds that a line names."""


def kind_lines(rows: Sequence[KindRow], effect: Effect) -> list[str]:
    """Return a sentence on the kinds of rare winners that the run's rule drops most, and that the strictest one does.

    Args:
        rows: The rare winners by kind.
        effect: What rules drop of their gradient.
    """
    if not rows or effect.tokens < FEWEST_RARE_WINNERS:
        return []
    known = [name for name in effect.dropped if effect.dropped[name] > 0]
    strictest = max(known, key=lambda name: effect.dropped[name], default=RUN)
    lines: list[str] = []
    for name in dict.fromkeys((RUN, strictest)):
        if name not in known:
            continue
        shares = {row.kind: row.of_dropped.get(name, 0.0) for row in rows}
        largest = sorted(shares, key=lambda kind: -shares[kind])[:NAMED_KINDS]
        parts = [f"{percent(shares[kind])} was on {kind}" for kind in largest if shares[kind] > 0]
        verb = "dropped" if name == RUN else "would have dropped"
        lines.append(f"of the rare winners' gradient that {name} {verb}, {', '.join(parts)}")
    return lines


def anchor_line(anchor: str) -> str:
    """Return a sentence if the bounds surround another policy than the trainer's; empty otherwise.

    Args:
        anchor: ``trainer`` or ``rollout``.
    """
    if anchor == "trainer":
        return ""
    return (
        "the bounds of this run surround the policy that sampled (anchor: rollout), not the trainer's: p is the "
        "sampler's probability, and what follows holds for this anchor only"
    )
