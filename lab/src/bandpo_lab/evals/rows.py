"""Rows of JSONL and parquet files, and what they hold in the place of a prompt or an answer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

from bandpo.errors import FileProblem, InvalidValue
from bandpo.runs.files import read_jsonl
from bandpo_lab.evals.extraction import extract
from bandpo_lab.file_models import read_json
from bandpo_lab.files import digest


class TextPart(BaseModel):
    """A part of a message, in OpenAI's form; other parts, such as images, are refused."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart]


_PROMPT = TypeAdapter(str | list[Message])


def read_prompt(value: Any) -> str | list[dict[str, str]]:
    """A prompt as text, or as messages of `role` and `content`, whose parts are put together.

    Raises:
        ValueError: Neither text nor messages of text.

    >>> read_prompt([{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}])
    [{'role': 'user', 'content': '1+1?'}]
    """
    try:
        prompt = _PROMPT.validate_python(value, strict=True)
    except ValidationError as error:
        raise InvalidValue(f"{value!r:.80} is neither text nor messages of text") from error
    if isinstance(prompt, str):
        return prompt
    return [
        {
            "role": message.role,
            "content": message.content
            if isinstance(message.content, str)
            else "".join(part.text for part in message.content),
        }
        for message in prompt
    ]


_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
_WHOLE = re.compile(r"(-?\d+)\.0+")


def read_answer(value: Any) -> str:
    r"""The answer in the forms that data sets use: numbers, lists, worked solutions, verl's reward model.

    A number is written out, without an exponent. The answers of a list are all asked for, in any order. An empty text
    stands for no answer.

    Raises:
        ValueError: A value that is no answer, such as true.

    >>> read_answer(27.0), read_answer("5 + 5 = 10\n#### 1,234"), read_answer(r"So $\boxed{\frac{1}{2}}$.")
    ('27', '1234', '\\frac{1}{2}')
    """
    if isinstance(value, Mapping):
        value = value.get("ground_truth")
    if isinstance(value, list | tuple):
        return ", ".join(filter(None, map(read_answer, value)))
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidValue(f"{value} is no answer")
    if isinstance(value, float):
        value = format(Decimal(repr(value)), "f")
    text = "" if value is None else str(value).strip()
    if "####" in text or "\\boxed{" in text:
        extracted = extract(text)
        text = "" if extracted is None else extracted.text.strip()
    while len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def read_rows(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of a ``.jsonl`` or ``.parquet`` file, all or the first; blank lines are no rows.

    Raises:
        FileProblem: No such file.
        ValueError: Another suffix, a line that is no JSON object, named by its number, or a prepared file that is not
            what `bandpo-lab data prepare` wrote.
    """
    if not path.exists():
        raise FileProblem(f"{path} does not exist")
    check_prepared(path)
    if path.suffix in (".jsonl", ".json"):  # verl's name for the same
        return [row for _, row in islice(read_jsonl(path, growing=False, parse=_parse), limit)]
    if path.suffix != ".parquet":
        raise InvalidValue(f"{path} must be a .parquet or .jsonl file")
    import pyarrow.parquet

    try:
        return list(islice(_parquet_rows(path), limit))
    except (pyarrow.ArrowException, OSError, ArithmeticError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} cannot be read as parquet: {error!s:.300}") from error


LARGEST_PARQUET = 2**30
"""Bytes of a parquet file's columns that are read, once they are decompressed."""

MOST_PARQUET_ROWS = 2**21
"""Rows of a parquet file that are read."""

MOST_PARQUET_COLUMNS = 1000
"""Columns of a parquet file that are read."""


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a parquet file within the limits.

    Raises:
        ValueError: if a limit is met; the message names it.
    """
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
    sizes = [
        metadata.row_group(group).column(column).total_uncompressed_size
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    ]
    if sum(sizes) > LARGEST_PARQUET:
        raise InvalidValue(
            f"{path} has {sum(sizes) / 2**20:,.0f} MiB once it is decompressed, and at most "
            f"{LARGEST_PARQUET / 2**20:,.0f} are read; give a part of it"
        )
    # A text that is stored once may stand in any number of rows.
    largest = max(sizes, default=1)
    rows_at_once = max(1, min(2**16, 2**24 // max(largest, 1)))
    most = min(LARGEST_PARQUET, max(2**27, MOST_REPETITION * sum(sizes)))
    total = 0
    for batch in file.iter_batches(rows_at_once):
        total += batch.nbytes
        if total > most:
            raise InvalidValue(
                f"{path} has more than {most / 2**20:,.0f} MiB in its rows, the limit for a file with "
                f"{sum(sizes) / 2**20:,.1f} MiB in its columns; give a part of it"
            )
        yield from batch.to_pylist()


MOST_REPETITION = 16
"""How many times the bytes of its columns a file may hold in its rows, beyond 128 MiB: a text may be stored once for
many rows."""

LARGEST_FOOTER = 2**24
"""Bytes of a text, and entries of a list, in the footer of a parquet file."""


def check_prepared(path: Path) -> None:
    """Compare a file in a folder of `bandpo-lab data prepare` with the digest in the manifest there.

    Raises:
        ValueError: if they differ, or the manifest cannot be read.
    """
    manifest = path.absolute().parent.parent / "manifest.json"
    if path.suffix != ".parquet" or not manifest.is_file():
        return
    entry = read_json(manifest).get(path.stem)
    digests = entry.get("sha256") if isinstance(entry, dict) else None
    expected = digests.get(path.absolute().parent.name) if isinstance(digests, dict) else None
    if expected is not None and expected != digest(path):
        raise InvalidValue(
            f"{path} has changed since it was prepared, as {manifest.name} in its folder says: prepare it again, or "
            "move it to another folder"
        )


def _parse(line: bytes) -> Any:
    try:
        # A strict parser: Python's own accepts half a surrogate pair or a NaN, which could not be written again.
        return from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidValue(str(error).replace("at line 1 column", "in column")) from error
