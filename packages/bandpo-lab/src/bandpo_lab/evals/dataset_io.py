"""Read the rows of JSONL and parquet files, and the prompts and answers in them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from bandpo_lab.errors import FileProblem, InvalidValue
from bandpo_lab.evals.extraction import extract
from bandpo_lab.files.reading import rows_of
from bandpo_lab.files.validation import read_json
from bandpo_lab.files.writing import digest


class TextPart(BaseModel):
    """A text part of a message, in OpenAI's format; other parts, such as images, are refused."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart]


_PROMPT = TypeAdapter(str | list[Message])


def read_prompt(value: Any) -> str | list[dict[str, str]]:
    """Return a prompt as a text, or as messages with `role` and `content`; the parts of a message are joined.

    Raises:
        ValueError: The value is neither a text nor messages of text.

    >>> read_prompt([{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}])
    [{'role': 'user', 'content': '1+1?'}]
    """
    try:
        prompt = _PROMPT.validate_python(value, strict=True)
    except ValidationError as error:
        raise InvalidValue(f"{value!r:.80} is neither text nor messages of text") from error
    if isinstance(prompt, str):
        return prompt
    messages = []
    for message in prompt:
        content = message.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        messages.append({"role": message.role, "content": content})
    return messages


_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
_WHOLE_NUMBER = re.compile(r"(-?\d+)\.0+")


def read_answer(value: Any) -> str:
    r"""Return the answer in a column of a data set: a number, a list, a worked solution or verl's reward model.

    A number is written without an exponent. All answers of a list are required, in any order.

    Returns:
        The answer; an empty text if there is none.

    Raises:
        ValueError: The value is not an answer, such as true.

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
    whole_number = _WHOLE_NUMBER.fullmatch(text)
    return whole_number[1] if whole_number else text


def read_rows(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a ``.jsonl``, ``.json`` or ``.parquet`` file; blank lines are skipped.

    Args:
        path: The file.
        limit: The number of rows to read from the start; by default all.

    Raises:
        FileProblem: The file does not exist.
        ValueError: The file has another suffix, a line is not a JSON object, or the file was changed after
            `bandpo-lab data prepare` wrote it.
    """
    if not path.exists():
        raise FileProblem(f"{path} does not exist")
    check_prepared(path)
    return rows_of(path, limit)


def check_prepared(path: Path) -> None:
    """Check that a file of `bandpo-lab data prepare` has the digest in its manifest; other files pass.

    Raises:
        ValueError: The digests differ, or the manifest cannot be read.
    """
    manifest = path.absolute().parent.parent / "manifest.json"
    if path.suffix != ".parquet" or not manifest.is_file():
        return
    entry = read_json(manifest).get(path.stem)
    digests = entry.get("sha256") if isinstance(entry, dict) else None
    expected = digests.get(path.absolute().parent.name) if isinstance(digests, dict) else None
    if expected is not None and expected != digest(path):
        raise InvalidValue(
            f"{path} has changed since it was prepared (its digest is not the one in {manifest.name}): prepare it "
            "again, or move it to another folder"
        )
