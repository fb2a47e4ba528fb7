"""The kinds of findings that a log can have, causes before effects. Only the standard library is needed."""

from __future__ import annotations

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
