"""The format of a record: the names of its files, their columns, and their metadata.

docs/audit.md describes it. `bandpo.audit.Recorder` writes it; a test compares its description of the format.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from rlvet.errors import MissingPackage

FORMAT = 5
"""The version of the format."""

READ_FORMATS = (4, FORMAT)
"""The versions that are read. Version 4 has no column ``current_version`` or ``collision``, and no ``version_at``.
Files of other versions raise an error."""

VERSION_AT = ("token", "answer", "group")
"""The moments at which the version of the sampling weights may have been read: when each token was sampled, or at the
start of its answer or of its group of answers. If weights change within an answer, only the first gives the age of each
token; the others give an upper bound of it."""

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
            "current_version": pa.int64(),
            "collision": pa.list_(pa.float32()),
        }
    )
