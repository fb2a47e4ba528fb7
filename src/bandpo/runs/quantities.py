"""Quantities of a run, and the keys under which frameworks log them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import isfinite
from typing import Any, NamedTuple

from bandpo.errors import InvalidValue, did_you_mean
from bandpo.runs.files import shipped

Row = Mapping[str, float]
"""The metrics of one log step: each as it was logged, and under the names of `QUANTITIES`."""

QUANTITIES: Mapping[str, Mapping[str, Sequence[str]]] = shipped("names")
"""For each quantity and framework the keys that log it, the best source first. A tracker may put a prefix before a key:
``train/reward``. A key may be a complement or a percentage: ``1 - by_group/frac_mixed``.

``dead`` is the share of groups without spread, ``cut`` that of answers that were cut off. ``kl`` is to the reference,
``kl_old`` to the policy before the update. ``mismatch_kl`` is the KL between engine and trainer, ``mismatch`` the mean
distance of their log-probabilities, and ``mismatch_probs`` that of their probabilities."""

EVALUATION = "evaluation"
"""The quantity of the score on other prompts than those of training, of which no framework has a fixed key."""

REWARD_COMPONENT = re.compile(r"(?:^|/)rewards/(?P<name>[^/]+?)(?:/mean)?$")
"""Keys of the components of a reward, such as ``rewards/format/mean``."""

NOT_COMPONENTS = ("mean", "std", "min", "max", "chosen", "rejected", "margins", "accuracies", "avg", "total")

OF_EVALUATION = re.compile(r"(^|/)(eval|val|test|validation)([-_/]|$)", re.I)
"""Keys of an evaluation, whose quantities are not those of training."""

OF_OTHERS = re.compile(r"(^|/)(critic|ref|reference|teacher|\w*length\w*|advantages?|returns|values)/[^/]*$")
"""Keys of other models than the policy, or of other things, which end like keys of the policy."""

SUMS = re.compile(r"(^|/)objective/(kl|entropy)$")
"""Keys of TRL's PPO trainer that are sums over an answer, and end like keys of means over tokens."""

SCORE = re.compile(
    r"(^|[/_@-])(acc|accuracy|score|scores|reward|pass|pass@?\d+|correct|solve|success|mean@\d+)", re.I
)
"""Keys of an evaluation that are its score."""

SPREAD = re.compile(r"(std|min|max|worst|best|var|maj)(@|/|$|_)", re.I)

BOOKKEEPING = re.compile(
    r"(^|/)(_?step|_timestamp|_runtime|global_step.*|epoch|.*runtime|.*per_second.*|total_flos|num_tokens|"
    r"num_input_tokens_seen|progress/.*|elapsed_time|remaining_time|percentage|.*wall.?time)$"
    r"|(^|/)(timing|timing_s|timing_per_token_ms|time|perf|global_seqlen|throughput|ray|system|mfu|profiling)/",
    re.I,
)
"""Keys that say nothing of learning: counters, times, throughput."""

STEP_KEYS = (
    "step",
    "train/global_step",
    "trainer/global_step",
    "training/global_step",
    "global_step",
    "global_step/max_steps",
    "_step",
    "Step",
    "system/step",
    "system/global_step",
    "progress/batch",
    "rollout/step",
    "train/step",
    "training_step",
    "iteration",
    "iter",
)
"""Keys of the step of a row, the best first."""

NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf")
"""Texts by which trackers write a value that is not finite."""

MUST_BE_FINITE = re.compile(r"(^|/)(reward|entropy|\w*loss|grad_norm|kl)$")
"""Keys whose values are finite in a healthy run. Others may be NaN, such as a mean over no tokens."""

DETAIL = "audit_detail"
"""The key of a row of TRL's log that holds the ``audit/…`` metrics which were not sent to the trackers."""


class Source(NamedTuple):
    """Where a quantity comes from in a row.

    >>> Source("dead", "by_group/frac_mixed", complement=True).value({"by_group/frac_mixed": 0.25})
    0.75
    """

    quantity: str
    key: str
    complement: bool = False
    percent: bool = False

    def value(self, row: Row) -> float:
        """Return the quantity in a row."""
        value = row[self.key] / 100 if self.percent else row[self.key]
        return 1 - value if self.complement else value


def _parse(text: str) -> tuple[str, bool, bool]:
    """Return the key in an entry of `QUANTITIES`, whether it is a complement, and whether a percentage."""
    key = text.removeprefix("1 - ")
    return key.removesuffix(" / 100"), key != text, key.endswith(" / 100")


def _keys_by_quantity() -> dict[str, list[tuple[str, bool, bool]]]:
    """Return the keys of each quantity over all frameworks, without repetitions; the audit's own come first."""
    keys = {}
    for quantity, frameworks in QUANTITIES.items():
        texts = [*frameworks.get("bandpo", ())]
        for framework_keys in frameworks.values():
            texts += framework_keys
        keys[quantity] = [_parse(text) for text in dict.fromkeys(texts)]
    return keys


_KEYS = _keys_by_quantity()

_EXACT_KEYS = {key for entries in _KEYS.values() for key, _, _ in entries}


