"""Read files that a stranger may have written: JSON, YAML, and rows of JSONL and parquet.

Each public function calls a reader in the process with limits of `rlvet.runs.gate`, and returns plain values. This
module imports little, since a new process imports it before it reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from bandpo_lab.errors import FileProblem, InvalidValue
from rlvet.runs import gate
from rlvet.runs.config_limits import check_yaml
from rlvet.runs.files import check_file, read_jsonl
from rlvet.runs.limits import LARGEST_TEXT

VALUES_PER_ANSWER = 2**16
"""The number of values after which the rows so far are sent, far below the limit on one answer of the process."""

LARGEST_PARQUET = 2**30
"""The largest size of a parquet file's columns after decompression, in bytes."""

MOST_PARQUET_ROWS = 2**21
"""The largest number of rows of a parquet file."""

MOST_PARQUET_COLUMNS = 1000
"""The largest number of columns of a parquet file."""

MOST_REPETITION = 16
"""The largest size of a file's rows, as a multiple of the size of its columns, for rows of more than 128 MiB.

Rows can be larger than columns because a value may be stored once for many rows.
"""

LARGEST_FOOTER = 2**24
"""The largest text, in bytes, and the longest list, in entries, in the footer of a parquet file."""


# --- Called anywhere ---


def json_of(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: The file is not valid JSON, or a limit is met; the message names the file.
        OSError: The file cannot be read from the disk.
    """
    return gate.answer_of(_read_json, path)


def yaml_of(name: str, text: str | bytes) -> Any:
    r"""Return the content of a YAML text; dates are texts.

    Args:
        name: The name of the file, for error messages.
        text: Its content.

    Raises:
        ValueError: The text is not valid YAML, or a limit is met; the message has the name.

    >>> yaml_of("a.yaml", "seed: 1\nsince: 2026-01-01")
    {'seed': 1, 'since': '2026-01-01'}
    """
    return gate.answer_of(_read_yaml, name, text)


def lines_of(path: Path, *, growing: bool = True) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSONL file with the number of their line, see `rlvet.runs.files.read_jsonl`.

    Raises:
        ValueError: A line is no JSON object, or a limit is met; the message names the file and the line.
    """
    yield from chain.from_iterable(gate.answers_of(_read_lines, path, growing))


def rows_of(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a ``.jsonl``, ``.json`` or ``.parquet`` file; blank lines are skipped.

    Args:
        path: The file.
        limit: The number of rows to read from the start; by default all.

    Raises:
        FileProblem: The file does not exist.
        ValueError: The file has another suffix, a line is not a JSON object, or a limit is met.
    """
    if not path.exists():
        raise FileProblem(f"{path} does not exist")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise InvalidValue(f"{path} must be a .parquet or .jsonl file")
    return [*chain.from_iterable(gate.answers_of(_read_rows, path, limit))]


# --- Called in the process with limits ---


def _read_json(path: Path) -> Any:
    check_file(path, LARGEST_TEXT)
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{path} cannot be read: {error}") from error


def _read_yaml(name: str, text: str | bytes) -> Any:
    import yaml

    check_yaml(text, name)
    # libyaml's loader, where it is installed, is ten times faster.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        content = yaml.load(text, Loader=loader)  # noqa: S506  (a safe loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidValue(f"{name} is no valid YAML: {' '.join(str(error).split())}") from error
    return _plain(content)


def _read_lines(path: Path, growing: bool) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    return _in_answers(read_jsonl(path, growing=growing))


def _read_rows(path: Path, limit: int | None) -> Iterator[list[dict[str, Any]]]:
    if path.suffix in (".jsonl", ".json"):  # verl names JSONL files .json
        rows = (row for _, row in read_jsonl(path, growing=False, parse=_parse))
    else:
        rows = _parquet_rows(path)
    return _in_answers(islice(rows, limit))


def _in_answers(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield values in lists of about `VALUES_PER_ANSWER` values with those that they contain."""
    answer: list[Any] = []
    count = 0
    for value in values:
        answer.append(value)
        count += _count(value)
        if count >= VALUES_PER_ANSWER:
            yield answer
            answer = []
            count = 0
    if answer:
        yield answer


def _count(value: Any) -> int:
    """Return the number of values in a value, itself included."""
    if isinstance(value, dict):
        return 1 + sum(map(_count, value.values()))
    if isinstance(value, list | tuple):
        return 1 + sum(map(_count, value))
    return 1


def _plain(value: Any) -> Any:
    """Return a value with texts for what JSON does not have, such as dates and decimal numbers."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, set):
        return {_plain(item) for item in value}
    return str(value)


def _parse(line: bytes) -> Any:
    """Parse a line of JSON strictly: Python's parser accepts half a surrogate pair or a NaN, which JSON cannot hold."""
    from pydantic_core import from_json

    try:
        return from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidValue(str(error).replace("at line 1 column", "in column")) from error


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file, within the limits on its size.

    Raises:
        ValueError: The file is damaged or exceeds a limit; the message names it.
    """
    import pyarrow

    check_file(path, LARGEST_PARQUET)
    try:
        for row in _checked_parquet_rows(path):
            yield _plain(row)
    except (pyarrow.ArrowException, OSError, ArithmeticError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} cannot be read as parquet: {error!s:.300}") from error


def _checked_parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(
        path,
        page_checksum_verification=True,
        thrift_string_size_limit=LARGEST_FOOTER,
        thrift_container_size_limit=LARGEST_FOOTER,
    )
    metadata = file.metadata
    chunks = metadata.num_row_groups * metadata.num_columns
    limit = ""
    if metadata.num_columns > MOST_PARQUET_COLUMNS:
        limit = f"{metadata.num_columns:,} columns, and at most {MOST_PARQUET_COLUMNS:,} are read"
    elif metadata.num_rows > MOST_PARQUET_ROWS:
        limit = f"{metadata.num_rows:,} rows, and at most {MOST_PARQUET_ROWS:,} are read"
    elif chunks > MOST_PARQUET_ROWS:
        limit = f"{chunks:,} parts of columns, and at most {MOST_PARQUET_ROWS:,} are read"
    if limit:
        raise InvalidValue(f"{path} has {limit}; give a part of it")
    sizes = []
    for group in range(metadata.num_row_groups):
        columns = metadata.row_group(group)
        sizes += [columns.column(column).total_uncompressed_size for column in range(metadata.num_columns)]
    column_bytes = sum(sizes)
    if column_bytes > LARGEST_PARQUET:
        raise InvalidValue(
            f"{path} has {column_bytes / 2**20:,.0f} MiB once it is decompressed, and at most "
            f"{LARGEST_PARQUET / 2**20:,.0f} are read; give a part of it"
        )

    # A value that is stored once may be in any number of rows, so the bytes of the rows are limited as well.
    largest = max(sizes, default=1)
    rows_per_batch = max(1, min(2**16, 2**24 // max(largest, 1)))
    most_bytes = min(LARGEST_PARQUET, max(2**27, MOST_REPETITION * column_bytes))
    row_bytes = 0
    for batch in file.iter_batches(rows_per_batch):
        row_bytes += batch.nbytes
        if row_bytes > most_bytes:
            raise InvalidValue(
                f"{path} has more than {most_bytes / 2**20:,.0f} MiB in its rows, the limit for a file with "
                f"{column_bytes / 2**20:,.1f} MiB in its columns; give a part of it"
            )
        yield from batch.to_pylist()
