"""Listings of single tokens: those that a rule blocked, and those on which engine and trainer disagree."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bandpo._terminal import printable
from bandpo.audit.metrics import gradient_size, method_at_level
from bandpo.core.errors import InvalidValue
from bandpo.core.methods import Method
from bandpo.core.rules import ClipRule, FixedClip
from bandpo.replay.record import RUN, RecordedMethod, as_batch
from rlvet.records import LossBatch
from rlvet.records.record import record_files

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo.core.batch import Tokens

RULES: Mapping[str, Method | ClipRule | str] = {
    "clip 0.2": "FixedClip(0.2)",
    "Clip-Higher": "FixedClip(0.2, 0.28)",
    "no clip": "Unclipped()",
    "Band": "Band()",
    "Band above": "BandAbove()",
}
"""The rules that are compared with the run's own."""

LEAST_SHARE = 0.005
"""The smallest share of a token's gradient of which it is said that a rule drops it."""

DEFAULT_COUNT = 10
"""Number of tokens that are listed."""

CONTEXT = 8
"""Number of tokens of the answer that are shown on either side of a listed one."""

LONGEST_TEXT = 80
"""Largest number of characters that are shown of a token, and of its context on either side."""

DISAGREEMENT = 0.1
"""Smallest distance (nats) between engine and trainer at a listed token. Rounding in bfloat16 gives a fifth of it on
average."""

RUN_FILES = ("metrics.jsonl", "trainer_state.json", "config.yaml")
"""Files that identify a folder as that of a run."""


class BlockedToken(NamedTuple):
    """A token with a gradient that a rule dropped, wholly or in part."""

    cost: float
    """The size of the dropped gradient: r·abs(A) times the share that the rule drops."""
    step: int | None
    """The trainer's step."""
    answer: Sequence[int]
    """Ids of the counted tokens of its answer."""
    at: int
    """Its index in the answer."""
    p: float
    """Its old probability."""
    ratio: float
    """The ratio of the policy in training to the old one."""
    advantage: float
    """Its advantage."""
    kept: Mapping[str, float]
    """The share of its gradient that each rule keeps, the run's first; 0 for a blocked token. The report reads this
    key."""


class DisagreeingToken(NamedTuple):
    """A token with different probabilities in engine and trainer."""

    distance: float
    """The trainer's log-probability minus the engine's (nats)."""
    step: int | None
    """The trainer's step."""
    answer: Sequence[int]
    """Ids of the counted tokens of its answer."""
    at: int
    """Its index in the answer."""
    p: float
    """Its probability in the trainer, before any update on its batch."""
    p_engine: float
    """Its probability in the engine that sampled it."""


Decode = Callable[[Sequence[int]], str]
"""A function that decodes token ids to text."""


class Applied(NamedTuple):
    """What a method does to the tokens of a loss."""

    tokens: Tokens
    """The tokens with the method."""
    kept: Tensor
    """The share of each token's gradient that the method keeps, (batch, time)."""
    size: Tensor
    """The size of each token's gradient without a clip, (batch, time)."""


def apply_rules(
    batch: LossBatch,
    method: Method | None,
    rules: Mapping[str, Method | ClipRule | str] = RULES,
) -> dict[str, Applied]:
    """Apply the run's method and other rules to the tokens of a loss.

    Args:
        batch: A recorded loss.
        method: The run's method; ``FixedClip(0.2)`` if it is not known.
        rules: The other rules and methods, by name.

    Returns:
        What each does, by name, the run's method first.
    """
    run_method = method or Method(FixedClip())
    tensors = as_batch(batch)
    methods = {RUN: run_method}
    for name, rule in rules.items():
        methods[name] = method_at_level(run_method.level, rule)
    applied: dict[str, Applied] = {}
    for name, tried in methods.items():
        tokens = tried.tokens(tensors)
        applied[name] = Applied(tokens, tried.weight(tokens) / tokens.ratio, gradient_size(tokens, tensors))
    return applied


