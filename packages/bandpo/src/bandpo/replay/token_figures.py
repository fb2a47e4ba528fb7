"""The figures of a report about recorded tokens: the effect of clip rules at each step, and the blocked tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bandpo.core.methods import Method
from bandpo.core.rule_check import check
from bandpo.core.rules import ClipRule
from bandpo.core.text import as_method
from bandpo.replay.blocked_tokens import RULES, DisagreeingTokens, apply_rules
from bandpo.replay.record import RUN, RecordedMethod, ReplayCollector, method_of, no_losses
from bandpo.replay.record_audit import RecordAudit, Words, decoder_and_note, shown_tokens
from rlvet.checks.diagnosis import Diagnosis
from rlvet.records import LossBatch, RecordedRun
from rlvet.records.diagnosis import diagnose_record
from rlvet.records.first_pass import FirstPass
from rlvet.records.recorded_advantages import AdvantageCollector
from rlvet.records.run import TolerantCollector
from rlvet.runs.quantities import Row

if TYPE_CHECKING:
    from torch import Tensor

MOST_TOKENS = 12_000
"""The number of a record's tokens in a page, about 1 MB."""

FEWEST_PER_STEP = 20
"""The smallest number of tokens of each step in a page."""

GRID = torch.logspace(-6, 0, 121, dtype=torch.float64).clamp(max=1 - 1e-9)
"""The old probabilities at which bounds are drawn."""


