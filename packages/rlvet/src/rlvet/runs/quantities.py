"""The quantities of a run, and the keys under which frameworks log them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from math import inf, isfinite
from typing import Any, NamedTuple

from rlvet.errors import InvalidValue, did_you_mean
from rlvet.runs.files import load_table

Row = Mapping[str, float]
"""The metrics of one log step, under the keys of the log and under the names of `QUANTITIES`."""

QUANTITIES: Mapping[str, Mapping[str, Sequence[str]]] = load_table("names")
"""The keys of each quantity, by framework, the best key first. In a log, a tracker's prefix may precede a key:
``train/reward``. An entry may be a complement or a percentage: ``1 - by_group/frac_mixed``.

- ``dead``: the share of groups with equal rewards
- ``cut``: the share of truncated completions
- ``kl``: the KL divergence to the reference model
- ``kl_old``: the KL divergence to the policy before the update
- ``mismatch_kl``: the KL divergence between rollout engine and trainer
- ``mismatch``: the mean distance of their log-probabilities
- ``mismatch_probs``: the mean distance of their probabilities
- ``effective_samples``: the effective sample size of importance weights between them, as a share of the batch
- ``explained_variance``, ``value_loss`` and ``critic_grad_norm``: of the critic of PPO
- ``staleness``: the mean age of the data, in updates; ``staleness_max``: the largest
"""

EVALUATION = "evaluation"
"""The quantity of the score on evaluation prompts, for which no framework has a fixed key."""

REWARD_COMPONENT = re.compile(
    r"(?:^|/)(?:rewards|reward_components)/(?P<name>[^/]+?)(?:/mean)?$"
    r"|(?:^|/)(?P<own_name>(?=\w*format|(?:accuracy|correctness)_reward(?:[_/]mean)?$)\w+)_reward(?:[_/]mean)?$",
    re.I,
)
"""Keys of the components of a reward, such as ``rewards/format/mean`` and ``format_reward``."""

NOT_COMPONENTS = ("mean", "std", "min", "max", "chosen", "rejected", "margins", "accuracies", "avg", "total")
"""Names in keys like those of reward components that are none."""

EVALUATION_KEY = re.compile(r"(^|/)(evals?|evaluation|val|test|validation|held_?out)([-_/ ]|$)", re.I)
"""Keys of an evaluation, which are not quantities of training."""

OTHER_MODEL_KEY = re.compile(
    r"(^|/)(critic|ref|reference|teacher|(?=\w*length)\w++|advantages?|returns|values)/[^/]*$"
)
"""Keys of other models than the policy, or of tensors, that end like a key of the policy."""

SUM_KEY = re.compile(r"(^|/)objective/(kl|entropy)$")
"""Keys of TRL's PPO trainer that are sums over a completion, but end like keys of means over tokens."""

SCORE = re.compile(
    r"(^|[/_@ -])(acc|accuracy|score|scores|reward|pass|pass@?\d+|correct|solve|success|(mean|avg)@\d+)", re.I
)
"""Keys of an evaluation that are its score."""

SPREAD = re.compile(r"(std|min|max|worst|best|var|maj)(@|/|$|_)", re.I)
"""Keys of statistics of a score other than its mean."""

BOOKKEEPING = re.compile(
    r"(^|/)(_?step|_timestamp|_runtime|global_step.*|epoch|.*runtime|.*per_second.*|total_flos|num_tokens|"
    r"num_input_tokens_seen|progress/.*|elapsed_time|remaining_time|percentage|.*wall.?time)$"
    r"|(^|/)(timing|timing_s|timing_per_token_ms|time|perf|global_seqlen|throughput|ray|system|mfu|profiling)/",
    re.I,
)
"""Keys of counters, times and throughput."""

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

RUN_KEYS = ("run", "run_id", "run_name", "run_number", "Run", "Name", "experiment", "experiment_name")
"""Keys of the name of a row's run."""

NOT_FINITE = ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf")
"""Texts that trackers write for values that are not finite."""

MUST_BE_FINITE = re.compile(r"(^|/)(reward|entropy|\w*loss|grad_norm|kl)$")
"""Keys whose values are finite in a healthy run. Others may be NaN, such as a mean over no tokens."""

DETAIL = "audit_detail"
"""The key, in a row of TRL's log, of the ``audit/…`` metrics that were not sent to the trackers."""


class Source(NamedTuple):
    """The key from which a quantity of a row is computed.

    >>> Source("dead", "by_group/frac_mixed", complement=True).value({"by_group/frac_mixed": 0.25})
    0.75
    """

    quantity: str
    """The quantity."""
    key: str
    """The key in the row."""
    complement: bool = False
    """True if the quantity is 1 minus the logged value."""
    percent: bool = False
    """True if the logged value is a percentage."""

    def value(self, row: Row) -> float:
        """Return the quantity in a row."""
        value = row[self.key] / 100 if self.percent else row[self.key]
        return 1 - value if self.complement else value