class BlockedTokens:
    """A collector of the tokens with the largest dropped gradients, among those whose ids are recorded.

    A token counts once, at the loss that dropped most of its gradient.

    Args:
        method: The run's method, if the record does not name it.
        rules: The other rules, by name.
        count: The number of tokens that are collected.
        by: The name of the rule that drops the gradients.
        kept_by: The name of another rule: what it drops too is not counted, in losses to which it was applied.
    """

    def __init__(
        self,
        method: Method | None = None,
        rules: Mapping[str, Method | ClipRule | str] = RULES,
        count: int = DEFAULT_COUNT,
        by: str = RUN,
        kept_by: str | None = None,
    ):
        self._recorded_method = RecordedMethod(method)
        self._rules = rules
        self._count = count
        self._by = by
        self._kept_by = kept_by
        self._tokens: dict[object, BlockedToken] = {}
        self.total = 0
        """The number of tokens of which the rule drops a share that is not below `LEAST_SHARE`, once for each update
        that uses them."""
        self.total_with_others = 0
        """The same with those that the other rule drops too."""

    def add(self, batch: LossBatch) -> None:
        """Add the tokens of one loss."""
        if batch.token is None or not batch.has_logp:
            return
        self.add_applied(batch, apply_rules(batch, self._recorded_method.of(batch), self._rules))

    def add_applied(self, batch: LossBatch, applied: Mapping[str, Applied]) -> None:
        """Add the tokens of one loss, which has ids, with what each rule does to them."""
        assert batch.token is not None
        tokens = applied[self._by].tokens
        shares = {name: rule.kept for name, rule in applied.items()}
        size = tokens.ratio * tokens.advantages.abs() * tokens.mask
        kept_else = shares[self._kept_by].clamp(0, 1) if self._kept_by in shares else 1
        kept = shares[self._by].clamp(0, 1)
        dropped = (kept_else - kept).clamp(min=0)
        cost = size * dropped
        p = tokens.logp_old.exp()
        self.total += int(((dropped >= LEAST_SHARE) & (cost > 0)).sum())
        self.total_with_others += int(((1 - kept >= LEAST_SHARE) & (size > 0)).sum())

        largest = cost.flatten().topk(min(self._count, cost.numel())).indices.tolist()
        for index in largest:
            row, column = divmod(index, cost.shape[1])
            answer = batch.token[row][batch.mask[row]].tolist()
            token = BlockedToken(
                cost=float(cost[row, column]),
                step=batch.step,
                answer=answer,
                at=int(batch.mask[row, :column].sum()),
                p=float(p[row, column]),
                ratio=float(tokens.ratio[row, column]),
                advantage=float(tokens.advantages[row, column]),
                kept={name: float(share[row, column]) for name, share in shares.items()},
            )
            key = (*answer, token.at, token.p)
            highest_cost = self._tokens[key].cost if key in self._tokens else 0.0
            if token.cost > highest_cost:
                self._tokens[key] = token
        costliest = heapq.nlargest(self._count, self._tokens.items(), key=lambda item: item[1].cost)
        self._tokens = dict(costliest)

    def result(self) -> list[BlockedToken]:
        """Return the tokens, those with the largest dropped gradient first."""
        return [*self._tokens.values()]


class DisagreeingTokens:
    """A collector of the tokens on which engine and trainer disagree most, among those whose ids are recorded.

    If the old log-probabilities are the engine's own, only tokens of age 0 are compared where ages are recorded: with
    others, the policy has moved since sampling.

    Args:
        count: The number of tokens that are collected.
    """

    def __init__(self, count: int = DEFAULT_COUNT):
        self._count = count
        self._tokens: dict[object, DisagreeingToken] = {}
        self.may_be_stale = False
        """True if a policy was compared with the engine's that may have moved since sampling, as no age is recorded."""

    def add(self, batch: LossBatch) -> None:
        """Add the tokens of one loss."""
        if batch.token is None or batch.logp_rollout is None:
            return
        engine = np.where(batch.mask, batch.logp_rollout, np.nan)
        trainer = batch.logp_old
        # If the old log-probabilities are the engine's, those of the policy in training are compared, as long as no
        # update was made on the batch.
        if np.array_equal(engine[batch.mask], trainer[batch.mask], equal_nan=True):
            if not batch.has_logp or batch.update:
                return
            trainer = batch.logp
            if batch.lag is None:
                self.may_be_stale = True
            else:
                engine = np.where(batch.lag == 0, engine, np.nan)
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
        """Return the tokens, those with the largest disagreement first."""
        return [*self._tokens.values()]


def decoder(run: Path, tokenizer: str | None = None) -> Decode:
    """Return a function that decodes token ids: with the named tokenizer, else the run's own, else to numbers.

    The run's own tokenizer is looked for by `tokenizer_file`. No code that a run's files name is imported or called.

    Args:
        run: The record, a folder or a file.
        tokenizer: The tokenizer to use: a folder, or a name on the Hugging Face hub.

    Raises:
        ValueError: if the tokenizer cannot be read.
    """
    if tokenizer is not None and not (Path(tokenizer) / "tokenizer.json").is_file():
        return _of_transformers(tokenizer)
    file = tokenizer_file(run) if tokenizer is None else Path(tokenizer) / "tokenizer.json"
    if file is None:
        return decode_to_numbers
    from tokenizers import Tokenizer

    # Only tokenizer.json is read. AutoTokenizer would also read the settings next to it, which may name code to run.
    try:
        decode = Tokenizer.from_file(str(file)).decode
    except Exception as error:  # tokenizers raises no narrower class
        raise InvalidValue(
            f"{file} cannot be read ({error}); name another tokenizer by --tokenizer"
        ) from error
    return lambda ids: decode(list(ids), skip_special_tokens=False)


