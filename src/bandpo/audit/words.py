"""The words that a rule blocked: the costliest, in their answers, and what other rules would have done to them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bandpo.audit.metrics import tried_at
from bandpo.audit.record import Call
from bandpo.methods import Method
from bandpo.rules import ClipRule, FixedClip

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo.batch import Tokens

RULES = {"clip 0.2": "FixedClip(0.2)", "Clip-Higher": "FixedClip(0.2, 0.28)", "no clip": "Unclipped()"}
RULES |= {"Band": "Band()", "Band above": "BandAbove()"}
"""What is tried beside the run's own."""
RUN = "the run"
"""How its own is called beside them."""
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


Decode = Callable[[Sequence[int]], str]


def kept_by(
    call: Call, rules: Mapping[str, Method | ClipRule | str] = RULES
) -> tuple[Tokens, dict[str, Tensor]]:
    """The tokens of a loss as the run's method sees them, and for it and each rule the share of gradient that it keeps.

    A record that tells no method is judged by ``FixedClip(0.2)``.
    """
    run, batch = call.method or Method(FixedClip()), call.judged
    methods = {RUN: run} | {name: tried_at(run.level, rule) for name, rule in rules.items()}
    views = {name: m.tokens(batch) for name, m in methods.items()}
    return views[RUN], {name: m.weight(views[name]) / views[name].ratio for name, m in methods.items()}


def costliest(
    calls: Iterable[Call], most: int = MOST, rules: Mapping[str, Method | ClipRule | str] = RULES
) -> list[Word]:
    """The tokens whose dropped gradient was largest, of those whose ids are recorded; the largest first.

    A token counts once, at the loss that dropped most of it.
    """
    found: dict[object, Word] = {}
    for call in calls:
        if call.token is None or not call.known:
            continue
        batch, (tokens, kept) = call.judged, kept_by(call, rules)
        cost = tokens.ratio * batch.advantages.abs() * (1 - kept[RUN].clamp(0, 1)) * batch.mask
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


def decoder(run: Path, tokenizer: str | None = None) -> Decode:
    """What makes text of ids: a tokenizer by its folder or name, else one near the run, else their digits."""
    folders = (run, *run.parents[:2], *sorted(run.parent.glob("*")))
    near = (str(path) for path in folders if (path / "tokenizer.json").is_file())
    if name := tokenizer or next(near, None):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name).decode
    return lambda ids: " ".join(map(str, ids))


def in_text(word: Word, decode: Decode) -> tuple[str, str, str]:
    """What stands before a word in its answer, the word, and what follows."""
    before, after = word.answer[max(0, word.at - AROUND) : word.at], word.answer[word.at + 1 :][:AROUND]
    return decode(before), decode([word.answer[word.at]]), decode(after)


def shown(words: Sequence[Word], decode: Decode) -> str:
    """The words as text, the blocked one in ⟦ ⟧."""
    lines = []
    for number, w in enumerate(words, 1):
        lines.append(f"{number:2d}. {{}} ⟦{{}}⟧ {{}}".format(*in_text(w, decode)))
        kept = ", ".join(f"{name} {share:.0%}" for name, share in w.kept.items())
        place = "" if w.step is None else f"step {w.step}: "
        lines.append(
            f"    {place}p {w.p:.2g}, ratio {w.ratio:.3g}, A {w.advantage:+.3g}; gradient kept by {kept}"
        )
    return "\n".join(lines)
