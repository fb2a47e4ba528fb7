"""The words that a rule blocked: the costliest, in their answers, and what other rules would have done to them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from bandpo.audit.metrics import tried_at
from bandpo.audit.record import Call
from bandpo.methods import Method
from bandpo.rules import FixedClip

RULES = {"clip 0.2": "FixedClip(0.2)", "Clip-Higher": "FixedClip(0.2, 0.28)", "none": "Unclipped()"}
RULES |= {"Band": "Band()", "Band above": "BandAbove()"}
"""What is tried beside the run's own."""
MOST, AROUND = 10, 8
"""Words that are shown, and tokens on either side of each."""


class Word(NamedTuple):
    """A token of which a rule dropped a part of the gradient."""

    cost: float
    """What it dropped: r·abs(A) times the share."""
    step: int | None
    answer: Sequence[int]
    """Ids of the tokens of its answer that count."""
    at: int
    """Its place among them."""
    p: float
    """Its old probability."""
    ratio: float
    advantage: float
    kept: Mapping[str, float]
    """For the run's rule and each other, the share of its gradient that it keeps: 0 is blocked."""


def costliest(calls: Iterable[Call], most: int = MOST) -> list[Word]:
    """The tokens whose dropped gradient was largest, of those whose ids are recorded; the largest first.

    A token counts once, at the loss that dropped most of it. A record that tells no method is judged by
    ``FixedClip(0.2)``.
    """
    found: dict[object, Word] = {}
    for call in calls:
        if call.token is None or not call.known:
            continue
        run, batch = call.method or Method(FixedClip()), call.judged
        methods = {"the run": run} | {name: tried_at(run.level, rule) for name, rule in RULES.items()}
        views = {name: m.tokens(batch) for name, m in methods.items()}
        tokens = views["the run"]
        kept = {name: m.weight(views[name]) / views[name].ratio for name, m in methods.items()}
        cost = tokens.ratio * batch.advantages.abs() * (1 - kept["the run"].clamp(0, 1)) * batch.mask
        for place in cost.flatten().topk(min(most, cost.numel())).indices.tolist():
            row, at = divmod(place, cost.shape[1])
            answer = call.token[row][batch.mask[row] > 0].tolist()
            p, ratio, a = (float(x[row, at]) for x in (batch.logp_old.exp(), tokens.ratio, batch.advantages))
            shares = {name: float(x[row, at]) for name, x in kept.items()}
            word = Word(float(cost[row, at]), call.step, answer, at, p, ratio, a, shares)
            key = (*answer, at, word.p)
            if word.cost > (found[key].cost if key in found else 0.0):
                found[key] = word
        found = dict(heapq.nlargest(most, found.items(), key=lambda item: item[1].cost))
    return [*found.values()]


def shown(words: Sequence[Word], decode: Callable[[Sequence[int]], str] | None = None) -> str:
    """The words as text, the blocked one in ⟦ ⟧; ids where nothing decodes them."""
    text = decode or (lambda ids: " ".join(map(str, ids)))
    lines = []
    for number, w in enumerate(words, 1):
        before, after = w.answer[max(0, w.at - AROUND) : w.at], w.answer[w.at + 1 : w.at + 1 + AROUND]
        lines.append(f"{number:2d}. {text(before)} ⟦{text([w.answer[w.at]])}⟧ {text(after)}")
        kept = ", ".join(f"{name} {share:.0%}" for name, share in w.kept.items())
        place = "" if w.step is None else f"step {w.step}: "
        lines.append(
            f"    {place}p {w.p:.2g}, ratio {w.ratio:.3g}, A {w.advantage:+.3g}; gradient kept by {kept}"
        )
    return "\n".join(lines)
