"""The lines of `bandpo audit` about kinds of tokens and about the policy that the bounds surround.

The first lines, on what each rule drops, are those of `rlvet.runs.effect`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    If a rule drops the gradient of few tokens, it has their numbers in place of shares.

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
        verb = "dropped" if name == RUN else "would have dropped"
        counts = {row.kind: row.dropped_tokens.get(name, 0) for row in rows}
        if sum(counts.values()) < FEWEST_RARE_WINNERS:
            lines.append(_counted(f"{name} {verb}", counts))
            continue
        shares = {row.kind: row.of_dropped.get(name, 0.0) for row in rows}
        largest = sorted(shares, key=lambda kind: -shares[kind])[:NAMED_KINDS]
        parts = [f"{percent(shares[kind])} was on {kind}" for kind in largest if shares[kind] > 0]
        lines.append(f"of the rare winners' gradient that {name} {verb}, {', '.join(parts)}")
    return [line for line in lines if line]


def _counted(clause: str, counts: Mapping[str, int]) -> str:
    """Return a sentence with the numbers of the rare winners that a rule drops, by kind; empty if it drops none.

    >>> _counted("the run dropped", {"numbers": 2, "words": 1})
    'the run dropped gradient of 3 rare winners: numbers 2, words 1'
    """
    total = sum(counts.values())
    kinds = sorted((kind for kind in counts if counts[kind]), key=lambda kind: -counts[kind])
    numbers = ", ".join(f"{kind} {counts[kind]}" for kind in kinds)
    winners = "1 rare winner" if total == 1 else f"{total} rare winners"
    return f"{clause} gradient of {winners}: {numbers}" if total else ""


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
