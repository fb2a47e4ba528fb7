"""Single tokens in their answers: those that a rule blocked, and those on which engine and trainer disagree."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bandpo._terminal import printable
from bandpo.audit.metrics import tried_at
from bandpo.audit.replay import RUN, RecordedMethod, as_batch
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.rules import ClipRule, FixedClip
from bandpo.runs import LossBatch
from bandpo.runs.record import record_files

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo.batch import Tokens

RULES: Mapping[str, Method | ClipRule | str] = {
    "clip 0.2": "FixedClip(0.2)",
    "Clip-Higher": "FixedClip(0.2, 0.28)",
    "no clip": "Unclipped()",
    "Band": "Band()",
    "Band above": "BandAbove()",
}
"""The rules that are tried beside the run's own."""

SHOWN = 10
"""Blocked tokens that are shown."""

CONTEXT = 8
"""Tokens of the answer that are shown on either side of a blocked one."""

DISAGREEMENT = 0.1
"""Distance (nats) of engine and trainer at a token from which it is shown; rounding in bfloat16 gives a fifth of it on
average."""

RUN_FILES = ("metrics.jsonl", "trainer_state.json", "config.yaml")
"""Files by which a folder is known to be a run's."""


class BlockedToken(NamedTuple):
    """A token of which a rule dropped a part of the gradient."""

    cost: float
    """The gradient that was dropped: r·abs(A) times the share that the rule drops."""
    step: int | None
    """The trainer's step."""
    answer: Sequence[int]
    """Ids of the counted tokens of its answer."""
    at: int
    """Its index among them."""
    p: float
    """Its old probability."""
    ratio: float
    """The ratio of the policy in training to the old one."""
    advantage: float
    """Its advantage."""
    kept: Mapping[str, float]
    """For the run's rule and each other, the share of its gradient that the rule keeps; 0 is blocked."""


class DisagreeingToken(NamedTuple):
    """A token to which engine and trainer gave different probabilities."""

    distance: float
    """The trainer's log-probability less the engine's (nats)."""
    step: int | None
    """The trainer's step."""
    answer: Sequence[int]
    """Ids of the counted tokens of its answer."""
    at: int
    """Its index among them."""
    p: float
    """Its probability in the trainer, before updates on its batch."""
    p_engine: float
    """Its probability in the engine that sampled it."""


Decode = Callable[[Sequence[int]], str]
"""A function from ids to text."""


def kept_shares(
    batch: LossBatch,
    method: Method | None,
    rules: Mapping[str, Method | ClipRule | str] = RULES,
) -> tuple[Tokens, dict[str, Tensor]]:
    """Compute the share of each token's gradient that the run's method and others keep.

    Args:
        batch: A recorded loss.
        method: The run's method; ``FixedClip(0.2)`` where it is not known.
        rules: The other rules and methods, by name.

    Returns:
        The tokens as the run's method sees them, and for each name the shares, (batch, time).
    """
    run_method = method or Method(FixedClip())
    tensors = as_batch(batch)
    methods = {RUN: run_method}
    for name, rule in rules.items():
        methods[name] = tried_at(run_method.level, rule)
    views = {name: other.tokens(tensors) for name, other in methods.items()}
    shares = {name: other.weight(views[name]) / views[name].ratio for name, other in methods.items()}
    return views[RUN], shares


class BlockedTokens:
    """Collects the tokens whose dropped gradient was largest, of those whose ids are recorded.

    A token counts once, at the loss that dropped most of it.

    Args:
        method: The run's method, where the record does not name it.
        rules: The other rules that are tried, by name.
        count: How many tokens are kept.
    """

    def __init__(
        self,
        method: Method | None = None,
        rules: Mapping[str, Method | ClipRule | str] = RULES,
        count: int = SHOWN,
    ):
        self._recorded_method = RecordedMethod(method)
        self._rules = rules
        self._count = count
        self._tokens: dict[object, BlockedToken] = {}

    def add(self, batch: LossBatch) -> None:
        """Take one loss batch."""
        if batch.token is None or not batch.has_logp:
            return
        tokens, shares = kept_shares(batch, self._recorded_method.of(batch), self._rules)
        dropped = 1 - shares[RUN].clamp(0, 1)
        cost = tokens.ratio * tokens.advantages.abs() * dropped * tokens.mask
        p = tokens.logp_old.exp()

        largest = cost.flatten().topk(min(self._count, cost.numel())).indices.tolist()
        for index in largest:
            row, column = divmod(index, cost.shape[1])
            answer = batch.token[row][batch.mask[row]].tolist()
            token = BlockedToken(
                cost=float(cost[row, column]),
                step=batch.step,
                answer=answer,
                at=column,
                p=float(p[row, column]),
                ratio=float(tokens.ratio[row, column]),
                advantage=float(tokens.advantages[row, column]),
                kept={name: float(share[row, column]) for name, share in shares.items()},
            )
            key = (*answer, column, token.p)
            if token.cost > (self._tokens[key].cost if key in self._tokens else 0.0):
                self._tokens[key] = token
        costliest = heapq.nlargest(self._count, self._tokens.items(), key=lambda item: item[1].cost)
        self._tokens = dict(costliest)

    def result(self) -> list[BlockedToken]:
        """Return the tokens, the costliest first."""
        return [*self._tokens.values()]


