"""Read the state of a trainer of transformers, an object with its log."""

from __future__ import annotations

from rlvet.runs.formats._format import Format
from rlvet.runs.formats.json_object import read_json

FORMAT = Format(
    kind="a trainer's state",
    patterns=("trainer_state.json",),
    read=read_json,
    example="trainer_state.json",
    described="`trainer_state.json`, which is written with each checkpoint",
    written_by="TRL, ms-swift",
)
