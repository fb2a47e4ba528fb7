"""The words that a rule blocked: the costliest, in their answers, and what other rules would have done to them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bandpo._terminal import printable
from bandpo.audit.metrics import tried_at
from bandpo.audit.record import Call
from bandpo.audit.recorder import record_files
from bandpo.errors import InvalidValue
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
RUN_FILES = ("metrics.jsonl", "trainer_state.json", "config.yaml")
"""Files by which a folder is known to be a run's."""


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
    """Return what makes text of ids: a given tokenizer, else the run's own, else one that shows the ids.

    The run's own lies beside the record, in the run's folder, or in one of its checkpoints; see `tokenizer_file`.
    Nothing that a run's files name is imported or called.

    Args:
        run: The record, a folder or a file.
        tokenizer: A folder, or a name of the hub.

    Raises:
        ValueError: the tokenizer cannot be read.
    """
    if tokenizer is not None and not (Path(tokenizer) / "tokenizer.json").is_file():
        return _of_transformers(tokenizer)
    file = tokenizer_file(run) if tokenizer is None else Path(tokenizer) / "tokenizer.json"
    if file is None:
        return lambda ids: " ".join(map(str, ids))
    from tokenizers import Tokenizer

    # This reads the one file. AutoTokenizer would read the settings beside it too, which may name code of the run.
    try:
        decode = Tokenizer.from_file(str(file)).decode
    except Exception as error:  # tokenizers raises no narrower class
        raise InvalidValue(
            f"{file} cannot be read ({error}); name another tokenizer by --tokenizer"
        ) from error
    return lambda ids: decode(list(ids), skip_special_tokens=False)


def _of_transformers(name: str) -> Decode:
    """Load the tokenizer of a hub name, or of a folder that holds it in another form than tokenizer.json."""
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise InvalidValue(
            f"--tokenizer {name}: there is no such folder; name one that is there, or a hub name"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False).decode
    except (OSError, ValueError) as error:
        raise InvalidValue(f"--tokenizer {name} cannot be loaded: {error}") from error


def tokenizer_file(run: Path) -> Path | None:
    """Return the tokenizer.json of the run that wrote a record; None if it has none.

    It is looked for in the record's folder, then in the run's folder around it, each followed by its checkpoints, the
    newest first. Folders beside the run's may be of other runs, with other tokenizers, and are not looked at.

    Args:
        run: The record, a folder or a file.
    """
    record = (run if run.is_dir() else run.parent).resolve()
    around = record.parent
    folders = [record]
    if not _is_run(record) and not _has_others(around, record):
        folders.append(around)
    for folder in folders:
        places = [folder, *sorted(folder.glob("checkpoint-*"), key=_checkpoint_step, reverse=True)]
        # `bandpo-lab train` saves the final model there. Of other folders of this name nothing says whose they are.
        if _is_run(folder):
            places.append(folder / "model")
        for place in places:
            file = place / "tokenizer.json"
            if file.is_file():
                return file
    return None


def _is_run(folder: Path) -> bool:
    """Whether a folder holds what a run writes at its top."""
    return any((folder / name).is_file() for name in RUN_FILES)


def _has_others(folder: Path, record: Path) -> bool:
    """Whether a folder holds further runs or records, so that what lies in it belongs to none of them."""
    try:
        others = [other for other in folder.iterdir() if other.is_dir() and other != record]
        others = [other for other in others if not other.name.startswith("checkpoint-")]
        return any(_is_run(other) or record_files(other) for other in others)
    except OSError:  # a folder that cannot be read may be a run
        return True


def _checkpoint_step(folder: Path) -> int:
    tail = folder.name.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else -1


def in_text(word: Word, decode: Decode) -> tuple[str, str, str]:
    """What stands before a word in its answer, the word, and what follows."""
    before, after = word.answer[max(0, word.at - AROUND) : word.at], word.answer[word.at + 1 :][:AROUND]
    return decode(before), decode([word.answer[word.at]]), decode(after)


def shown(words: Sequence[Word], decode: Decode) -> str:
    """Return the words as text for a terminal, the blocked one in ⟦ ⟧; control characters in them are escaped."""
    lines = []
    for number, w in enumerate(words, 1):
        before, word, after = map(printable, in_text(w, decode))
        lines.append(f"{number:2d}. {before} ⟦{word}⟧ {after}")
        kept = ", ".join(f"{name} {share:.0%}" for name, share in w.kept.items())
        place = "" if w.step is None else f"step {w.step}: "
        figures = f"p {w.p:.2g}, ratio {w.ratio:.3g}, A {w.advantage:+.3g}"
        lines.append(printable(f"    {place}{figures}; gradient kept by {kept}"))
    return "\n".join(lines)
