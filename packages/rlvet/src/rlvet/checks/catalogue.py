"""All kinds of findings, causes before effects. The tables of docs/rlvet/findings.md are made from these."""

from __future__ import annotations

from rlvet.checks.advantages.comparison import ADVANTAGES, GROUPING, REWARD_SIGN
from rlvet.checks.advantages.masks import MASK, MICRO_BATCH_LOST
from rlvet.checks.advantages.rewards import REWARD_NOISE
from rlvet.checks.advantages.signal import ADVANTAGE_SCALE
from rlvet.checks.findings import Kind
from rlvet.checks.log_kinds import OF_LOGS
from rlvet.checks.tokens.engine import PROMPT, RETOKENISED, ROUTING
from rlvet.checks.tokens.ratio import DROPOUT, PERMUTED, PRECISION, REFERENCE_AS_OLD, SHIFT
from rlvet.checks.tokens.sampling import EDITED_LOGITS, TEMPERATURE, TOP_P

OF_RECORDS: tuple[Kind, ...] = (
    MICRO_BATCH_LOST,
    MASK,
    ADVANTAGE_SCALE,
    REWARD_SIGN,
    ADVANTAGES,
    GROUPING,
    REWARD_NOISE,
    SHIFT,
    PERMUTED,
    REFERENCE_AS_OLD,
    PRECISION,
    DROPOUT,
    TEMPERATURE,
    TOP_P,
    EDITED_LOGITS,
    RETOKENISED,
    ROUTING,
    PROMPT,
)
"""Kinds of findings that need a record of tokens."""

KINDS: tuple[Kind, ...] = (*OF_RECORDS, *OF_LOGS)
"""All kinds of findings."""
