"""The quantities of a run, and the keys under which frameworks log them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from math import inf, isfinite
from typing import Any, NamedTuple

from rlvet.errors import InvalidValue, did_you_mean
from rlvet.runs.compact_rows import CompactRows, Layout, compact
from rlvet.runs.keys import (
    KEYS,
    OWN,
    SPELLED_OTHERWISE,
    Key,
    base_quantity,
    endings,
    framework_of,
    pattern_of,
    quantities_of,
    rows_of,
    table_key,
)

Row = Mapping[str, float]
"""The metrics of one log step, under the keys of the log and under the names of `QUANTITIES`."""

QUANTITIES = (
    "reward",
    "reward_max",
    "reward_min",
    "advantage_max",
    "advantage_min",
    "reward_std",
    "entropy",
    "clip_high",
    "clip_low",
    "clip",
    "dead",
    "cut",
    "kl",
    "kl_old",
    "mismatch_kl",
    "mismatch",
    "mismatch_probs",
    "importance_weight",
    "effective_samples",
    "staleness",
    "staleness_max",
    "grad_norm",
    "explained_variance",
    "value_loss",
    "critic_grad_norm",
    "learning_rate",
    "length",
    "length_max",
    "length_finished",
    "memory",
    "step_time",
)
"""The quantities of which `rlvet.runs.keys` has names. A tracker's prefix may precede a name: ``train/reward``.

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

_NAMES_OF_QUANTITIES = frozenset(QUANTITIES)

_FREE_NAMES = frozenset(row.key for row in KEYS if row.framework == OWN and "{" in row.key)

EVALUATION = "evaluation"
"""The quantity of the score on evaluation prompts, for which no framework has a fixed key."""

REWARD_COMPONENT = re.compile(
    r"(?:^|/)(?:rewards|reward_components)/(?P<name>[^/]+?)(?:/mean)?$"
    r"|(?:^|/)(?P<own_name>(?=\w*format|(?:accuracy|correctness)_reward(?:[_/]mean)?$)\w+)_reward(?:[_/]mean)?$",
    re.I,
)
"""Keys of the components of a reward, such as ``rewards/format/mean`` and ``format_reward``."""

NOT_COMPONENTS = (
    "score",
    "mean",
    "std",
    "min",
    "max",
    "chosen",
    "rejected",
    "margins",
    "accuracies",
    "avg",
    "total",
)
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
    r"|(^|/)(timing|timing_s|timing_per_token_ms|time|perf|global_seqlen|throughput|ray|system|mfu|profiling)/"
    r"|^(timing_s|timing_per_token_ms|global_seqlen|perf(?=[_.](mfu|max_memory|cpu_memory|time|throughput|total)))[_.]"
    r"|^training[_.](global_step|epoch)$",
    re.I,
)
"""Keys of counters, times and throughput."""

SUMMARY = "train_runtime"
"""A key of the row that trainers of transformers log at the end of a training."""

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
    "update",
)
"""Keys of the step of a row, the best first."""

RUN_KEYS = ("run", "run_id", "run_name", "run_number", "Run", "Name", "experiment", "experiment_name")
"""Keys of the name of a row's run."""

NOT_FINITE = ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf")
"""Texts that trackers write for values that are not finite."""

MUST_BE_FINITE = re.compile(r"(^|/)(reward|entropy|\w*loss|grad_norm|kl)$")
"""Keys whose values are finite in a healthy run. Others may be NaN, such as a mean over no tokens."""

OF_AUDIT = "audit/"
"""The beginning of the keys of bandpo's audit."""

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
    negated: bool = False
    """True if the quantity is minus the logged value."""
    placeholder: float | None = None
    """The logged value if the quantity was not computed; None if it always is."""

    def value(self, row: Row) -> float:
        """Return the quantity in a row."""
        value = row[self.key] / 100 if self.percent else row[self.key]
        if self.negated:
            return -value
        return 1 - value if self.complement else value


def source_of_row(row: Key) -> Source | None:
    """Return the source that a row of the table describes; None if it is of another quantity.

    >>> source_of_row(Key("roll", "alive", "dead_complement_percent", "yes", "", "", "", "", "", ""))
    Source(quantity='dead', key='alive', complement=True, percent=True, negated=False, placeholder=None)
    """
    quantity = base_quantity(row.quantity)
    if quantity not in QUANTITIES:
        return None
    return Source(
        quantity,
        row.key,
        complement="_complement" in row.quantity,
        percent=row.quantity.endswith("_percent"),
        negated=row.quantity.endswith("_negated"),
        placeholder=float(row.placeholder) if row.placeholder else None,
    )


