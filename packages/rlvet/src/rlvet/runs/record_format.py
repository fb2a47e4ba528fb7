"""The format of a record: the names of its files, their columns, and their metadata.

docs/audit.md describes it. `bandpo.audit.Recorder` writes it; a test compares its description of the format.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from rlvet.errors import MissingPackage

FORMAT = 4
"""The version of the format. Files of other versions are not read."""

META = b"bandpo"
"""The key of the metadata, JSON, in a file's schema, and in a batch whose method is not that of the schema."""

REQUIRED_COLUMNS = ("step", "version", "advantages", "logp_old", "log_ratio", "log_weight", "entropy")
"""The columns that every file must have. The others of `record_schema` are optional."""

FILE_NAME = re.compile(r"tokens-(\d+)-(\d+)\.arrow")
"""The name of a file: the number of the process, and the number of files that it opened before."""


def import_pyarrow() -> Any:
    """Import pyarrow, which reads and writes records.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        importlib.import_module("pyarrow.ipc")
        return importlib.import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "records of tokens need pyarrow: in a clone of the repository, pip install './packages/rlvet[records]'"
        ) from error


def record_schema(dtype: str) -> Any:
    """Return the schema of a record. Each row is a sequence, and lists have one value per counted token.

    Args:
        dtype: The type of log-probabilities, ``float32`` or ``float16``.
    """
    pa = import_pyarrow()
    log_probabilities = pa.list_(getattr(pa, dtype)())
    return pa.schema(
        {
            "step": pa.int64(),
            "version": pa.list_(pa.int64()),
            "advantages": pa.list_(pa.float32()),
            "logp_old": log_probabilities,
            "log_ratio": log_probabilities,
            "log_weight": log_probabilities,
            "entropy": pa.list_(pa.float16()),
            "token": pa.list_(pa.int32()),
            "position": pa.list_(pa.int32()),
            "generation": pa.int64(),
            "update": pa.int64(),
            "group": pa.int64(),
            "reward": pa.float32(),
            "truncated": pa.bool_(),
        }
    )