def decode_to_numbers(ids: Sequence[int]) -> str:
    """Return token ids as numbers, for records without a tokenizer."""
    return " ".join(map(str, ids))


def _of_transformers(name: str) -> Decode:
    """Load a tokenizer from the hub, or from a folder without tokenizer.json, and return its decode function."""
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise InvalidValue(
            f"--tokenizer {name}: there is no such folder; pass an existing folder, or a name on the hub"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False).decode
    except (OSError, ValueError) as error:
        raise InvalidValue(f"--tokenizer {name} cannot be loaded: {error}") from error


def tokenizer_file(run: Path) -> Path | None:
    """Return the tokenizer.json of the run that wrote a record; None if it has none.

    The record's folder is searched first, then its parent if that is the run's folder. In each, the folder itself comes
    first, then its checkpoints, the newest first. Sibling folders are not searched, because they may belong to other
    runs with other tokenizers.

    Args:
        run: The record, a folder or a file.
    """
    record = (run if run.is_dir() else run.parent).resolve()
    parent = record.parent
    run_folders = [record]
    if not _is_run(record) and not _has_other_runs(parent, record):
        run_folders.append(parent)
    for run_folder in run_folders:
        folders = [run_folder, *sorted(run_folder.glob("checkpoint-*"), key=_checkpoint_step, reverse=True)]
        # `bandpo-lab train` saves the final model there. A folder of this name elsewhere may belong to another run.
        if _is_run(run_folder):
            folders.append(run_folder / "model")
        for folder in folders:
            file = folder / "tokenizer.json"
            if file.is_file():
                return file
    return None


def _is_run(folder: Path) -> bool:
    """Check whether a folder is that of a run, by the files in it."""
    return any((folder / name).is_file() for name in RUN_FILES)


def _has_other_runs(folder: Path, record: Path) -> bool:
    """Check whether a folder contains runs or records other than ``record``. Its files then belong to no single run."""
    try:
        for subfolder in folder.iterdir():
            if not subfolder.is_dir() or subfolder == record or subfolder.name.startswith("checkpoint-"):
                continue
            if _is_run(subfolder) or record_files(subfolder):
                return True
    except OSError:  # a folder that cannot be read may be a run
        return True
    return False


def _checkpoint_step(folder: Path) -> int:
    """Return the step in a checkpoint's name; −1 if it has none."""
    tail = folder.name.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else -1


def in_context(token: BlockedToken | DisagreeingToken, decode: Decode) -> tuple[str, str, str]:
    """Return the text before a token in its answer, the token's text, and the text after it.

    A text of more than `LONGEST_TEXT` characters is cut off at the end that is farther from the token.
    """
    before = decode(token.answer[max(0, token.at - CONTEXT) : token.at])
    after = decode(token.answer[token.at + 1 :][:CONTEXT])
    word = decode([token.answer[token.at]])
    if len(before) > LONGEST_TEXT:
        before = "…" + before[-LONGEST_TEXT:]
    return before, _first_characters(word), _first_characters(after)


def _first_characters(text: str) -> str:
    """Return a text, cut off after `LONGEST_TEXT` characters."""
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "…"


def format_tokens(tokens: Sequence[BlockedToken], decode: Decode) -> str:
    """Return the tokens in context as text for a terminal, each in ⟦ ⟧; control characters are escaped."""
    if not tokens:
        return "no token whose id is recorded"
    lines = []
    for number, token in enumerate(tokens, 1):
        before, word, after = map(printable, in_context(token, decode))
        lines.append(f"{number:2d}. {before} ⟦{word}⟧ {after}")
        shares = ", ".join(f"{name} {share:.0%}" for name, share in token.kept.items())
        step = "" if token.step is None else f"step {token.step}: "
        figures = f"p {token.p:.2g}, ratio {token.ratio:.3g}, A {token.advantage:+.3g}"
        lines.append(printable(f"    {step}{figures}; gradient kept by {shares}"))
    return "\n".join(lines)


def format_disagreeing_tokens(tokens: Sequence[DisagreeingToken], decode: Decode) -> str:
    """Return the tokens in context as text for a terminal, each in ⟦ ⟧; control characters are escaped."""
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
