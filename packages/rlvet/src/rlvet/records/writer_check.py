"""Test a writer of records: read a record, and compare it with the losses that were passed to its writer.

A writer is a framework's recorder in the format of docs/audit.md, or its own dump of batches that
`rlvet diagnose` reads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlvet.errors import InvalidValue, did_you_mean
from rlvet.records.record import LossBatch
from rlvet.records.run import RecordedRun

Array = np.ndarray[Any, Any]

TOKEN_COLUMNS = {
    "logp_old": "logp_old",
    "logp": "log_ratio",
    "logp_rollout": "log_weight",
    "advantages": "advantages",
    "entropy": "entropy",
    "tokens": "token",
    "version": "version",
    "collision": "collision",
}
"""The column of each quantity per token. Quantities that others are computed from come first."""

SEQUENCE_COLUMNS = ("group", "reward", "truncated")
"""The quantities per sequence."""

LOSS_COLUMNS = ("step", "generation", "update", "current_version")
"""The quantities per loss."""

QUANTITIES = (*TOKEN_COLUMNS, "mask", *SEQUENCE_COLUMNS, *LOSS_COLUMNS)
"""All names that a loss may have."""

MEANINGS = {
    "logp": "log_ratio is log π − log π_old, in nats",
    "logp_old": "logp_old is log π_old, in nats",
    "logp_rollout": "log_weight is log π_old − log μ, in nats, and NaN where the engine gave none",
    "advantages": "advantages are those of the loss, one per token or one per sequence",
    "entropy": "entropy is that of π at the token, in nats",
    "tokens": "token is the id of the sampled token",
    "version": "version is that of the weights that sampled, one per token or one per sequence",
    "collision": "collision is Σ q²·(log q + H) over the vocabulary, for the probabilities q and entropy H of π",
    "group": (
        "group is a number that the answers to one prompt share in all losses of a generated batch, and those to "
        "others do not"
    ),
    "reward": "reward is that of the whole sequence, before any baseline",
    "truncated": "truncated is true if the answer was cut off at the length limit",
    "step": "step is the trainer's step",
    "generation": "generation is the number of the generated batch",
    "update": "update is the number of optimiser steps on that batch before this loss",
    "current_version": "current_version is that of the weights in training, counted like version",
}
"""The definition of each quantity, for the end of an error."""

HALF_PRECISION = 2e-3
"""Relative tolerance of entropies, which may be stored as float16."""


class _Pair(NamedTuple):
    """The read and the expected values of a quantity at the counted tokens."""

    read: Array
    expected: Array


def check_record(
    path: str | Path,
    losses: Sequence[Mapping[str, Any]],
    *,
    method: str | None = None,
    anchor: str | None = None,
    sampling: Mapping[str, float] | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Check that a record, or batches dumped by a framework, contain the losses that were passed to the writer.

    Each loss is described by the arguments of `bandpo.audit.Recorder.add`, under the same names, as tensors, arrays or
    lists. Quantities that a loss does not name are not checked, so leave out ``entropy`` for a writer without
    entropies. Groups may be numbered differently, but the same sequences must share one, in all losses of a
    ``generation``.

    Args:
        path: The file or folder that the writer created, as for `rlvet diagnose`.
        losses: The losses in the order in which they were written. Each has ``logp_old``, and any of ``logp``,
            ``logp_rollout``, ``advantages``, ``mask``, ``entropy``, ``tokens``, ``version``, ``collision``, ``group``,
            ``reward``, ``truncated``, ``step``, ``generation``, ``update`` and ``current_version``.
        method: The expected method of the run.
        anchor: The expected policy that the bounds surround: ``trainer`` or ``rollout``.
        sampling: The expected settings of the engine.
        tolerance: The largest difference that counts as rounding, relative to the larger of 1 and the value. Records
            with log-probabilities in float16 need 2e-3.

    Raises:
        AssertionError: if a quantity is missing or differs, or the reader warns. The message names the loss, the
            column, both values and the definition of the column.
        ValueError: if the path cannot be read, as without a required column, which the message names; or if a loss
            names an unknown quantity.

    >>> import bandpo, tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> loss = {"logp_old": [[-1.0, -2.0]], "logp": [[-1.1, -1.8]], "advantages": [0.5], "reward": [1.0]}
    >>> with bandpo.audit.Recorder(folder) as recorder:
    ...     recorder.add(**{name: torch.tensor(values) for name, values in loss.items()})
    >>> check_record(folder, [loss])
    >>> check_record(folder, [loss | {"logp": [[-1.1, -1.9]]}])
    Traceback (most recent call last):
    AssertionError: ...
      loss 1, column log_ratio: logp is -1.8 at counted token 2 of sequence 1, expected -1.9; log_ratio is log π − ...
    """
    if not 0 < tolerance < math.inf:
        raise InvalidValue(f"tolerance must be a finite number above 0, got {tolerance!r}")
    expected = [_Expected(number, loss) for number, loss in enumerate(losses, 1)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = list(RecordedRun(path).batches())
    problems = [f"the reader warns: {warning.message}" for warning in caught]
    if len(batches) != len(expected):
        problems.append(
            f"{len(batches)} losses were read, and {len(expected)} were expected; write each loss as a record batch of "
            "its own, in the order of training"
        )
    for batch, loss in zip(batches, expected, strict=False):
        problems += loss.differences(batch, tolerance)
    if not problems:
        problems += _group_differences_between_losses(batches, expected)
    settings = {"method": method, "anchor": anchor, "sampling": None if sampling is None else dict(sampling)}
    for name, value in settings.items():
        if value is not None and batches and getattr(batches[0], name) != value:
            problems.append(
                f"{name} is {getattr(batches[0], name)!r}, expected {value!r}; it belongs into the JSON under the key "
                "bandpo in the schema's metadata"
            )
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise AssertionError(f"{path} does not contain the expected losses:\n{lines}")


class _Expected:
    """A loss that was passed to the writer.

    Args:
        number: Its number, from 1.
        loss: Its quantities, as for `check_record`.

    Raises:
        ValueError: if a quantity is unknown, or its shape fits neither the tokens nor the sequences.
    """

    def __init__(self, number: int, loss: Mapping[str, Any]):
        self.label = f"loss {number}"
        for name in loss:
            if name not in QUANTITIES:
                raise InvalidValue(
                    f"{self.label}: {name} is not a quantity of a record{did_you_mean(name, QUANTITIES)}"
                )
        if loss.get("logp_old") is None:
            raise InvalidValue(f"{self.label} lacks logp_old, which every record needs")
        arrays = {name: _as_array(values) for name, values in loss.items() if values is not None}
        shape = arrays["logp_old"].shape
        if len(shape) != 2:
            raise InvalidValue(f"{self.label}: logp_old must have the shape (batch, time), got {shape}")
        self.mask: Array = np.ones(shape, bool) if "mask" not in arrays else arrays["mask"] != 0
        self.of_tokens = {
            name: self._at_tokens(name, arrays[name]) for name in TOKEN_COLUMNS if name in arrays
        }
        self.of_sequences = {
            name: self._check_shape(name, arrays[name], shape[:1])
            for name in SEQUENCE_COLUMNS
            if name in arrays
        }
        self.of_loss = {name: int(arrays[name]) for name in LOSS_COLUMNS if name in arrays}
        self._check_shape("mask", self.mask, shape)

    def _check_shape(self, name: str, values: Array, shape: tuple[int, ...]) -> Array:
        """Return the values; raise ValueError if they have another shape."""
        if values.shape != shape:
            raise InvalidValue(f"{self.label}: {name} has the shape {values.shape}, expected {shape}")
        return values

    def _at_tokens(self, name: str, values: Array) -> Array:
        """Return the values of a token column at the counted tokens, shape (counted tokens,).

        Args:
            name: The quantity.
            values: One value per token, (batch, time). ``version`` and ``advantages`` may also have one per sequence,
                (batch,) or (batch, 1), or one per loss, (), which is repeated for all tokens.
        """
        shape = self.mask.shape
        if values.shape == shape[:1] or (values.ndim == 2 and values.shape[1] == 1):
            values = values.reshape(-1, 1)
        if name in ("version", "advantages") and values.shape in ((), (shape[0], 1)):
            values = np.broadcast_to(values, shape)
        return self._check_shape(name, values, shape)[self.mask]

    def differences(self, batch: LossBatch, tolerance: float) -> Iterator[str]:
        """Describe the differences of a loss that was read.

        Args:
            batch: The loss that was read.
            tolerance: As for `check_record`.
        """
        if batch.bad_sequences:
            yield (
                f"{self.label}: {batch.bad_sequences} sequences hold NaN, an infinite value or a log-probability above "
                "0, and are left out; log-probabilities are logarithms, in nats"
            )
            return
        lengths = batch.mask.sum(1)
        expected_lengths = self.mask.sum(1)
        if len(lengths) != len(expected_lengths):
            yield (
                f"{self.label}: {len(lengths)} sequences were read, and {len(expected_lengths)} were expected; a row "
                "is a sequence"
            )
            return
        if (lengths != expected_lengths).any():
            row = int((lengths != expected_lengths).argmax())
            yield (
                f"{self.label}, sequence {row + 1}: {lengths[row]} tokens count, and {expected_lengths[row]} were "
                f"expected{self._cause_of_lengths(lengths)}; lists hold one value per token that the mask counts"
            )
            return
        for name, expected in self.of_tokens.items():
            yield from self._token_differences(batch, name, expected, tolerance)
        for name, expected in self.of_sequences.items():
            yield from self._sequence_differences(batch, name, expected, tolerance)
        for name, expected in self.of_loss.items():
            value = getattr(batch, name)
            if value != expected:
                text = "missing" if value is None else str(value)
                yield f"{self.label}, column {name}: it is {text}, expected {expected}; {MEANINGS[name]}"

    def _cause_of_lengths(self, lengths: Array) -> str:
        """Return the likely cause of wrong lengths, as part of an error; "" if unknown."""
        if (lengths == self.mask.shape[1]).all():
            return ", so that the mask is not applied"
        return ""

    def _token_differences(
        self, batch: LossBatch, name: str, expected: Array, tolerance: float
    ) -> Iterator[str]:
        """Describe the difference of a quantity per token."""
        location = f"{self.label}, column {TOKEN_COLUMNS[name]}"
        values = _values_of(batch, name)
        if values is None:
            # A version is read as its distance from the current one, or from the step.
            needs = ", or current_version and step are missing" if name == "version" else ""
            yield f"{location}: it is missing or null{needs}, though {name} is expected; {MEANINGS[name]}"
            return
        read = values[batch.mask]
        rounding = max(tolerance, HALF_PRECISION) if name == "entropy" else tolerance
        wrong = ~_are_equal(read, expected, rounding)
        if not wrong.any():
            return
        index = int(wrong.argmax())
        row, token = (int(axis[index]) for axis in np.nonzero(batch.mask))
        cause = self._cause(_Pair(read, expected), name, batch, tolerance)
        yield (
            f"{location}: {name} is {read[index]:.7g} at counted token {token + 1} of sequence {row + 1}, expected "
            f"{expected[index]:.7g}{cause}; {MEANINGS[name]}"
        )

    def _cause(self, pair: _Pair, name: str, batch: LossBatch, tolerance: float) -> str:
        """Return the likely cause of wrong values, as part of an error; "" if unknown.

        Args:
            pair: The read and the expected values.
            name: The quantity.
            batch: The loss that was read.
            tolerance: As for `check_record`.
        """
        read, expected = pair
        tolerance *= 4  # the candidates are sums, which are rounded once more

        def read_equals(candidate: Array) -> bool:
            is_number = ~np.isnan(candidate.astype(float))
            return bool(is_number.any()) and bool(_are_equal(read, candidate, tolerance)[is_number].all())

        old = batch.logp_old[batch.mask]
        if name == "logp" and read_equals(2 * old - expected):
            return ": it has the opposite sign"
        if name == "logp" and read_equals(old + expected):
            return ": it holds log π itself"
        if name == "logp_rollout" and read_equals(2 * old - expected):
            return ": it has the opposite sign"
        if name == "logp_rollout" and read_equals(old - expected):
            return ": it holds log μ itself"
        current_version = self.of_loss.get("current_version", self.of_loss.get("step"))
        if name == "version" and current_version is not None and read_equals(current_version - expected):
            return ": it is the age of the weights"
        for base in (2, 10):
            if name in ("logp_old", "entropy") and read_equals(expected / np.log(base)):
                return f": it is in logarithms to the base {base}"
        for quantity, values in self.of_tokens.items():
            if quantity != name and read_equals(values):
                return f": these are the values of {quantity}"
        return self._cause_of_order(pair, tolerance)

    def _cause_of_order(self, pair: _Pair, tolerance: float) -> str:
        """Return the order in which the expected values were read, as part of an error; "" if unknown."""
        rows = np.nonzero(self.mask)[0]
        starts = np.flatnonzero(np.diff(rows)) + 1
        read = np.split(pair.read, starts)
        expected = np.split(pair.expected, starts)

        # Values that are shifted by one token within each sequence.
        without_first = np.concatenate([row[1:] for row in read])
        if len(without_first):
            expected_before = np.concatenate([row[:-1] for row in expected])
            if _are_equal(without_first, expected_before, tolerance).all():
                return ": these are the values of the token before"
            without_last = np.concatenate([row[:-1] for row in read])
            expected_after = np.concatenate([row[1:] for row in expected])
            if _are_equal(without_last, expected_after, tolerance).all():
                return ": these are the values of the token after"

        # The same sequences, or the same tokens within each, in another order.
        def means(rows_of_values: list[Array]) -> Array:
            return np.sort([row.astype(float).mean() for row in rows_of_values])

        if len(read) > 1 and _are_equal(means(read), means(expected), tolerance).all():
            return ": these are the values of other sequences or positions; one order holds for all columns"
        return ""

    def _sequence_differences(
        self, batch: LossBatch, name: str, expected: Array, tolerance: float
    ) -> Iterator[str]:
        """Describe the difference of a quantity per sequence."""
        location = f"{self.label}, column {name}"
        values = getattr(batch, name)
        if values is None:
            yield (
                f"{location}: it is missing, or null for a sequence, though {name} is expected; {MEANINGS[name]}"
            )
            return
        if name == "group":
            yield from self._group_differences(np.asarray(values), expected)
            return
        wrong = ~_are_equal(np.asarray(values), expected, tolerance)
        if wrong.any():
            row = int(wrong.argmax())
            yield (
                f"{location}: {name} is {values[row]:g} of sequence {row + 1}, expected {expected[row]:g}; "
                f"{MEANINGS[name]}"
            )

    def _group_differences(self, values: Array, expected: Array) -> Iterator[str]:
        """Describe the first two sequences that share a group but should not, or the other way round."""
        share = values[:, None] == values[None]
        wrong = share != (expected[:, None] == expected[None])
        if wrong.any():
            first, second = (int(axis[0]) for axis in np.nonzero(wrong))
            text = "share a group" if share[first, second] else "are in two groups"
            yield (
                f"{self.label}, column group: sequences {first + 1} and {second + 1} {text}, and the opposite was "
                f"expected; {MEANINGS['group']}"
            )


def _group_differences_between_losses(
    batches: Sequence[LossBatch], expected: Sequence[_Expected]
) -> Iterator[str]:
    """Describe the first number of a generated batch that is another group's in a later loss of it.

    Args:
        batches: The losses that were read, which do not differ by themselves.
        expected: The expected ones.
    """
    numbers: dict[tuple[int, float], tuple[float, str]] = {}
    groups: dict[tuple[int, float], tuple[float, str]] = {}
    for batch, loss in zip(batches, expected, strict=True):
        generation = loss.of_loss.get("generation")
        if generation is None or "group" not in loss.of_sequences:
            continue
        pairs = zip(np.asarray(batch.group).tolist(), loss.of_sequences["group"].tolist(), strict=True)
        for read, group in pairs:
            known_group, label = groups.setdefault((generation, read), (group, loss.label))
            known_number, label_of_number = numbers.setdefault((generation, group), (read, loss.label))
            if known_group != group:
                yield (
                    f"{loss.label}, column group: {read:g} is another group than in {label}, of the same generated "
                    f"batch; {MEANINGS['group']}"
                )
                return
            if known_number != read:
                yield (
                    f"{loss.label}, column group: a group that is {known_number:g} in {label_of_number}, of the same "
                    f"generated batch, is {read:g}; {MEANINGS['group']}"
                )
                return


def _values_of(batch: LossBatch, name: str) -> Array | None:
    """Return a quantity per token of a loss, (batch, time); None if it was not recorded."""
    if name == "logp":
        return batch.logp if batch.has_logp else None
    if name == "version":
        latest = batch.step if batch.current_version is None else batch.current_version
        return None if batch.lag is None or latest is None else latest - batch.lag
    return getattr(batch, "token" if name == "tokens" else name)


def _as_array(values: Any) -> Array:
    """Return a tensor of any type, an array, a list or a number as an array."""
    if hasattr(values, "detach"):
        tensor = values.detach().cpu()
        values = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return np.asarray(values)


def _are_equal(read: Array, expected: Array, tolerance: float) -> Array:
    """Compare values elementwise, up to rounding; NaN equals NaN."""
    read, expected = read.astype(float), expected.astype(float)
    close = np.abs(read - expected) <= tolerance * np.maximum(1.0, np.abs(expected))
    return close | (np.isnan(read) & np.isnan(expected))