def is_of_evaluation(key: str) -> bool:
    """Check whether a logged key is of an evaluation.

    >>> is_of_evaluation("val-core/gsm8k/acc/mean@1"), is_of_evaluation("val/ratio"), is_of_evaluation("reward")
    (True, True, False)
    """
    return bool(OF_EVALUATION.search(key))


def component_name(key: str) -> str | None:
    """Return the name of the reward component that a key logs; None if it logs none.

    >>> component_name("train/rewards/format/mean"), component_name("rewards/chosen")
    ('format', None)
    """
    match = REWARD_COMPONENT.search(key)
    if match is None or is_of_evaluation(key) or match["name"] in NOT_COMPONENTS:
        return None
    return match["name"]


@lru_cache(maxsize=4096)
def sources(keys: tuple[str, ...], own_names: tuple[tuple[str, str], ...] = ()) -> tuple[Source, ...]:
    """Return for each quantity its best source among the keys of a row.

    Args:
        keys: The keys of a row.
        own_names: A user's own keys, each with its quantity before it; they come before those of frameworks.
    """
    available = {key for key in keys if not is_of_evaluation(key)} | {
        key for _, key in own_names if key in keys
    }
    available |= {key for key in keys if key in _EXACT_KEYS}
    # A tracker's prefix may stand before a key. The first logged key wins, as rows keep the order of logging.
    by_ending: dict[str, str] = {}
    for key in keys:
        if is_of_evaluation(key) or OF_OTHERS.search(key) or SUMS.search(key):
            continue
        position = key.find("/")
        while position >= 0:
            by_ending.setdefault(key[position + 1 :], key)
            position = key.find("/", position + 1)

    result = {}
    for quantity, own_key in own_names:
        if own_key in available:
            result[quantity] = Source(quantity, own_key)
    for quantity, entries in _KEYS.items():
        if quantity in result:
            continue
        # ``critic/grad_norm`` ends in another framework's key: what is logged under a whole key comes first.
        for place in ({key: key for key in available}, by_ending):
            entry = next((entry for entry in entries if entry[0] in place), None)
            if entry is not None:
                key, complement, percent = entry
                result[quantity] = Source(quantity, place[key], complement, percent)
                break
    if EVALUATION not in result:
        key = _evaluation_key(keys)
        if key is not None:
            result[EVALUATION] = Source(EVALUATION, key)
    return tuple(result.values())


def _evaluation_key(keys: Iterable[str]) -> str | None:
    """Return the key of an evaluation's score: the shortest, so that an average comes before its parts."""
    scores = [key for key in keys if is_of_evaluation(key) and SCORE.search(key) and not SPREAD.search(key)]
    scores = [key for key in scores if key not in _EXACT_KEYS]
    return min(scores, key=lambda key: (len(key), key)) if scores else None


def check_names(names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return a user's own names as pairs of quantity and key.

    Raises:
        ValueError: if a name is no quantity.
    """
    for quantity in names:
        if quantity not in (*QUANTITIES, EVALUATION):
            raise InvalidValue(
                f"{quantity!r} is no quantity of a run{did_you_mean(quantity, QUANTITIES)}; "
                f"there are {', '.join((*QUANTITIES, EVALUATION))}"
            )
    return tuple(names.items())


def _finite_numbers(logged: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a row that are finite numbers; an integer beyond all floats is none."""
    values = logged.values()
    try:
        # Most rows hold nothing else. Logs may have 100,000 rows, so this takes no step in Python for each value.
        if set(map(type, values)) == {float} and isfinite(sum(values)):
            return dict(logged)
        return {
            key: float(value)
            for key, value in logged.items()
            if isinstance(value, (float, int)) and isfinite(value)
        }
    except OverflowError:
        return {
            key: float(value)
            for key, value in logged.items()
            if isinstance(value, (float, int)) and abs(value) <= sys.float_info.max
        }


def named_rows(
    raw: Iterable[Mapping[str, Any]], names: Mapping[str, str] | None = None
) -> list[dict[str, float]]:
    """Return copies of logged rows with the names of `QUANTITIES` added.

    Values that are no numbers are left out, and so are rows that hold none of the quantities. The metrics that a row
    holds under `DETAIL` are added to the row.

    Args:
        raw: The rows as they were logged.
        names: For quantities the keys under which the user logs them.
    """
    own_names = check_names(names or {})
    rows: list[dict[str, float]] = []
    for logged in raw:
        detail = logged.get(DETAIL)
        everything = {**logged, **detail} if isinstance(detail, dict) else logged
        row = _finite_numbers(everything)
        not_finite = len(row) < len(everything) and any(
            MUST_BE_FINITE.search(key)
            for key, value in everything.items()
            if key not in row and (isinstance(value, (float, int)) or value in NO_NUMBERS)
        )

        read = sources(tuple(row), own_names)
        if not read and not not_finite and not any("@" in key for key in row):
            continue
        if "step" not in row:
            step_key = next((key for key in STEP_KEYS if key in row), None)
            if step_key is None:
                continue
            row["step"] = row[step_key]
        for source in read:
            # Most quantities are logged as they are; a call for each would be a tenth of the time of a long log.
            if source.complement or source.percent:
                row[source.quantity] = source.value(row)
            else:
                row[source.quantity] = row[source.key]
        if not_finite:
            row["not_finite"] = 1.0
        rows.append(row)
    return rows
