"""All kinds of findings, causes before effects. The tables of docs/rlvet/findings.md are made from these."""

from __future__ import annotations

from rlvet.checks.advantages.comparison import ADVANTAGES, GROUPING, REWARD_SIGN
from rlvet.checks.advantages.masks import MASK, MICRO_BATCH_LOST
from rlvet.checks.advantages.rewards import REWARD_NOISE
from rlvet.checks.advantages.signal import ADVANTAGE_SCALE
from rlvet.checks.findings import Kind
from rlvet.checks.log.clip import CLIP_HEAVY, CLIP_IDLE, ON_POLICY, RARE_TOKENS_BLOCKED
from rlvet.checks.log.components import COMPONENT_CONSTANT, COMPONENT_DOMINATES
from rlvet.checks.log.data import DATA_CHANGE
from rlvet.checks.log.distance import KL_DRIFT, OTHER_REFERENCE, STEP_TOO_LARGE
from rlvet.checks.log.engine import ENGINE_MISMATCH, SEQUENCE_WEIGHTS, STALE_WEIGHTS, WEIGHT_SYNC
from rlvet.checks.log.entropy import ENTROPY_COLLAPSE, ENTROPY_RISES, LOW_ENTROPY_AT_START
from rlvet.checks.log.evaluation import REWARD_HACKED
from rlvet.checks.log.gradient import GRADIENT_SPIKES
from rlvet.checks.log.last_tenth import LATE_CHANGE
from rlvet.checks.log.length import LENGTH_COLLAPSE, LENGTH_GROWTH, TRUNCATED
from rlvet.checks.log.movement import HARDLY_MOVES, NO_STEP
from rlvet.checks.log.numbers import NOT_A_NUMBER
from rlvet.checks.log.reward import COLLAPSE, PLATEAU, REWARD_FLAT
from rlvet.checks.log.signal import NO_BASELINE, NO_SIGNAL
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

OF_LOGS: tuple[Kind, ...] = (
    NOT_A_NUMBER,
    NO_STEP,
    OTHER_REFERENCE,
    WEIGHT_SYNC,
    ENGINE_MISMATCH,
    STALE_WEIGHTS,
    SEQUENCE_WEIGHTS,
    STEP_TOO_LARGE,
    GRADIENT_SPIKES,
    CLIP_HEAVY,
    KL_DRIFT,
    NO_BASELINE,
    TRUNCATED,
    REWARD_FLAT,
    NO_SIGNAL,
    DATA_CHANGE,
    COMPONENT_CONSTANT,
    COMPONENT_DOMINATES,
    LENGTH_GROWTH,
    LENGTH_COLLAPSE,
    ENTROPY_COLLAPSE,
    ENTROPY_RISES,
    LOW_ENTROPY_AT_START,
    REWARD_HACKED,
    HARDLY_MOVES,
    COLLAPSE,
    LATE_CHANGE,
    PLATEAU,
    ON_POLICY,
    CLIP_IDLE,
    RARE_TOKENS_BLOCKED,
)
"""Kinds of findings that a log or a record can have."""

KINDS: tuple[Kind, ...] = (*OF_RECORDS, *OF_LOGS)
"""All kinds of findings."""
