"""What `bandpo audit` says of a record: the effect of each rule on rare winners, in words and in figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bandpo._terminal import printable
from bandpo.audit.metrics import COUNTERFACTUALS
from bandpo.core.errors import InvalidValue
from bandpo.core.methods import Method
from bandpo.core.rules import ClipRule
from bandpo.core.text import as_method
from bandpo.replay.blocked_tokens import (
    DEFAULT_COUNT,
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
from rlvet.runs.effect import STRICT, Effect, matter_line

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
        self._of_run = BlockedTokens(method)
        self._rule = next(iter(self._rules), RUN)
        self._of_rule = BlockedTokens(method, by=self._rule, kept_by=RUN)
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
        if RUN in applied:
            self._of_run.add_applied(batch, applied)
        if self._rule != RUN:
            self._of_rule.add_applied(batch, applied)

    @property
    def kinds(self) -> list[KindRow]:
        """The rare winners by kind."""
        return self._kinds.rows()

    @property
    def listed(self) -> ListedTokens:
        """The tokens of which the run dropped most, and those of which the first other rule drops what the run kept."""
        of_rule = self._of_rule.result()
        of_run = self._of_run.result()[: DEFAULT_COUNT - min(len(of_rule), DEFAULT_COUNT // 2)]
        places = {(*token.answer, token.at) for token in of_run}
        of_rule = [token for token in of_rule if (*token.answer, token.at) not in places]
        of_rule = of_rule[: DEFAULT_COUNT - len(of_run)]
        return ListedTokens(
            of_run,
            self._of_run.total,
            self._rule,
            of_rule,
            self._of_rule.total,
            self._of_rule.total_with_others,
        )


class ListedTokens(NamedTuple):
    """The tokens that an audit lists."""

    of_run: Sequence[BlockedToken]
    """The tokens of whose gradient the run dropped most."""
    run_total: int
    """The number of tokens whose gradient the run dropped, once for each update that uses them."""
    rule: str
    """The first of the rules that are compared with the run's."""
    of_rule: Sequence[BlockedToken]
    """Others, of whose gradient that rule would have dropped most of what the run kept."""
    rule_total: int
    """The number of tokens of whose gradient that rule would have dropped what the run kept, as above."""
    rule_total_with_others: int
    """The number of tokens whose gradient that rule would have dropped, whether the run did or not."""

    @property
    def title(self) -> str:
        """A phrase that says how the tokens were chosen, the run's first."""
        own = f"({len(self.of_run)} of {self.run_total:,})"
        in_all = f"; in all, {self.rule} would have dropped {self.rule_total_with_others:,}"
        others = f"({len(self.of_rule)} of {self.rule_total:,}{in_all if self.of_run else ''})"
        if not self.of_rule:
            chosen = f"{RUN} dropped most {own}"
        elif not self.of_run:
            chosen = f"{self.rule} would have dropped most {others}"
        else:
            chosen = f"{RUN} dropped most {own}, then those that {self.rule} would have dropped and {RUN} kept {others}"
        return (
            f"the tokens of whose gradient {chosen}, of either sign of A; equal answers of a batch, and several "
            "updates on it, share a row"
        )


@dataclass(frozen=True)
class RecordAudit:
    """The audit of a record."""

    replay: Replay
    """The audit of each method."""
    effect: Effect
    """What each method drops of the gradient on rare winners."""
    kinds: Sequence[KindRow]
    """The rare winners by kind; empty without ids."""
    listed: ListedTokens
    """The tokens of which rules drop most; empty without ids."""
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
        return cls(
            replay,
            Effect.from_replay(replay.metrics()),
            words.kinds,
            words.listed,
            decode or decode_to_numbers,
            note if words.has_ids else NO_IDS,
        )

    @property
    def tokens(self) -> list[BlockedToken]:
        """The listed tokens, the run's first."""
        return [*self.listed.of_run, *self.listed.of_rule]

    @property
    def lines(self) -> list[str]:
        """What the audit opens with, as sentences: another fault than the clip first, then the effect and the kinds."""
        ages = self.replay.ages
        # Another anchor, or another fault than old data, would explain the figures.
        lines = [anchor_line(self.replay.anchor), ages.mismatch]
        lines += [*self.effect.lines, matter_line(self.replay.metrics())]
        lines += [*kind_lines(self.kinds, self.effect), self.note, ages.unknown_line]
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
            "title": self.listed.title,
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
        methods: Rules and methods to audit, by name, as for `bandpo.replay.record.replay_record`. Clip 0.2 is audited
            too, by which it is judged whether a clip can matter.
        method: The run's own method, if the record does not name it.
        tokenizer: The tokenizer for recorded ids, as for `bandpo.replay.blocked_tokens.decoder`.

    Raises:
        ValueError: as by `bandpo.replay.record.replay_record`, or if the named tokenizer cannot be read, or if a method
            is given for a record that names another.
    """
    run_method = None if method is None else as_method(method)
    methods = _with_strict(methods)
    decode, note = decoder_and_note(run, tokenizer)
    collector = ReplayCollector(methods, run_method)
    words = Words(run_method, methods, decode)
    run.scan([collector, words])
    replay = collector.result()
    if replay is None:
        raise no_losses(run.path)
    return RecordAudit.of(replay, words, decode, note)


def _with_strict(methods: Mapping[str, Method | ClipRule | str]) -> dict[str, Method | ClipRule | str]:
    """Return methods by name with clip 0.2 among them, under its own name."""
    clip = COUNTERFACTUALS[STRICT]
    named = {STRICT if as_method(rule) == as_method(clip) else name: rule for name, rule in methods.items()}
    return {**named, STRICT: clip}


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