@cache
def _sources_of(framework: str) -> Mapping[str, Sequence[Source]]:
    """Return the sources of each quantity in the log of a framework, the best first; of all if it is empty."""
    by_quantity: dict[str, list[Source]] = {quantity: [] for quantity in QUANTITIES}
    for row in rows_of(framework):
        source = source_of_row(row)
        if source is not None:
            by_quantity[source.quantity].append(source)
    return by_quantity


@cache
def _keys_of_sources(framework: str) -> frozenset[str]:
    """Return the keys of the sources in the log of a framework; of all if it is empty."""
    return frozenset(source.key for sources in _sources_of(framework).values() for source in sources)


_EXACT_KEYS = _keys_of_sources("")
"""The keys of quantities."""


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
    plain = plain_key(key)
    return plain in _PLAIN_KEYS or table_key(plain) in _EXACT_KEYS or component_name(key) is not None


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
def sources(
    keys: tuple[str, ...], user_names: tuple[tuple[str, str], ...] = (), framework: str | None = None
) -> tuple[Source, ...]:
    """Return the best source of each quantity among the keys of a row.

    Args:
        keys: The keys of a row.
        user_names: Pairs of a quantity and the user's own key for it, which replaces those of frameworks.
        framework: The framework that logged the row, whose names are used; the one of these keys if not given.
    """
    if framework is None:
        framework = framework_of(frozenset(keys))
    user_keys = {key for _, key in user_names}
    exact_keys: dict[str, str] = {}
    for key in keys:
        known = table_key(key, framework)
        if known is not None or key in user_keys or not is_of_evaluation(key):
            exact_keys.setdefault(known or key, key)
            exact_keys.setdefault(key, key)
    _drop_uncertain(exact_keys, keys)
    candidates_of_keys = [exact_keys, _keys_by_ending(keys, framework)]
    plain_keys: dict[str, str] = {}
    for key in keys:
        plain_keys.setdefault(plain_key(key), key)
    if any(plain != key for plain, key in plain_keys.items()):
        # Keys in capital letters or with spaces come last.
        plain_exact = {
            table_key(plain, framework) or plain: key
            for plain, key in plain_keys.items()
            if table_key(plain, framework) is not None or key in exact_keys
        }
        endings = {
            ending: plain_keys[plain] for ending, plain in _keys_by_ending(plain_keys, framework).items()
        }
        candidates_of_keys += [plain_exact, endings]
    columns = {SPELLED_OTHERWISE[key]: key for key in keys if key in SPELLED_OTHERWISE}
    if columns:
        candidates_of_keys.append(columns)

    result: dict[str, Source] = {}
    for quantity, user_key in user_names:
        if user_key in exact_keys:
            result[quantity] = Source(quantity, user_key)
    by_quantity = _sources_of(framework)
    if all(map(_keys_of_sources(framework).isdisjoint, candidates_of_keys)):
        # Most keys of a wide table are of no quantity.
        by_quantity = {}
    for quantity, entries in by_quantity.items():
        if quantity in result:
            continue
        # Exact keys come first: ``critic/grad_norm`` ends like a key of another framework.
        for candidates in candidates_of_keys:
            source = next((entry for entry in entries if entry.key in candidates), None)
            # A key that the user names is no other quantity.
            if source is not None and candidates[source.key] not in user_keys:
                result[quantity] = source._replace(key=candidates[source.key])
                break
    if EVALUATION not in result:
        key = _evaluation_key(keys)
        if key is not None:
            result[EVALUATION] = Source(EVALUATION, key)
    return tuple(result.values())


def _drop_uncertain(exact_keys: dict[str, str], keys: Iterable[str]) -> None:
    """Remove the names with a free part that people use in loops of their own, if several keys have one of them."""
    for name in _FREE_NAMES.intersection(exact_keys):
        pattern = pattern_of(name)
        if sum(bool(pattern.fullmatch(key)) for key in keys) > 1:
            del exact_keys[name]


def _keys_by_ending(keys: Iterable[str], framework: str) -> dict[str, str]:
    """Return a dict from each ending of a key after a slash to the key, the first one if several have this ending.

    It finds the keys of a framework to which a tracker has added a prefix. Keys of evaluations, of other models, such
    as a critic, and of sums are left out. Of a key that ends with one of the table, the shorter endings are left out:
    ``rollout_corr/kl`` is not a ``kl``, and a key that the table denies is nothing.
    """
    keys_by_ending: dict[str, str] = {}
    for key in keys:
        if is_of_evaluation(key) or OTHER_MODEL_KEY.search(key) or SUM_KEY.search(key):
            continue
        # What other frameworks log under the longer endings.
        others: frozenset[str] = frozenset()
        for ending in endings(key):
            known = table_key(ending, framework)
            if ending != key and (known is None or not others or others & quantities_of(known)):
                keys_by_ending.setdefault(known or ending, key)
            if known is not None:
                break
            # A tracker adds train/ to the keys of any framework.
            other = None if ending.startswith("train/") else table_key(ending)
            others |= frozenset() if other is None else quantities_of(other)
    return keys_by_ending


