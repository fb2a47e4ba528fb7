"""What `bandpo audit` says of a record: the effect of each rule on rare winners, in words and in figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bandpo._terminal import printable
from bandpo.audit.metrics import COUNTERFACTUALS
from bandpo.core.errors import InvalidValue
from bandpo.core.methods import Method
from bandpo.core.rules import ClipRule
from bandpo.core.text import as_method
from bandpo.replay.blocked_tokens import (
    BlockedToken,
    BlockedTokens,
    Decode,
    DisagreeingToken,
    apply_rules,
    decode_to_numbers,
    decoder,
    in_context,
    tokenizer_file,
)
from bandpo.replay.kinds import KindRow, KindSums
from bandpo.replay.opening import anchor_line, kind_lines
from bandpo.replay.record import RUN, RecordedMethod, Replay, ReplayCollector, no_losses
from rlvet.records import LossBatch, RecordedRun
from rlvet.runs.effect import Effect, matter_line

NO_IDS = "the record has no token ids, so which tokens a rule drops is not known"
NO_TOKENIZER = (
    "tokens are shown as ids, as there is no tokenizer.json in the record's folder or its run's; name one by "
    "--tokenizer"
)


class Words:
    """A collector of the tokens whose gradient rules drop, among those whose ids are recorded.

    Args:
        method: The run's method, if the record does not name it.
        rules: The other rules, by name.
        decode: A function that decodes token ids; None if there is no tokenizer.
    """

    def __init__(
        self, method: Method | None, rules: Mapping[str, Method | ClipRule | str], decode: Decode | None
    ):
        self._recorded_method = RecordedMethod(method)
        self._rules = {name: as_method(rule) for name, rule in rules.items()}
        self._kinds = KindSums(decode)
        self._blocked = {name: BlockedTokens(method, by=name) for name in (RUN, *list(self._rules)[:1])}
        self.has_ids = False
        """True if a loss with ids was added."""

    def add(self, batch: LossBatch) -> None:
        """Add one loss batch."""
        if batch.token is None or not batch.has_logp:
            return
        self.has_ids = True
        method = self._recorded_method.of(batch)
        applied = apply_rules(batch, method, self._rules)
        if method is None and self._rules:
            del applied[RUN]
        self._kinds.add(batch, applied)
        for name in self._blocked.keys() & applied.keys():
            self._blocked[name].add_applied(batch, applied)

    @property
    def kinds(self) -> list[KindRow]:
        """The rare winners by kind."""
        return self._kinds.rows()

    @property
    def largest(self) -> tuple[str, list[BlockedToken]]:
        """The name of a rule, and the tokens of which it drops most.

        The rule is the run's, or the first other one if the run's drops nothing.
        """
        for name, blocked in self._blocked.items():
            if blocked.result():
                return name, blocked.result()
        return RUN, []


@dataclass(frozen=True)
class RecordAudit:
    """The audit of a record."""

    replay: Replay
    """The audit of each method."""
    effect: Effect
    """What each method drops of the gradient on rare winners."""
    kinds: Sequence[KindRow]
    """The rare winners by kind; empty without ids."""
    rule: str
    """The name of the rule that drops the gradient of `tokens`."""
    tokens: Sequence[BlockedToken]
    """The tokens of which the rule drops most; empty without ids."""
    decode: Decode
    """A function that decodes token ids."""
    note: str
    """A sentence on missing ids, or on ids that cannot be decoded; empty otherwise."""

    @classmethod
    def of(cls, replay: Replay, words: Words, decode: Decode | None, note: str) -> RecordAudit:
        """Return the audit from what was collected of a record.

        Args:
            replay: The audit of each method.
            words: The tokens whose gradient rules drop.
            decode: The function that decodes token ids; None if there is no tokenizer.
            note: The reason why there is no tokenizer.
        """
        rule, tokens = words.largest
        return cls(
            replay,
            Effect.from_replay(replay.metrics()),
            words.kinds,
            rule,
            tokens,
            decode or decode_to_numbers,
            note if words.has_ids else NO_IDS,
        )

    @property
    def verb(self) -> str:
        """The rule that drops the gradient of `tokens`, with its verb."""
        return (
            f"{self.rule} dropped"
            if self.rule in (RUN, self.replay.main_method)
            else f"{self.rule} would have dropped"
        )

    @property
    def lines(self) -> list[str]:
        """What the audit opens with, as sentences: another fault than the clip first, then the effect and the kinds."""
        ages = self.replay.ages
        # Another anchor, or another fault than old data, would explain the figures.
        lines = [anchor_line(self.replay.anchor), ages.mismatch, ages.unknown_line]
        lines += [*self.effect.lines, matter_line(self.replay.metrics())]
        lines += [*kind_lines(self.kinds, self.effect), self.note]
        return [line for line in lines if line]

    @property
    def opening(self) -> list[str]:
        """The same sentences for a report, which shows the first one large: the effect first."""
        effect = self.effect.lines
        return [*effect, *(line for line in self.lines if line not in effect)]

    def as_json(self) -> dict[str, Any]:
        """Return the audit for JSON: the sentences, the metrics of each method, the kinds and the tokens in context.

        The texts of tokens are those of `bandpo._terminal.printable`.
        """
        return {
            "lines": self.lines,
            "methods": self.replay.metrics(),
            "kinds": [row._asdict() for row in self.kinds],
            "rule": self.rule,
            "tokens": shown_tokens(self.tokens, self.decode),
        }


def shown_tokens(
    tokens: Sequence[BlockedToken] | Sequence[DisagreeingToken], decode: Decode
) -> list[dict[str, Any]]:
    """Return tokens for JSON: their figures, and the text of each with its context, in place of all ids of its answer.

    Control characters and invisible ones in the text are escaped.
    """
    shown: list[dict[str, Any]] = []
    for token in tokens:
        figures = token._asdict()
        del figures["answer"], figures["at"]
        figures["text"] = [printable(part) for part in in_context(token, decode)]
        shown.append(figures)
    return shown


def audit_record(
    run: RecordedRun,
    methods: Mapping[str, Method | ClipRule | str] = COUNTERFACTUALS,
    *,
    method: Method | ClipRule | str | None = None,
    tokenizer: str | None = None,
) -> RecordAudit:
    """Audit the tokens of a record under the run's own method, if it is known, and under others.

    Args:
        run: The record.
        methods: Rules and methods to audit, by name, as for `bandpo.replay.record.replay_record`.
        method: The run's own method, if the record does not name it.
        tokenizer: The tokenizer for recorded ids, as for `bandpo.replay.blocked_tokens.decoder`.

    Raises:
        ValueError: as by `bandpo.replay.record.replay_record`, or if the named tokenizer cannot be read.
    """
    run_method = None if method is None else as_method(method)
    decode, note = decoder_and_note(run, tokenizer)
    collector = ReplayCollector(methods, run_method)
    words = Words(run_method, methods, decode)
    run.scan([collector, words])
    replay = collector.result()
    if replay is None:
        raise no_losses(run.path)
    return RecordAudit.of(replay, words, decode, note)


def decoder_and_note(run: RecordedRun, tokenizer: str | None) -> tuple[Decode | None, str]:
    """Return the function that decodes a run's ids, None if there is none, and the reason for that."""
    path = run.record or run.path
    if tokenizer is not None:
        return decoder(path, tokenizer), ""
    if tokenizer_file(path) is None:
        return None, NO_TOKENIZER
    # The run's own tokenizer is optional: without it, the figures are the same.
    try:
        return decoder(path), ""
    except InvalidValue as error:
        return None, f"tokens are shown as ids: {error}"
    except ModuleNotFoundError:
        return None, "tokens are shown as ids: install tokenizers to decode them"