class DisagreeingTokens:
    """Collects the tokens on which engine and trainer are farthest apart, of those whose ids are recorded.

    Args:
        count: How many tokens are kept.
    """

    def __init__(self, count: int = SHOWN):
        self._count = count
        self._tokens: dict[object, DisagreeingToken] = {}

    def add(self, batch: LossBatch) -> None:
        """Take one loss batch."""
        if batch.token is None or batch.logp_rollout is None:
            return
        engine = np.where(batch.mask, batch.logp_rollout, np.nan)
        trainer = batch.logp_old
        # Where the old log-probabilities are the engine's, those of the policy in training are compared.
        if np.array_equal(engine[batch.mask], trainer[batch.mask], equal_nan=True):
            if not batch.has_logp or batch.update:
                return
            trainer = batch.logp
        distance = np.nan_to_num(trainer - engine)
        farthest = np.argsort(-np.abs(distance), axis=None)[: self._count]
        for index in farthest.tolist():
            row, column = divmod(index, distance.shape[1])
            if abs(distance[row, column]) < DISAGREEMENT:
                break
            token = DisagreeingToken(
                distance=float(distance[row, column]),
                step=batch.step,
                answer=batch.token[row][batch.mask[row]].tolist(),
                at=int(batch.mask[row, :column].sum()),
                p=float(np.exp(trainer[row, column])),
                p_engine=float(np.exp(engine[row, column])),
            )
            self._tokens.setdefault((*token.answer, token.at, token.p, token.p_engine), token)
        farthest_of_all = heapq.nlargest(
            self._count, self._tokens.items(), key=lambda item: abs(item[1].distance)
        )
        self._tokens = dict(farthest_of_all)

    def result(self) -> list[DisagreeingToken]:
        """Return the tokens, the farthest apart first."""
        return [*self._tokens.values()]


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
        # `bandpo train` saves the final model there. Of other folders of this name nothing says whose they are.
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


def in_context(token: BlockedToken | DisagreeingToken, decode: Decode) -> tuple[str, str, str]:
    """Return the text before a token in its answer, its own, and the text after it."""
    before = token.answer[max(0, token.at - CONTEXT) : token.at]
    after = token.answer[token.at + 1 :][:CONTEXT]
    return decode(before), decode([token.answer[token.at]]), decode(after)


def format_tokens(tokens: Sequence[BlockedToken], decode: Decode) -> str:
    """Return the tokens as text for a terminal, the blocked one in ⟦ ⟧; control characters in them are escaped."""
    if not tokens:
        return "no token whose id is recorded"
    lines = []
    for number, token in enumerate(tokens, 1):
        before, word, after = map(printable, in_context(token, decode))
        lines.append(f"{number:2d}. {before} ⟦{word}⟧ {after}")
        kept = ", ".join(f"{name} {share:.0%}" for name, share in token.kept.items())
        step = "" if token.step is None else f"step {token.step}: "
        figures = f"p {token.p:.2g}, ratio {token.ratio:.3g}, A {token.advantage:+.3g}"
        lines.append(printable(f"    {step}{figures}; gradient kept by {kept}"))
    return "\n".join(lines)


def format_disagreeing_tokens(tokens: Sequence[DisagreeingToken], decode: Decode) -> str:
    """Return the tokens as text for a terminal, each in ⟦ ⟧; control characters in them are escaped."""
    if not tokens:
        return f"no token whose id and engine are recorded is {DISAGREEMENT} nats apart"
    lines = []
    for number, token in enumerate(tokens, 1):
        before, word, after = map(printable, in_context(token, decode))
        lines.append(f"{number:2d}. {before} ⟦{word}⟧ {after}")
        step = "" if token.step is None else f"step {token.step}: "
        figures = f"p {token.p:.2g} in the trainer, {token.p_engine:.2g} in the engine"
        lines.append(f"    {step}{figures} ({token.distance:+.3g} nats)")
    return "\n".join(lines)
