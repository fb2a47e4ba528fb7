"""All kinds of findings, causes before effects. The sections of docs/diagnose.md are made from these."""

from __future__ import annotations

from rlvet.checks.findings import Kind
from rlvet.checks.registry import LOGS
from rlvet.records.registry import ADVANTAGES, TOKENS

OF_LOGS: tuple[Kind, ...] = LOGS.kinds()
"""Kinds of findings that a log or a record can have."""

OF_RECORDS: tuple[Kind, ...] = tuple(
    kind for kind in dict.fromkeys((*ADVANTAGES.kinds(), *TOKENS.kinds())) if kind not in OF_LOGS
)
"""Kinds of findings that need a record of tokens."""

KINDS: tuple[Kind, ...] = (*OF_RECORDS, *OF_LOGS)
"""All kinds of findings."""