def _evaluation_key(keys: Iterable[str]) -> str | None:
    """Return the key of an evaluation's score; of several the shortest, which is that of an average over data sets."""
    scores: list[str] = []
    for key in keys:
        if is_evaluation_score(key) and table_key(key) not in _EXACT_KEYS:
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
    raw: Iterable[Mapping[str, Any]],
    names: Mapping[str, str] | None = None,
    framework: str | None = None,
) -> CompactRows:
    """Return logged rows with the names of `QUANTITIES` added.

    Values that are no finite numbers are left out, and so are rows without any of the quantities, unless one is null: a
    run whose reward and gradient are null goes on. The metrics under
    `DETAIL` are added to their row. A row gets ``not_finite`` = 1 if a metric of `MUST_BE_FINITE`, such as a loss or a
    reward, is not finite.

    Args:
        raw: The rows as they were logged.
        names: The user's own keys for quantities.
        framework: The framework that logged the rows, if it is known.
    """
    user_names = check_names(names or {})
    raw = compact(raw)
    framework = framework_of(keys_of(raw)) if framework is None else framework
    naming = _Naming(user_names, framework, unmeasured(raw, names, framework).values())
    rows = CompactRows()
    columns = [naming.columns(part) for part in raw.parts]
    if columns and all(columns):
        parts = [Layout(tuple(named), [*named.values()]) for named in columns if named]
        return _with_changing_step(CompactRows.of_parts(parts, raw.part_of_row))
    readers = [part.rows() for part in raw.parts]
    added: dict[int, int] = {}
    for part in raw.part_of_row:
        named = columns[part]
        if named is None:
            row = naming.row(next(readers[part]), is_first=not len(rows))
            if row:
                rows.append(row)
        elif named:
            if part not in added:
                added[part] = rows.add_part([*named], [*named.values()])
            rows.append_row_of(added[part])
    return _with_changing_step(rows)


class _Naming:
    """What `named_rows` does with the rows of each layout.

    Args:
        user_names: Pairs of a quantity and the user's own key for it.
        framework: The framework that logged the rows.
        placeholders: The sources whose value is always the one that stands for a missing one.
    """

    def __init__(
        self, user_names: tuple[tuple[str, str], ...], framework: str, placeholders: Iterable[Source]
    ) -> None:
        self._user_names = user_names
        self._framework = framework
        # Quantities that are left out where they have this value. A mean length of 0 is that of no finished answer.
        self._missing = [("length_finished", 0.0)]
        for source in placeholders:
            missing = source._replace(key="").value({"": source.placeholder or 0.0})
            self._missing.append((source.quantity, missing))
        # The sources of each layout, and whether they are copied as they are.
        self._by_layout: dict[tuple[str, ...], tuple[tuple[Source, ...], bool]] = {}

    def _sources(self, layout: tuple[str, ...]) -> tuple[tuple[Source, ...], bool]:
        if layout not in self._by_layout:
            found = sources(layout, self._user_names, self._framework)
            self._by_layout[layout] = (found, _is_plain(found, layout, self._framework))
        return self._by_layout[layout]

    def columns(self, part: Layout) -> dict[str, Sequence[float]] | None:
        """Return the columns of a layout under their names, without a look at each row.

        Empty if its rows are left out. None if its rows need one: if a value is no finite number, or is computed.
        """
        # A sum of large numbers may be infinite too. These rows are then looked at.
        if not part.has_only_floats or not all(isfinite(sum(column)) for column in part.columns):
            return None
        row_sources, is_plain = self._sources(part.keys)
        if not is_plain:
            return None
        step_key = (
            "step" if "step" in part.keys else next((key for key in STEP_KEYS if key in part.keys), None)
        )
        if step_key is None or not (row_sources or any("@" in key for key in part.keys)):
            return {}
        named = dict(zip(part.keys, part.columns, strict=True))
        named["step"] = named[step_key]
        for source in row_sources:
            named[source.quantity] = named[source.key]
        for quantity, value in self._missing:
            if quantity not in named:
                continue
            count = sum(map(value.__eq__, named[quantity]))
            if 0 < count < len(named[quantity]):
                return None
            if count:
                del named[quantity]
        return named

    def row(self, logged: Mapping[str, Any], *, is_first: bool) -> dict[str, float]:
        """Return a row under its names; empty if it is left out.

        Args:
            logged: The row as it was logged.
            is_first: True if no row before it was read.
        """
        detail = logged.get(DETAIL)
        metrics = {**logged, **detail} if isinstance(detail, dict) else logged
        row = _finite_numbers(metrics)
        is_not_finite = len(row) < len(metrics) and _has_not_finite(metrics, row)

        row_sources, is_plain = self._sources(tuple(row))
        # Keys with an "@" are metrics of an evaluation, such as mean@8.
        is_of_run = row_sources or is_not_finite or any("@" in key for key in row)
        if not is_of_run and (is_first or not _has_null(metrics, self._framework)):
            return {}
        if "step" not in row:
            step_key = next((key for key in STEP_KEYS if key in row), None)
            if step_key is None:
                return {}
            row["step"] = row[step_key]
        if is_plain:
            # Without a function call for each quantity, which would take a tenth of the time for a long log.
            for source in row_sources:
                row[source.quantity] = row[source.key]
        else:
            values = {source.quantity: source.value(row) for source in row_sources}
            for key in _NAMES_OF_QUANTITIES.intersection(row).difference(values):
                # The framework logs another quantity under this name.
                if table_key(key, self._framework) is not None:
                    del row[key]
            row.update(values)
        if is_not_finite:
            row["not_finite"] = 1.0
        for quantity, value in self._missing:
            if row.get(quantity) == value:
                del row[quantity]
        return row


