"""Read wandb's ``run-….wandb`` with the standard library.

wandb's package has no Python reader of its own files since its core was rewritten in Go. They are protocol buffers,
written as records of a LevelDB log.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlvet.errors import InvalidValue
from rlvet.runs.files import check_file
from rlvet.runs.formats._format import Format, HeldSettings, RawLog
from rlvet.runs.formats._protobuf import Raw, fields, ignore, parse_protobuf, warn
from rlvet.runs.limits import LARGEST_CONFIG, LARGEST_TEXT

BLOCK_SIZE = 2**15
"""The number of bytes in a block of a LevelDB log."""

HEADER_SIZE = 7
"""The number of bytes in the header of a file of wandb, and in the header of each record."""

WHOLE_RECORD = 1
"""The type of a record that is stored in one part."""

FIRST_PART = 2
"""The type of the first part of a record that is stored in several."""

LAST_PART = 4
"""The type of the last part of a record that is stored in several."""


def read_wandb(file: Path) -> Raw:
    """Yield the rows of a run's history from a file ``run-….wandb``, which wandb writes offline and online."""
    for record in _records_once(file):
        for history in fields(record, 2):
            row = {}
            for item in fields(history, 1):
                parts = dict(parse_protobuf(item))
                name = parts.get(1) or parts[2]  # the key, or the nested key
                row[name.decode()] = json.loads(parts[16])
            yield row


def read_settings(file: Path) -> Iterator[HeldSettings]:
    """Yield the settings that a run was given at its start and later on, if there are any."""
    check_file(file, LARGEST_TEXT)
    settings: dict[str, Any] = {}
    size = 0
    for record in _records_once(file, report=ignore):
        configs = fields(record, 5)
        for run in fields(record, 17):
            configs += fields(run, 4)
        for config in configs:
            size += len(config)
            if size > LARGEST_CONFIG:
                raise InvalidValue(f"they have more than {LARGEST_CONFIG:,} bytes")
            for item in fields(config, 1):
                names = fields(item, 2) or fields(item, 1)  # the nested key, or the key
                name = ".".join(part.decode("utf-8", "replace") for part in names)
                settings[name] = json.loads(fields(item, 16)[0])
    # wandb itself adds one of its own to every run.
    if settings.keys() - {"_wandb"}:
        yield HeldSettings("config", settings)


def _records_once(file: Path, report: Callable[[Path, str], None] = warn) -> Iterator[bytes]:
    """Yield the records of a file of wandb, each once.

    wandb numbers the records of a file as it writes them. A record whose number is not above those before it is there
    twice, as after a copy that was begun again, and is left out with a warning: its checksum is right.

    Args:
        file: The file.
        report: The function that is called with the file and a problem.
    """
    highest = 0
    has_warned = False
    for record in _leveldb_records(file, report):
        number = next(iter(fields(record, 1)), highest + 1)
        if number > highest:
            highest = number
            yield record
        elif not has_warned:
            has_warned = True
            report(file, f"record {number} is there twice, and what is repeated is left out")


def _leveldb_records(file: Path, report: Callable[[Path, str], None]) -> Iterator[bytes]:
    """Yield the records of a LevelDB log, after a check of their checksums.

    A record is stored in several parts if it does not fit into its block. A record with a wrong checksum is left out
    with a warning. As its size may be wrong too, reading continues at the next block.

    Args:
        file: The file.
        report: The function that is called with the file and a problem.
    """
    data = file.read_bytes()
    position = HEADER_SIZE
    parts: list[bytes] = []
    has_warned = False
    while position + HEADER_SIZE <= len(data):
        left_in_block = BLOCK_SIZE - position % BLOCK_SIZE
        if left_in_block < HEADER_SIZE:
            position += left_in_block
            continue
        checksum, size, part_type = struct.unpack_from("<IHB", data, position)
        content = data[position + HEADER_SIZE : position + HEADER_SIZE + size]
        if len(content) < size and position + left_in_block >= len(data):
            report(file, "the last record is cut off and is left out")
            return

        if zlib.crc32(content, zlib.crc32(bytes([part_type]))) != checksum:
            if not has_warned:
                report(
                    file, f"a record at byte {position} is damaged, and what follows in its block is left out"
                )
            has_warned = True
            parts.clear()
            position += left_in_block
            continue

        position += HEADER_SIZE + size
        if part_type in (WHOLE_RECORD, FIRST_PART):
            parts.clear()
        elif not parts:
            continue  # a later part of a record whose first part was left out
        parts.append(content)
        if part_type in (WHOLE_RECORD, LAST_PART):
            yield b"".join(parts)
            parts.clear()


def _read(file: Path) -> RawLog:
    """Read the only run of a file."""
    check_file(file, LARGEST_TEXT)
    return RawLog({"": list(read_wandb(file))})


FORMAT = Format(
    kind="wandb's history",
    patterns=("*.wandb",),
    read=_read,
    settings=read_settings,
    example="wandb's run-….wandb",
    described="`run-….wandb`",
    written_by="wandb, for any framework; its package is not needed",
    # wandb writes a file of the same name at each start of a run.
    parts_share=attrgetter("name"),
)
