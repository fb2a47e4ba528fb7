"""Figures of a report on recorded tokens: how rules treat them step by step, and those that were blocked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bandpo.audit.blocked_tokens import (
    RULES,
    BlockedTokens,
    DisagreeingTokens,
    decoder,
    in_context,
    kept_shares,
)
from bandpo.audit.replay import RUN, RecordedMethod, ReplayCollector, method_of, no_losses
from bandpo.doctor.diagnosis import Diagnosis, diagnose_record
from bandpo.doctor.first_pass import FirstPass
from bandpo.doctor.recorded_advantages import AdvantageCollector
from bandpo.methods import Method
from bandpo.rule_check import check
from bandpo.rules import ClipRule
from bandpo.runs import LossBatch, Run
from bandpo.runs.quantities import Row
from bandpo.runs.run import TolerantCollector
from bandpo.text import as_method

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 12_000
"""Tokens of a record that a page holds, about 1 MB: those that moved farthest in each step."""

LEAST_PER_STEP = 20
"""Tokens of each step that a page holds at least."""

GRID = torch.logspace(-6, 0, 121, dtype=torch.float64).clamp(max=1 - 1e-9)
"""Old probabilities at which rules are drawn."""


class MovedTokens:
    """Collects the tokens that moved farthest in each step, and the share of their gradient that each rule keeps.

    Args:
        method: The run's method, where the record does not name it.
        rules: The rules that are tried, by name.
    """

    def __init__(self, method: Method | None, rules: Mapping[str, Method]):
        self._recorded_method = RecordedMethod(method)
        self._rules = rules
        self._columns = [RUN, *rules]
        self._tokens: defaultdict[int, Tensor] = defaultdict(lambda: torch.zeros(0, 3 + len(self._columns)))
        self._number = 0

    def add(self, batch: LossBatch) -> None:
        """Take one loss batch."""
        self._number += 1
        step = self._number if batch.step is None else batch.step
        if not batch.has_logp:
            return
        tokens, shares = kept_shares(batch, self._recorded_method.of(batch), self._rules)
        columns = [tokens.logp_anchor.exp(), tokens.log_ratio_anchor.exp(), tokens.advantages]
        columns += [shares[name] for name in self._columns]
        moved = (tokens.mask * tokens.advantages * tokens.log_ratio != 0).expand_as(tokens.logp_old)
        rows = torch.stack([column.expand_as(moved)[moved] for column in columns], 1)
        rows = torch.cat([self._tokens[step], rows])
        self._tokens[step] = _farthest(rows, self._per_step)

    def result(self) -> dict[int, list[list[float]]]:
        """Return for each step its tokens: anchor probability, ratio, advantage, and the share that each rule keeps."""
        return {step: _farthest(rows, self._per_step).tolist() for step, rows in self._tokens.items()}

    @property
    def _per_step(self) -> int:
        """Number of tokens of each step that a page with the steps so far would hold."""
        return max(LEAST_PER_STEP, SHOWN // max(1, len(self._tokens)))


def _farthest(rows: Tensor, count: int) -> Tensor:
    """Return the rows whose ratio is farthest from 1."""
    return rows[rows[:, 1].log().abs().topk(min(count, len(rows))).indices]


@dataclass
class Gathered:
    """Figures of a report on one record."""

    diagnosis: Diagnosis
    method: str
    """The text of the run's method; empty if it is not known."""
    rows: Sequence[Row] = ()
    """The audit of each step."""
    data: dict[str, Any] = field(default_factory=dict)
    """Rules, tokens and blocked tokens, as the page's scripts take them."""
    lacks: str = ""
    """Reason why there are no such figures; empty if there are."""


class Tokens:
    """Gathers what reports show of recorded tokens.

    Args:
        methods: Rules and methods to try, by name, beside those of `bandpo.audit.blocked_tokens.RULES`.
        method: The runs' own, where their records do not name it.
        tokenizer: What decodes recorded ids, as for `bandpo.audit.blocked_tokens.decoder`.

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
        """Old probabilities at which rules are drawn."""
        return GRID.tolist()

    def gather(self, run: Run) -> Gathered:
        """Read the record of a run once, and compute all that the page shows of it.

        Raises:
            ValueError: if the record cannot be read.
        """
        first_pass = FirstPass.collector()
        advantages = AdvantageCollector()
        replay = ReplayCollector(self._rules, self._method)
        moved = MovedTokens(self._method, self._rules)
        blocked = BlockedTokens(self._method, self._rules)
        disagreeing = DisagreeingTokens()
        judged = TolerantCollector([replay, moved, blocked])
        run.scan([first_pass, advantages, disagreeing, judged])

        replayed = replay.result()
        rows = [] if replayed is None else replayed.rows
        diagnosis = diagnose_record(first_pass.result(), advantages.result(), run.setup, rows)
        method = method_of(run.setup, self._method)
        gathered = Gathered(diagnosis, "" if method is None else str(method), rows)
        if judged.error is not None:
            gathered.lacks = str(judged.error)
        elif replayed is None:
            gathered.lacks = str(no_losses(run.path))
        else:
            gathered.data = self._data(run, list(replayed.by_step), method, moved, blocked, disagreeing)
        return gathered

    def _data(
        self,
        run: Run,
        names: Sequence[str],
        method: Method | None,
        moved: MovedTokens,
        blocked: BlockedTokens,
        disagreeing: DisagreeingTokens,
    ) -> dict[str, Any]:
        rules = {}
        for name in names:
            rule = self._rules.get(name, method)
            assert rule is not None
            rules[name] = {"method": str(rule), "limits": _limits(rule)}
        decode = decoder(run.record or run.path, self._tokenizer)
        words = [{**token._asdict(), "text": in_context(token, decode)} for token in blocked.result()]
        apart = [{**token._asdict(), "text": in_context(token, decode)} for token in disagreeing.result()]
        return {"rules": rules, "tokens": moved.result(), "words": words, "apart": apart}


def _limits(method: Method) -> Any:
    """Return a token's bounds at each p of `GRID`; None where they depend on more than p."""
    if (method.bound_level or method.level) != "token":
        return []
    try:
        bounds = method.clip.bounds(GRID.log())
    except ValueError:
        return None  # they depend on how far training has come
    return [ends.tolist() for ends in bounds]