def _is_plain(row_sources: tuple[Source, ...], keys: tuple[str, ...], framework: str) -> bool:
    """Return True if no value of a row is computed, and no key of it is the name of another quantity."""
    quantities = {source.quantity for source in row_sources}
    others = _NAMES_OF_QUANTITIES.intersection(keys)
    is_computed = any(source.complement or source.percent or source.negated for source in row_sources)
    is_renamed = any(source.key in others and source.key != source.quantity for source in row_sources)
    is_other = any(table_key(key, framework) is not None for key in others - quantities)
    return not (is_computed or is_renamed or is_other)


def unmeasured(
    raw: Iterable[Mapping[str, Any]], names: Mapping[str, str] | None = None, framework: str | None = None
) -> dict[str, Source]:
    """Return the sources, by their keys, whose value is in all rows the one that stands for a missing one.

    >>> list(unmeasured([{"step": 1, "reward": 0.5, "entropy": 0.0, "own": 0.0}]))
    ['entropy']
    """
    raw = compact(raw)
    framework = framework_of(keys_of(raw)) if framework is None else framework
    user_names = tuple((names or {}).items())
    found: dict[str, Source] = {}
    for layout in raw.layouts:
        for source in sources(layout, user_names, framework):
            if source.placeholder is not None:
                found[source.key] = source
    return {key: source for key, source in found.items() if _is_always(raw, key, source.placeholder)}


def _is_always(raw: CompactRows, key: str, placeholder: float | None) -> bool:
    """Return whether all numbers under a key are one value; not if no row has a number."""
    numbers = (value for value in raw.values(key) if isinstance(value, (int, float)))
    # The search ends at the first other number.
    return next(numbers, None) == placeholder and all(number == placeholder for number in numbers)


def keys_of(raw: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the keys of logged rows, those of `DETAIL` included."""
    raw = compact(raw)
    keys: set[str] = {key for layout in raw.layouts for key in layout if isinstance(key, str)}
    if DETAIL in keys:
        details = (detail for detail in raw.values(DETAIL) if isinstance(detail, dict))
        keys = keys.union(*details)
    return frozenset(keys)


def _with_changing_step(rows: CompactRows) -> CompactRows:
    """Return rows; if all have the same step, with that of another key of steps that rises, if there is one.

    A trainer of one's own may log TRL's global step without raising it, beside the tracker's own counter.
    """
    steps = rows.column("step")
    if len(rows) < 2 or any(step != steps[0] for step in steps):
        return rows
    for key in STEP_KEYS:
        values = [*rows.values(key, -inf)]
        if all(before < after for before, after in pairwise(values)):
            return CompactRows({**row, "step": value} for row, value in zip(rows, values, strict=True))
    return rows


def _has_null(metrics: Mapping[str, Any], framework: str) -> bool:
    """Return True if a quantity of a row is null."""
    nulls = tuple(key for key, value in metrics.items() if value is None)
    return bool(nulls) and bool(sources(nulls, (), framework))


def _has_not_finite(metrics: Mapping[str, Any], row: Mapping[str, float]) -> bool:
    """Return True if a metric that must be finite has another value, and is therefore missing from the row."""
    for key, value in metrics.items():
        is_not_finite = key not in row and (isinstance(value, (float, int)) or value in NOT_FINITE)
        if is_not_finite and MUST_BE_FINITE.search(key):
            return True
    return False
