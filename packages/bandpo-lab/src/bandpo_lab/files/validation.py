"""Read JSON and YAML files, and validate them with pydantic; each error is one line that names the key."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from bandpo_lab.errors import InvalidValue, did_you_mean, error_about
from bandpo_lab.files.reading import json_of, yaml_of

T = TypeVar("T")


class FileModel(BaseModel):
    """A pydantic model of a file written by hand, which refuses unknown keys."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, raw: Any) -> Any:
        for key in raw if isinstance(raw, Mapping) else ():
            if key not in cls.model_fields:
                raise InvalidValue(f"unknown key {key!r}{did_you_mean(key, cls.model_fields)}")
        return raw


def validate_as(kind: type[T], raw: Any, name: str) -> T:
    """Validate the content of a file and return it as a type, such as a model or a dataclass.

    Args:
        kind: The type.
        raw: The content.
        name: The name of the file, or of a part of it, for error messages.

    Raises:
        ValueError: Keys are missing or unknown, or values have a wrong type; there is a message for each.

    >>> validate_as(list[int], 3, "run.yaml")
    Traceback (most recent call last):
    rlvet.errors.InvalidValue: run.yaml: Input should be a valid list, got 3
    """
    try:
        return _adapter(kind).validate_python(raw)
    except ValidationError as error:
        messages = [f"{name}: {_message(details)}" for details in error.errors()]
        raise error_about(InvalidValue, messages) from error


_adapter: Any = functools.cache(TypeAdapter)


def _message(details: Any) -> str:
    """Return the message for one of pydantic's errors, with the key and the value."""
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] not in ("missing", "value_error"):
        message += f", got {details['input']!r:.60}"
    location = ".".join(map(str, details["loc"]))
    return f"{location}: {message}" if location else message


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, which is read in the process with limits of `rlvet.runs.gate`.

    Raises:
        ValueError: The file is not valid JSON, is not an object, or a limit is met.
    """
    return validate_as(dict[str, Any], json_of(path), str(path))


SEAL = "sha256"
"""The key with the digest of an object, in the object itself."""


def content_digest(content: Mapping[str, Any]) -> str:
    """Return the digest of an object without the key `SEAL`.

    >>> content_digest({"n": 4, "seed": 0}) == content_digest({"seed": 0, "n": 4, "sha256": "of another"})
    True
    """
    unsealed = {key: value for key, value in content.items() if key != SEAL}
    return hashlib.sha256(json.dumps(unsealed, sort_keys=True).encode()).hexdigest()


def with_seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with the digest of its content, so that `read_sealed_json` detects changes."""
    return {SEAL: content_digest(content), **{key: value for key, value in content.items() if key != SEAL}}


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file that was written `with_seal`, without the digest.

    Raises:
        ValueError: The file is not valid JSON, or its content does not have the digest.
    """
    content = read_json(path)
    if content.pop(SEAL, None) != content_digest(content):
        raise InvalidValue(
            f"{path} has changed since it was written, or was not written by bandpo-lab: restore it, or make it again"
        )
    return content


def read_yaml(text: str | bytes, name: str) -> dict[str, Any]:
    """Return the keys and values of a YAML file; an empty file has none, and dates are texts.

    It is read in the process with limits of `rlvet.runs.gate`.

    Args:
        text: The content of the file.
        name: The name of the file, for error messages.

    Raises:
        ValueError: The file is not valid YAML, does not hold keys, or a limit is met.

    >>> read_yaml("seed: 1", "run.yaml")
    {'seed': 1}
    """
    content = yaml_of(name, text) or {}
    if not isinstance(content, dict):
        raise InvalidValue(f"{name} must hold `key: value` lines, got a {type(content).__name__}")
    return content