def _parse_entry(quantity: str, entry: str) -> Source:
    """Return the source that an entry of `QUANTITIES` describes, such as ``1 - by_group/frac_mixed``."""
    key = entry.removeprefix("1 - ")
    return Source(
        quantity=quantity,
        key=key.removesuffix(" / 100"),
        complement=key != entry,
        percent=key.endswith(" / 100"),
    )


def _sources_by_quantity() -> dict[str, list[Source]]:
    """Return the sources of each quantity over all frameworks, without duplicates; those of the audit come first."""
    sources_by_quantity = {}
    for quantity, frameworks in QUANTITIES.items():
        entries = [*frameworks.get("bandpo", ())]
        for framework_entries in frameworks.values():
            entries += framework_entries
        sources_by_quantity[quantity] = [_parse_entry(quantity, entry) for entry in dict.fromkeys(entries)]
    return sources_by_quantity


_SOURCES = _sources_by_quantity()

_EXACT_KEYS = {source.key for source in chain.from_iterable(_SOURCES.values())}

_WITH_UNDERSCORES = {key.replace("/", "_"): key for key in sorted(_EXACT_KEYS) if "/" in key}
"""The keys of frameworks by the names of columns that some exports give them: ``critic_score_mean``."""


def plain_key(key: str) -> str:
    """Return a key in lower case, with underscores for spaces: people and tools print keys in other letters.

    >>> plain_key("Completions / Mean Length"), plain_key("KL")
    ('completions/mean_length', 'kl')
    """
    if key.islower() and " " not in key:
        return key
    return "/".join("_".join(part.split()) for part in key.lower().split("/"))


_PLAIN_KEYS = {plain_key(key) for key in _EXACT_KEYS}

_STEP_RANKS = {plain_key(key): rank for rank, key in reversed(list(enumerate(STEP_KEYS)))}


def is_known_key(key: str) -> bool:
    """Return True if a key is one of a quantity, or of a component of the reward, in letters of any case."""
    return plain_key(key) in _PLAIN_KEYS or component_name(key) is not None


def step_rank(key: str) -> int | None:
    """Return the rank of a key among those of steps, 0 for the best; None if it is none of them.

    >>> step_rank("Global Step"), step_rank("reward")
    (4, None)
    """
    return _STEP_RANKS.get(plain_key(key))


def is_of_evaluation(key: str) -> bool:
    """Return True if a logged key is of an evaluation.

    >>> is_of_evaluation("val-core/gsm8k/acc/mean@1"), is_of_evaluation("val/ratio"), is_of_evaluation("reward")
    (True, True, False)
    """
    return bool(EVALUATION_KEY.search(key))


def is_evaluation_score(key: str) -> bool:
    """Return True if a logged key is the score of an evaluation.

    >>> is_evaluation_score("eval/aime24/avg@8"), is_evaluation_score("eval/loss"), is_evaluation_score("accuracy")
    (True, False, False)
    """
    return is_of_evaluation(key) and bool(SCORE.search(key)) and not SPREAD.search(key)


@lru_cache(maxsize=65536)  # a log has the same keys in each row
def component_name(key: str) -> str | None:
    """Return the name of the reward component of a key; None if the key is of none.

    >>> component_name("train/rewards/format/mean"), component_name("rewards/chosen")
    ('format', None)
    >>> component_name("accuracy_reward"), component_name("accuracy_best_reward")
    ('accuracy', None)
    """
    match = REWARD_COMPONENT.search(key)
    if match is None or is_of_evaluation(key):
        return None
    name = match["name"] or match["own_name"]
    return None if name.lower() in NOT_COMPONENTS else name


@lru_cache(maxsize=4096)
def sources(keys: tuple[str, ...], user_names: tuple[tuple[str, str], ...] = ()) -> tuple[Source, ...]:
    """Return the best source of each quantity among the keys of a row.

    Args:
        keys: The keys of a row.
        user_names: Pairs of a quantity and the user's own key for it, which replaces those of frameworks.
    """
    user_keys = {key for _, key in user_names}
    exact_keys = {
        key: key for key in keys if key in user_keys or key in _EXACT_KEYS or not is_of_evaluation(key)
    }
    keys_by_ending = _keys_by_ending(keys)
    candidates_of_keys = [exact_keys, keys_by_ending]
    plain_keys: dict[str, str] = {}
    for key in keys:
        plain_keys.setdefault(plain_key(key), key)
    if any(plain != key for plain, key in plain_keys.items()):
        # Keys in capital letters or with spaces come last.
        plain_exact = {
            plain: key for plain, key in plain_keys.items() if plain in _EXACT_KEYS or key in exact_keys
        }
        endings = {ending: plain_keys[plain] for ending, plain in _keys_by_ending(plain_keys).items()}
        candidates_of_keys += [plain_exact, endings]
    columns = {_WITH_UNDERSCORES[key]: key for key in keys if key in _WITH_UNDERSCORES}
    if columns:
        candidates_of_keys.append(columns)

    result: dict[str, Source] = {}
    for quantity, user_key in user_names:
        if user_key in exact_keys:
            result[quantity] = Source(quantity, user_key)
    for quantity, entries in _SOURCES.items():
        if quantity in result:
            continue
        # Exact keys come first: ``critic/grad_norm`` ends like a key of another framework.
        for candidates in candidates_of_keys:
            source = next((entry for entry in entries if entry.key in candidates), None)
            if source is not None:
                result[quantity] = source._replace(key=candidates[source.key])
                break
    if EVALUATION not in result:
        key = _evaluation_key(keys)
        if key is not None:
            result[EVALUATION] = Source(EVALUATION, key)
    return tuple(result.values())