class MovedTokens:
    """A collector of the tokens with the largest ratios in each step, and of the share of their gradient per rule.

    Args:
        method: The run's method, if the record does not name it.
        rules: The clip rules that are applied to the tokens, by name.
    """

    def __init__(self, method: Method | None, rules: Mapping[str, Method]):
        self._recorded_method = RecordedMethod(method)
        self._rules = rules
        self._names = [RUN, *rules]
        self._tokens: defaultdict[int, Tensor] = defaultdict(lambda: torch.zeros(0, 3 + len(self._names)))
        """For each step, a tensor of shape (tokens, 3 + rules); for its columns see `result`."""
        self._number = 0

    def add(self, batch: LossBatch) -> None:
        """Add one loss batch."""
        self._number += 1
        step = self._number if batch.step is None else batch.step
        if not batch.has_logp:
            return
        applied = apply_rules(batch, self._recorded_method.of(batch), self._rules)
        tokens = applied[RUN].tokens
        columns = [tokens.logp_anchor.exp(), tokens.log_ratio_anchor.exp(), tokens.advantages]
        columns += [applied[name].kept for name in self._names]

        # Only tokens with a gradient whose ratio differs from 1.
        moved = (tokens.mask * tokens.advantages * tokens.log_ratio != 0).expand_as(tokens.logp_old)
        rows = torch.stack([column.expand_as(moved)[moved] for column in columns], 1)
        rows = torch.cat([self._tokens[step], rows])
        self._tokens[step] = _select_farthest(rows, self._per_step)

    def result(self) -> dict[int, list[list[float]]]:
        """Return the tokens of each step: anchor probability, ratio, advantage, and the share that each rule keeps."""
        return {step: _select_farthest(rows, self._per_step).tolist() for step, rows in self._tokens.items()}

    @property
    def _per_step(self) -> int:
        """The number of tokens of each step in a page with the steps so far."""
        return max(FEWEST_PER_STEP, MOST_TOKENS // max(1, len(self._tokens)))


def _select_farthest(rows: Tensor, count: int) -> Tensor:
    """Return the rows whose ratio, in column 1, is farthest from 1."""
    distance = rows[:, 1].log().abs()
    return rows[distance.topk(min(count, len(rows))).indices]


@dataclass
class TokenFigures:
    """The figures of a report about one record."""

    diagnosis: Diagnosis
    """The diagnosis of the tokens."""
    method: str
    """The text of the run's method; empty if it is not known."""
    rows: Sequence[Row] = ()
    """The audit of each step."""
    data: dict[str, Any] = field(default_factory=dict)
    """Rules, tokens and blocked tokens, in the form that the page's scripts read."""
    no_tokens: str = ""
    """The reason why ``rows`` or ``data`` are empty; an empty string if they are not."""


class TokenAnalysis:
    """The analysis of recorded tokens for reports.

    Args:
        methods: Rules and methods to apply, by name, beside those of `bandpo.replay.blocked_tokens.RULES`.
        method: The method of the runs, if their records do not name it.
        tokenizer: The tokenizer for recorded ids, as for `bandpo.replay.blocked_tokens.decoder`.

    Raises:
        ValueError: if a method cannot be read.
    """

    def __init__(
        self,
        methods: Mapping[str, Method | ClipRule | str],
        method: Method | ClipRule | str | None = None,
        tokenizer: str | None = None,
    ):
        self._rules = {name: as_method(rule) for name, rule in {**RULES, **methods}.items()}
        for rule in self._rules.values():
            check(rule)
        self._method = None if method is None else as_method(method)
        self._tokenizer = tokenizer

    @property
    def grid(self) -> list[float]:
        """The old probabilities at which bounds are drawn."""
        return GRID.tolist()

    def analyze(self, run: RecordedRun) -> TokenFigures:
        """Read the record of a run once, and compute all figures about it.

        Raises:
            ValueError: if the record cannot be read.
        """
        first_pass = FirstPass.collector()
        advantages = AdvantageCollector()
        replay = ReplayCollector(self._rules, self._method)
        moved = MovedTokens(self._method, self._rules)
        decode, note = decoder_and_note(run, self._tokenizer)
        words = Words(self._method, self._rules, decode)
        disagreeing = DisagreeingTokens()
        # Collectors that need the run's method, which may not be known.
        with_method = TolerantCollector([replay, moved, words])
        run.scan([first_pass, advantages, disagreeing, with_method])

        replay_result = replay.result()
        rows = [] if replay_result is None else replay_result.rows
        diagnosis = diagnose_record(first_pass.result(), advantages.result(), run.setup, rows)
        method = method_of(run.setup, self._method, location=run.path)
        figures = TokenFigures(diagnosis, "" if method is None else str(method), rows)
        if with_method.error is not None:
            figures.no_tokens = str(with_method.error)
        elif replay_result is None:
            figures.no_tokens = str(no_losses(run.path))
        else:
            audit = RecordAudit.of(replay_result, words, decode, note)
            figures.data = self._data(audit, method, moved, disagreeing)
        return figures

    def _data(
        self,
        audit: RecordAudit,
        method: Method | None,
        moved: MovedTokens,
        disagreeing: DisagreeingTokens,
    ) -> dict[str, Any]:
        """Return the rules and tokens in the form that the page's scripts read.

        Args:
            audit: The audit of the run's record.
            method: The run's own method.
            moved: The tokens with the largest ratios.
            disagreeing: The tokens on which engine and trainer disagree.
        """
        rules = {}
        for name in audit.replay.by_step:
            rule = self._rules.get(name, method)
            assert rule is not None
            rules[name] = {"method": str(rule), "limits": _limits(rule)}
        return {
            "rules": rules,
            "tokens": moved.result(),
            "opening": audit.opening,
            "kinds": [row._asdict() for row in audit.kinds],
            "words_title": audit.listed.title,
            "words": shown_tokens(audit.tokens, audit.decode),
            "disagreeing": shown_tokens(disagreeing.result(), audit.decode),
        }


def _limits(method: Method) -> Any:
    """Return the lower and upper bounds of a method at each p of `GRID`.

    The list is empty if the bounds are of sequences, and None if they depend on more than p.
    """
    if (method.bound_level or method.level) != "token":
        return []
    try:
        bounds = method.clip.bounds(GRID.log())
    except ValueError:
        return None  # a schedule, or a rule of the tokens of a batch
    return [side.tolist() for side in bounds]
