"""What rlvet finds by the entry points ``rlvet.readers`` and ``rlvet.collectors``."""

from __future__ import annotations

import io
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bandpo.core.errors import BandpoError
from bandpo.core.methods import Method
from bandpo.core.rules import ClipRule
from bandpo.core.text import as_method, importable_current_folder
from bandpo.replay.blocked_tokens import (
    BlockedTokens,
    DisagreeingTokens,
    decoder,
    format_disagreeing_tokens,
    format_tokens,
)
from bandpo.replay.record import ReplayCollector, method_of
from bandpo.replay.token_figures import TokenAnalysis, TokenFigures
from rlvet.errors import InvalidValue
from rlvet.records import RecordedRun
from rlvet.runs import Run


@contextmanager
def _as_rlvets_errors() -> Generator[None]:
    """Raise bandpo's errors as rlvet's, which its commands print in one line."""
    try:
        yield
    except BandpoError as error:
        raise InvalidValue(str(error)) from error


def _read_method(text: Method | ClipRule | str | None) -> Method | None:
    """Return the method or clip rule of an option's text, which may name a class of a module in the current folder."""
    if text is None:
        return None
    with _as_rlvets_errors(), importable_current_folder():
        return as_method(text)


def read_tensors(source: Path | bytes) -> Any:
    """Load a file of torch, or its bytes, without unpickling other classes than tensors."""
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    return torch.load(file, map_location="cpu", weights_only=True)


def check_method(method: Method | ClipRule | str, run: Run | RecordedRun) -> None:
    """Check the method that a user names for a run, first its text, and then with the files of the run.

    Args:
        method: The method, or its text.
        run: The run.

    Raises:
        ValueError: if the text cannot be read, or if the files name another method.
    """
    read = _read_method(method)
    with _as_rlvets_errors():
        method_of(run.setup, read, location=run.title)


def replay(method: str | None = None) -> ReplayCollector:
    """Return a collector that replays a record under the run's method and others.

    Args:
        method: The text of the run's method, if the record does not name it.
    """
    return ReplayCollector(method=_read_method(method))


class Words:
    """A collector of the tokens whose gradient is blocked, and of those on which engine and trainer disagree.

    Args:
        method: The text of the run's method, if the record does not name it.
        tokenizer: The tokenizer for recorded ids, as for `bandpo.replay.blocked_tokens.decoder`.
    """

    def __init__(self, method: str | None = None, tokenizer: str | None = None):
        self._tokenizer = tokenizer
        self._blocked = BlockedTokens(_read_method(method))
        self._disagreeing = DisagreeingTokens()

    def add(self, batch: Any) -> None:
        """Add one loss batch."""
        with _as_rlvets_errors():
            self._blocked.add(batch)
            self._disagreeing.add(batch)

    def text(self, path: Path) -> str:
        """Return both lists of tokens as text.

        Args:
            path: The run, in whose folder the tokenizer may be.
        """
        with _as_rlvets_errors():
            decode = decoder(path, self._tokenizer)
        stale = ", or the policy has moved since sampling" if self._disagreeing.may_be_stale else ""
        return (
            f"blocked, the largest gradient first:\n{format_tokens(self._blocked.result(), decode)}\n"
            f"\nengine and trainer disagree{stale}, the farthest apart first:\n"
            f"{format_disagreeing_tokens(self._disagreeing.result(), decode)}"
        )


class ReportedTokens(TokenAnalysis):
    """An analysis of recorded tokens whose errors are rlvet's."""

    def analyze(self, run: RecordedRun) -> TokenFigures:
        """Return the figures of the tokens of a run."""
        with _as_rlvets_errors():
            return super().analyze(run)


def token_figures(
    methods: Mapping[str, Method | ClipRule | str], method: str | None = None, tokenizer: str | None = None
) -> TokenAnalysis:
    """Return the analysis of recorded tokens for a report.

    Args:
        methods: The texts of rules and methods to apply, or objects of bandpo, by name.
        method: The text of the runs' method, used if their files name none.
        tokenizer: The tokenizer for recorded ids.
    """
    with _as_rlvets_errors(), importable_current_folder():
        return ReportedTokens(methods, method, tokenizer)