def _keys_by_ending(keys: Iterable[str]) -> dict[str, str]:
    """Return a dict from each ending of a key after a slash to the key, the first one if several have this ending.

    It finds the keys of a framework to which a tracker has added a prefix. Keys of evaluations, of other models, such
    as a critic, and of sums are left out. Of a key that ends with a known one, the shorter endings are left out:
    ``rollout_corr/kl`` is not a ``kl``.
    """
    keys_by_ending: dict[str, str] = {}
    for key in keys:
        if is_of_evaluation(key) or OTHER_MODEL_KEY.search(key) or SUM_KEY.search(key):
            continue
        ending = key
        while ending not in _EXACT_KEYS and "/" in ending:
            _, _, ending = ending.partition("/")
            keys_by_ending.setdefault(ending, key)
    return keys_by_ending


def _evaluation_key(keys: Iterable[str]) -> str | None:
    """Return the key of an evaluation's score; of several the shortest, which is that of an average over data sets."""
    scores: list[str] = []
    for key in keys:
        if is_evaluation_score(key) and key not in _EXACT_KEYS:
            scores.append(key)
    return min(scores, key=lambda key: (len(key), key)) if scores else None


def check_names(names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Check the quantities of a user's own keys, and return pairs of quantity and key.

    Raises:
        ValueError: if one is no quantity.
    """
    for quantity in names:
        if quantity not in (*QUANTITIES, EVALUATION):
            raise InvalidValue(
                f"{quantity!r} is no quantity of a run{did_you_mean(quantity, QUANTITIES)}; "
                f"there are {', '.join((*QUANTITIES, EVALUATION))}"
            )
    return tuple(names.items())


def _finite_numbers(logged: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a row that are finite numbers, as floats; integers larger than every float are left out."""
    values = logged.values()
    try:
        # The fast path for most rows, without a loop in Python: logs may have 100,000 rows.
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

    Values that are no finite numbers are left out, and so are rows without any of the quantities, unless one is null: a
    run whose reward and gradient are null goes on. The metrics under
    `DETAIL` are added to their row. A row gets ``not_finite`` = 1 if a metric of `MUST_BE_FINITE`, such as a loss or a
    reward, is not finite.

    Args:
        raw: The rows as they were logged.
        names: The user's own keys for quantities.
    """
    user_names = check_names(names or {})
    rows: list[dict[str, float]] = []
    for logged in raw:
        detail = logged.get(DETAIL)
        metrics = {**logged, **detail} if isinstance(detail, dict) else logged
        row = _finite_numbers(metrics)
        is_not_finite = len(row) < len(metrics) and _has_not_finite(metrics, row)

        row_sources = sources(tuple(row), user_names)
        # Keys with an "@" are metrics of an evaluation, such as mean@8.
        is_of_run = row_sources or is_not_finite or any("@" in key for key in row)
        if not is_of_run and not (rows and _has_null(metrics)):
            continue
        if "step" not in row:
            step_key = next((key for key in STEP_KEYS if key in row), None)
            if step_key is None:
                continue
            row["step"] = row[step_key]
        for source in row_sources:
            # Without a function call for most quantities, which would take a tenth of the time for a long log.
            if source.complement or source.percent:
                row[source.quantity] = source.value(row)
            else:
                row[source.quantity] = row[source.key]
        if is_not_finite:
            row["not_finite"] = 1.0
        rows.append(row)
    _replace_constant_step(rows)
    return rows


def _replace_constant_step(rows: Sequence[dict[str, float]]) -> None:
    """Replace a step that is the same in all rows by another key of steps that rises, if there is one.

    A trainer of one's own may log TRL's global step without raising it, beside the tracker's own counter.
    """
    if len(rows) < 2 or any(row["step"] != rows[0]["step"] for row in rows):
        return
    for key in STEP_KEYS:
        values = [row.get(key, -inf) for row in rows]
        if all(before < after for before, after in pairwise(values)):
            for row, value in zip(rows, values, strict=True):
                row["step"] = value
            return


def _has_null(metrics: Mapping[str, Any]) -> bool:
    """Return True if a quantity of a row is null."""
    nulls = tuple(key for key, value in metrics.items() if value is None)
    return bool(nulls) and bool(sources(nulls))


def _has_not_finite(metrics: Mapping[str, Any], row: Mapping[str, float]) -> bool:
    """Return True if a metric that must be finite has another value, and is therefore missing from the row."""
    for key, value in metrics.items():
        is_not_finite = key not in row and (isinstance(value, (float, int)) or value in NOT_FINITE)
        if is_not_finite and MUST_BE_FINITE.search(key):
            return True
    return False
