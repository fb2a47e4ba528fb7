"""`check_record`: a test that what a writer put on the disk is read as the losses that it was given.

A writer is a framework's recorder of docs/record-format.md, or its own dump of batches that `bandpo diagnose` reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bandpo import _checks
from bandpo.errors import InvalidValue, did_you_mean
from bandpo.runs import open_run

if TYPE_CHECKING:
    from bandpo.runs.record import LossBatch

Array = np.ndarray[Any, Any]

TOKEN_COLUMNS = {
    "logp_old": "logp_old",
    "logp": "log_ratio",
    "logp_rollout": "log_weight",
    "advantages": "advantages",
    "entropy": "entropy",
    "tokens": "token",
    "version": "version",
}
"""For each quantity of tokens, the column of a record that holds it; causes before their effects."""

SEQUENCE_COLUMNS = ("group", "reward", "truncated")
"""The quantities of sequences."""

LOSS_COLUMNS = ("step", "generation", "update")
"""The numbers of a whole loss."""

KNOWN = (*TOKEN_COLUMNS, "mask", *SEQUENCE_COLUMNS, *LOSS_COLUMNS)

MEANINGS = {
    "logp": "log_ratio is log π − log π_old, in nats",
    "logp_old": "logp_old is log π_old, in nats",
    "logp_rollout": "log_weight is log π_old − log μ, in nats, and NaN where the engine gave none",
    "advantages": "advantages are those of the loss, one per token or one per sequence",
    "entropy": "entropy is that of π at the token, in nats",
    "tokens": "token is the id of the sampled token",
    "version": "version is the step whose weights sampled, one per token or one per sequence",
    "group": "group is a number that the answers to one prompt share, and those to others do not",
    "reward": "reward is that of the whole sequence, before any baseline",
    "truncated": "truncated is whether the answer was cut off at the length limit",
    "step": "step is the trainer's step",
    "generation": "generation is the number of the generated batch",
    "update": "update is the number of optimiser steps on that batch before this loss",
}
"""What each quantity is, for the end of an error."""

HALF_PRECISION = 2e-3
"""Relative distance of entropies that are kept as float16."""


class _Pair(NamedTuple):
    """A quantity at the counted tokens, as it was read and as it was expected."""

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
    """Check that a record, or batches that a framework dumped, are read as the losses that its writer was given.

    Each loss is described by what `bandpo.Recorder.add` would be given for it, under the same names: tensors, arrays or
    lists. What a loss does not name is not looked at, so a writer without entropies leaves out ``entropy``. Groups may
    have other numbers than those expected; what counts is which sequences share one.

    Args:
        path: What the writer left on the disk, as for `bandpo diagnose`.
        losses: The losses in the order in which they were written. Each has ``logp_old``, and any of ``logp``,
            ``logp_rollout``, ``advantages``, ``mask``, ``entropy``, ``tokens``, ``version``, ``group``, ``reward``,
            ``truncated``, ``step``, ``generation`` and ``update``.
        method: The run's method that the record should name.
        anchor: Whose log-probabilities the bounds surround: ``trainer`` or ``rollout``.
        sampling: The engine's settings that the record should have.
        tolerance: The largest difference that counts as rounding, relative to the larger of 1 and the value. Records
            with log-probabilities in float16 need 2e-3.

    Raises:
        AssertionError: something is missing or other than expected, or the reader warns. The message names the loss,
            the column, both values and what the column should hold.
        ValueError: the path cannot be read at all, as where a required column is missing, which the message names; or a
            loss names something that is not known.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> loss = {"logp_old": [[-1.0, -2.0]], "logp": [[-1.1, -1.8]], "advantages": [0.5], "reward": [1.0]}
    >>> with bandpo.Recorder(folder) as recorder:
    ...     recorder.add(**{name: torch.tensor(values) for name, values in loss.items()})
    >>> check_record(folder, [loss])
    >>> check_record(folder, [loss | {"logp": [[-1.1, -1.9]]}])
    Traceback (most recent call last):
    AssertionError: ...
      loss 1, column log_ratio: logp is -1.8 at counted token 2 of sequence 1, expected -1.9; log_ratio is log π − ...
    """
    _checks.positive("tolerance", tolerance)
    expected = [_Expected(number, loss) for number, loss in enumerate(losses, 1)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = list(open_run(path).batches())
    problems = [f"the reader warns: {warning.message}" for warning in caught]
    if len(batches) != len(expected):
        problems.append(
            f"{len(batches)} losses were read, and {len(expected)} were expected; write each loss as a record batch of "
            "its own, in the order of training"
        )
    for batch, loss in zip(batches, expected, strict=False):
        problems += loss.differences(batch, tolerance)
    settings = {"method": method, "anchor": anchor, "sampling": None if sampling is None else dict(sampling)}
    for name, value in settings.items():
        if value is not None and batches and getattr(batches[0], name) != value:
            problems.append(
                f"{name} is {getattr(batches[0], name)!r}, expected {value!r}; it stands in the schema's metadata, in "
                "the JSON under the key bandpo"
            )
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise AssertionError(f"{path} is not read as the losses that were expected:\n{lines}")


class _Expected:
    """A loss as its writer was given it.

    Args:
        number: Its number, from 1.
        loss: Its quantities, as for `check_record`.

    Raises:
        ValueError: a quantity is not known, or has another shape than the tokens or the sequences.
    """

    def __init__(self, number: int, loss: Mapping[str, Any]):
        self.place = f"loss {number}"
        for name in loss:
            if name not in KNOWN:
                raise InvalidValue(
                    f"{self.place}: {name} is no quantity of a record{did_you_mean(name, KNOWN)}"
                )
        if loss.get("logp_old") is None:
            raise InvalidValue(f"{self.place} lacks logp_old, without which no record can be written")
        arrays = {name: _as_array(values) for name, values in loss.items() if values is not None}
        shape = arrays["logp_old"].shape
        if len(shape) != 2:
            raise InvalidValue(f"{self.place}: logp_old must have the shape (batch, time), got {shape}")
        self.mask: Array = np.ones(shape, bool) if "mask" not in arrays else arrays["mask"] != 0
        self.of_tokens = {
            name: self._at_tokens(name, arrays[name]) for name in TOKEN_COLUMNS if name in arrays
        }
        self.of_sequences = {
            name: self._checked(name, arrays[name], shape[:1]) for name in SEQUENCE_COLUMNS if name in arrays
        }
        self.of_loss = {name: int(arrays[name]) for name in LOSS_COLUMNS if name in arrays}
        self._checked("mask", self.mask, shape)

    def _checked(self, name: str, values: Array, shape: tuple[int, ...]) -> Array:
        if values.shape != shape:
            raise InvalidValue(f"{self.place}: {name} has the shape {values.shape}, expected {shape}")
        return values

    def _at_tokens(self, name: str, values: Array) -> Array:
        """Return the values at the counted tokens; those of a sequence or of the loss hold for all its tokens."""
        shape = self.mask.shape
        if values.shape == shape[:1] or (values.ndim == 2 and values.shape[1] == 1):
            values = values.reshape(-1, 1)
        if name in ("version", "advantages") and values.shape in ((), (shape[0], 1)):
            values = np.broadcast_to(values, shape)
        return self._checked(name, values, shape)[self.mask]

    def differences(self, batch: LossBatch, tolerance: float) -> Iterator[str]:
        """Yield what of a loss that was read is other than expected.

        Args:
            batch: The loss as it was read.
            tolerance: As for `check_record`.
        """
        if batch.bad_sequences:
            yield (
                f"{self.place}: {batch.bad_sequences} sequences hold NaN, an infinite value or a log-probability above "
                "0, and are left out; log-probabilities are logarithms, in nats"
            )
            return
        lengths, expected_lengths = batch.mask.sum(1), self.mask.sum(1)
        if len(lengths) != len(expected_lengths):
            yield (
                f"{self.place}: {len(lengths)} sequences were read, and {len(expected_lengths)} were expected; a row "
                "is a sequence"
            )
            return
        if (lengths != expected_lengths).any():
            row = int((lengths != expected_lengths).argmax())
            yield (
                f"{self.place}, sequence {row + 1}: {lengths[row]} tokens count, and {expected_lengths[row]} were "
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
                yield f"{self.place}, column {name}: it is {text}, expected {expected}; {MEANINGS[name]}"

    def _cause_of_lengths(self, lengths: Array) -> str:
        if (lengths == self.mask.shape[1]).all():
            return ", so that the mask is not applied"
        return ""

    def _token_differences(
        self, batch: LossBatch, name: str, expected: Array, tolerance: float
    ) -> Iterator[str]:
        """Yield how a quantity of tokens differs."""
        column = TOKEN_COLUMNS[name]
        where = f"{self.place}, column {column}"
        values = _values_of(batch, name)
        if values is None:
            needs = ", or step is, which it is read with" if name == "version" else ""
            yield f"{where}: it is missing or null{needs}, though {name} is expected; {MEANINGS[name]}"
            return
        read = values[batch.mask]
        wrong = ~_are_equal(
            read, expected, max(tolerance, HALF_PRECISION) if name == "entropy" else tolerance
        )
        if not wrong.any():
            return
        index = int(wrong.argmax())
        row, token = (int(axis[index]) for axis in np.nonzero(batch.mask))
        cause = self._cause(_Pair(read, expected), name, batch, tolerance)
        yield (
            f"{where}: {name} is {read[index]:.7g} at counted token {token + 1} of sequence {row + 1}, expected "
            f"{expected[index]:.7g}{cause}; {MEANINGS[name]}"
        )

    def _cause(self, pair: _Pair, name: str, batch: LossBatch, tolerance: float) -> str:
        """Return what the values that were read are in place of those expected, as part of an error; "" if unknown.

        Args:
            pair: The quantity.
            name: Its name.
            batch: The loss as it was read.
            tolerance: As for `check_record`.
        """
        read, expected = pair
        tolerance *= 4  # values that come of a sum are rounded once more

        def are(values: Array) -> bool:
            known = ~np.isnan(values.astype(float))
            return bool(known.any()) and bool(_are_equal(read, values, tolerance)[known].all())

        old = batch.logp_old[batch.mask]
        if name == "logp" and are(2 * old - expected):
            return ": it has the other sign"
        if name == "logp" and are(old + expected):
            return ": it holds log π itself"
        if name == "logp_rollout" and are(2 * old - expected):
            return ": it has the other sign"
        if name == "logp_rollout" and are(old - expected):
            return ": it holds log μ itself"
        if name == "version" and "step" in self.of_loss and are(self.of_loss["step"] - expected):
            return ": it is the age of the weights"
        for base in (2, 10):
            if name in ("logp_old", "entropy") and are(expected / np.log(base)):
                return f": it is in logarithms to the base {base}"
        others = (other for other in self.of_tokens if other != name)
        holder = next((other for other in others if are(self.of_tokens[other])), None)
        if holder is not None:
            return f": these are the values of {holder}"
        return self._cause_of_order(pair, tolerance)

    def _cause_of_order(self, pair: _Pair, tolerance: float) -> str:
        """Return where values that were read stand in what was expected, as part of an error; "" if nowhere."""
        rows = np.nonzero(self.mask)[0]
        starts = np.flatnonzero(np.diff(rows)) + 1
        read, expected = np.split(pair.read, starts), np.split(pair.expected, starts)
        for shift, text in ((1, "before"), (-1, "after")):
            ours = np.concatenate([row[1:] if shift > 0 else row[:-1] for row in read])
            theirs = np.concatenate([row[:-1] if shift > 0 else row[1:] for row in expected])
            if len(ours) and _are_equal(ours, theirs, tolerance).all():
                return f": these are the values of the token {text}"

        def means(rows_of_values: list[Array]) -> Array:
            return np.sort([row.astype(float).mean() for row in rows_of_values])

        if len(read) > 1 and _are_equal(means(read), means(expected), tolerance).all():
            return ": these are the values of other sequences or positions; one order holds for all columns"
        return ""

    def _sequence_differences(
        self, batch: LossBatch, name: str, expected: Array, tolerance: float
    ) -> Iterator[str]:
        """Yield how a quantity of sequences differs."""
        where = f"{self.place}, column {name}"
        values = getattr(batch, name)
        if values is None:
            yield (
                f"{where}: it is missing, or null for a sequence, though {name} is expected; {MEANINGS[name]}"
            )
            return
        if name == "group":
            yield from self._group_differences(np.asarray(values), expected)
            return
        wrong = ~_are_equal(np.asarray(values), expected, tolerance)
        if wrong.any():
            row = int(wrong.argmax())
            yield (
                f"{where}: {name} is {values[row]:g} of sequence {row + 1}, expected {expected[row]:g}; "
                f"{MEANINGS[name]}"
            )

    def _group_differences(self, values: Array, expected: Array) -> Iterator[str]:
        share = values[:, None] == values[None]
        wrong = share != (expected[:, None] == expected[None])
        if wrong.any():
            row, other = (int(axis[0]) for axis in np.nonzero(wrong))
            text = "share a group" if share[row, other] else "are in two groups"
            yield (
                f"{self.place}, column group: sequences {row + 1} and {other + 1} {text}, and the opposite was "
                f"expected; {MEANINGS['group']}"
            )


def _values_of(batch: LossBatch, name: str) -> Array | None:
    """Return a quantity of the tokens of a loss, (batch, time); None where it was not recorded."""
    if name == "logp":
        return batch.logp if batch.has_logp else None
    if name == "version":
        return None if batch.lag is None or batch.step is None else batch.step - batch.lag
    return getattr(batch, "token" if name == "tokens" else name)


def _as_array(values: Any) -> Array:
    """Return a tensor of any type, an array, a list or a number as an array."""
    if hasattr(values, "detach"):
        tensor = values.detach().cpu()
        values = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return np.asarray(values)


def _are_equal(read: Array, expected: Array, tolerance: float) -> Array:
    """Return for each value whether it is the expected one but for rounding; NaN equals NaN."""
    read, expected = read.astype(float), expected.astype(float)
    close = np.abs(read - expected) <= tolerance * np.maximum(1.0, np.abs(expected))
    return close | (np.isnan(read) & np.isnan(expected))
