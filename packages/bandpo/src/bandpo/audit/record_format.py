"""The format of a record: the columns of its files, and their metadata.

docs/audit.md describes it. `bandpo.audit.Recorder` writes it with this module, and `rlvet` reads it with its
own; a test compares both.
"""

from __future__ import annotations

import importlib
from typing import Any

from bandpo.core.errors import MissingPackage

FORMAT = 5
"""The version of the format."""

VERSION_AT = ("token", "answer", "group")
"""The moments at which the version of the sampling weights may have been read: when each token was sampled, or at the
start of its answer or of its group of answers. If weights change within an answer, only the first gives the age of each
token; the others give an upper bound of it."""

META = b"bandpo"
"""The key of the metadata, JSON, in a file's schema, and in a batch whose method is not that of the schema."""


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
            "records of tokens need pyarrow: in a clone of bandpo, pip install ./packages/bandpo"
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
            "current_version": pa.int64(),
            "collision": pa.list_(pa.float32()),
        }
    )
