"""The output of ``--json``, which agrees with the schemas in ``skill/rlvet/assets``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

SCHEMA_IDS = {
    "diagnose": "urn:rlvet:diagnose:1",
    "diff": "urn:rlvet:diff:1",
    "lint": "urn:rlvet:lint:1",
}
"""The id of the schema of each command. Its last part is the version, which grows when a field changes."""


def json_text(command: str, output: Mapping[str, Any]) -> str:
    r"""Return an output as strict JSON, with the id of its schema as the first field.

    The text is ASCII, so that no control character in a log's keys reaches the terminal. NaN and infinity, which JSON
    does not have, become null, and a value of another type, such as a date in a configuration, becomes text.

    Args:
        command: The command, a key of `SCHEMA_IDS`.
        output: The fields of the output.

    >>> print(json_text("lint", {"files": [], "errors": ["π"]}))
    {
     "schema": "urn:rlvet:lint:1",
     "files": [],
     "errors": [
      "\u03c0"
     ]
    }
    """
    fields = {"schema": SCHEMA_IDS[command], **output}
    return json.dumps(_without_constants(fields), indent=1, allow_nan=False, default=str)


def _without_constants(value: Any) -> Any:
    """Return a value with None for NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _without_constants(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_constants(item) for item in value]
    return value
