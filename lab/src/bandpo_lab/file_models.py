"""What stands in a file, checked by pydantic; each error is one line that names the place."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from bandpo.errors import InvalidValue, did_you_mean

T = TypeVar("T")


class FileModel(BaseModel):
    """The keys that a file written by hand may have."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, raw: Any) -> Any:
        for key in raw if isinstance(raw, Mapping) else ():
            if key not in cls.model_fields:
                raise InvalidValue(f"unknown key {key!r}{did_you_mean(key, cls.model_fields)}")
        return raw


def checked(kind: type[T], raw: Any, what: str) -> T:
    """What a file holds, as a model or a dataclass.

    ``what`` names the file, or the part of it, in errors.

    Raises:
        ValueError: keys that are missing or unknown, or values of another type, all in one line.

    >>> checked(list[int], 3, "run.yaml")
    Traceback (most recent call last):
    bandpo.errors.InvalidValue: run.yaml: Input should be a valid list, got 3
    """
    try:
        return _adapter(kind).validate_python(raw)
    except ValidationError as error:
        raise InvalidValue("; ".join(f"{what}: {_fault(fault)}" for fault in error.errors())) from error


_adapter: Any = functools.cache(TypeAdapter)


def _fault(fault: Any) -> str:
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] not in ("missing", "value_error"):
        message += f", got {fault['input']!r:.60}"
    return ": ".join(filter(None, (".".join(map(str, fault["loc"])), message)))


def read_json(path: Path) -> dict[str, Any]:
    """The keys and values of a JSON file.

    Raises:
        ValueError: It is no JSON, or holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{path} cannot be read: {error}") from error
    return checked(dict[str, Any], content, str(path))


SEAL = "sha256"
"""The key of a sealed object's digest."""


def content_digest(content: Mapping[str, Any]) -> str:
    """Return the digest of an object, but for its seal.

    >>> content_digest({"n": 4, "seed": 0}) == content_digest({"seed": 0, "n": 4, "sha256": "of another"})
    True
    """
    rest = {key: value for key, value in content.items() if key != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def with_seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with the digest of its content, by which `read_sealed_json` notices a change."""
    return {SEAL: content_digest(content), **{key: value for key, value in content.items() if key != SEAL}}


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that was written with its seal, without it.

    Raises:
        ValueError: if it is no JSON, or is not what was written.
    """
    content = read_json(path)
    if content.pop(SEAL, None) != content_digest(content):
        raise InvalidValue(
            f"{path} has changed since it was written, or was not written by bandpo-lab: restore it, or make it again"
        )
    return content


def read_yaml(text: str | bytes, what: str) -> dict[str, Any]:
    """The keys and values of a YAML file; an empty one has none.

    Args:
        text: Its content.
        what: Names it in errors.

    Raises:
        ValueError: it is no valid YAML, or holds something else.

    >>> read_yaml("seed: 1", "run.yaml")
    {'seed': 1}
    """
    try:
        content = yaml.safe_load(text) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{what} is no valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise InvalidValue(f"{what} must hold `key: value` lines, got a {type(content).__name__}")
    return content
