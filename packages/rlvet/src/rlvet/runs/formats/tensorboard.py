"""Read TensorBoard's events, protocol buffers in TFRecords, with the standard library.

Beside scalars, they may hold the settings of the run: transformers writes its arguments as a text, and ``add_hparams``,
with which NeMo-RL and ROLL write theirs, makes a file with them in a folder beside the log.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlvet.runs.files import check_file
from rlvet.runs.formats._format import Format, HeldSettings, RawLog
from rlvet.runs.formats._protobuf import Raw, fields, ignore, parse_protobuf, warn
from rlvet.runs.limits import LARGEST_CONFIG, LARGEST_TEXT

LARGEST_SCALARS = 2**16
"""The largest size in bytes of an event whose checksum is always computed. Larger events contain images, texts or
graphs; their checksum is only computed if they also contain a scalar."""

TEXTS_OF_SETTINGS = (b"args/text_summary", b"config/text_summary", b"args", b"config")
"""The tags of texts with the settings of a run. Only torch's and tensorboardX's writers add a second part."""

TEXT_OF_MODEL = b"model_config/text_summary"
"""The tag of the text with the configuration of the model, which has its name."""

HYPERPARAMETERS = b"_hparams_/session_start_info"
"""The tag of the settings that ``add_hparams`` writes."""

HELD_TAGS = (*TEXTS_OF_SETTINGS, TEXT_OF_MODEL, HYPERPARAMETERS)
"""The tags of all that is read beside scalars."""


def read_tensorboard(file: Path) -> Raw:
    """Yield the scalars of one event file, one row per step."""
    rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for event, checksum in _tfrecords(file):
        is_small = len(event) <= LARGEST_SCALARS
        if is_small and _masked_crc32c(event) != checksum:
            warn(file, "an event is damaged and is left out")
            continue
        step, scalars = _scalars_of(event)
        if scalars and not is_small and _masked_crc32c(event) != checksum:
            warn(file, "an event is damaged and is left out")
            continue
        if scalars:
            rows[step].update(scalars)
    for step in sorted(rows):
        yield {**rows[step], "step": step}


def _scalars_of(event: bytes) -> tuple[int, dict[str, float]]:
    """Return the step of an event, and its scalars by name."""
    scalars = {}
    for summary in fields(event, 5):
        for message in fields(summary, 1):
            value = dict(parse_protobuf(message))
            scalar = _scalar(value)
            if scalar is not None:
                scalars[value[1].decode()] = scalar
    return next(iter(fields(event, 2)), 0), scalars


def _scalar(value: Mapping[int, Any]) -> float | None:
    """Return the scalar of a summary's value, from its own field or a tensor of one element; None for other values."""
    if 2 in value:
        return struct.unpack("<f", value[2])[0]
    if 8 not in value:
        return None
    tensor = dict(parse_protobuf(value[8]))
    float_type = 1
    if tensor.get(1) != float_type:
        return None
    content = tensor.get(4) or tensor.get(5)  # the bytes of the elements, or the elements
    return struct.unpack("<f", content)[0] if isinstance(content, bytes) and len(content) == 4 else None


def read_settings(file: Path) -> Iterator[HeldSettings]:
    """Yield the settings that an event file holds: of each tag the last ones."""
    check_file(file, LARGEST_TEXT)
    held: dict[bytes, HeldSettings] = {}
    for event, checksum in _tfrecords(file, report=ignore):
        # A graph or an image may be large, and is not parsed.
        if not any(tag in event for tag in HELD_TAGS):
            continue
        # A larger one is refused by its size.
        is_damaged = len(event) <= LARGEST_CONFIG and _masked_crc32c(event) != checksum
        for summary in fields(event, 5):
            for message in fields(summary, 1):
                value = dict(parse_protobuf(message))
                tag = value.get(1)
                if tag in HELD_TAGS:
                    # Those of one run; the later ones come last, whatever their tag.
                    held.pop(tag, None)
                    held[tag] = _held_settings(tag, value, is_damaged=is_damaged)
    yield from held.values()


def _held_settings(tag: bytes, value: Mapping[int, Any], *, is_damaged: bool) -> HeldSettings:
    """Return the settings in a summary's value."""
    name = tag.decode()
    if is_damaged:
        return HeldSettings(name, "", problem="its event is damaged")
    if tag == HYPERPARAMETERS:
        return HeldSettings("hparams", _hyperparameters(value), is_of_folder=True)
    tensor = dict(parse_protobuf(value.get(8, b"")))
    content = tensor.get(8, b"")
    return HeldSettings(name, content.decode("utf-8", "replace"), is_of_model=tag == TEXT_OF_MODEL)


def _hyperparameters(value: Mapping[int, Any]) -> dict[str, Any]:
    """Return the settings in the data of the plug-in ``hparams``, by their names."""
    settings = {}
    for plugin in fields(value.get(9, b""), 1):
        for content in fields(plugin, 2):
            for session in fields(content, 3):
                for entry in fields(session, 1):
                    item = dict(parse_protobuf(entry))
                    settings[item.get(1, b"").decode("utf-8", "replace")] = _plain_value(item.get(2, b""))
    return settings


def _plain_value(message: bytes) -> Any:
    r"""Return a value of protobuf's ``struct.Value``, whose numbers are all floats: an int if it is whole.

    >>> _plain_value(bytes([32, 1])), _plain_value(b"\x11" + struct.pack("<d", 8.0)), _plain_value(b"\x1a\x01a")
    (True, 8, 'a')
    """
    for number, value in parse_protobuf(message):
        if number == 2:
            real = struct.unpack("<d", value)[0]
            return int(real) if real.is_integer() else real
        if number == 3:
            return value.decode("utf-8", "replace")
        if number == 4:
            return bool(value)
    return None


def _tfrecords(file: Path, report: Callable[[Path, str], None] = warn) -> Iterator[tuple[bytes, int]]:
    """Yield the data of each record of a TFRecord file, and the checksum of the data.

    A record consists of the size of its data, the checksum of the size, the data, and the checksum of the data. If the
    checksum of a size is wrong, reading ends with a warning, as the position of the next record is not known.

    Args:
        file: The file.
        report: The function that is called with the file and a problem.
    """
    data = file.read_bytes()
    position = 0
    while position < len(data):
        header = data[position : position + 12]
        if len(header) < 12:
            report(file, "the last record is cut off and is left out")
            return
        size, size_checksum = struct.unpack("<QI", header)
        if _masked_crc32c(header[:8]) != size_checksum:
            report(file, f"the record at byte {position} is damaged, and all from there is left out")
            return
        record = data[position + 12 : position + 12 + size]
        checksum = data[position + 12 + size : position + 16 + size]
        if len(checksum) < 4:
            report(file, "the last record is cut off and is left out")
            return
        yield record, int.from_bytes(checksum, "little")
        position += 16 + size


def _masked_crc32c(data: bytes) -> int:
    """Return TFRecord's checksum of data: CRC-32C, rotated by 15 bits, plus a constant.

    >>> hex(_masked_crc32c(b"123456789"))
    '0xc78ab0e5'
    """
    table = _crc32c_table()
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _crc32c_table() -> tuple[int, ...]:
    """Return the CRC-32C of each byte, with Castagnoli's polynomial."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


def _read(file: Path) -> RawLog:
    """Read the only run of a file."""
    check_file(file, LARGEST_TEXT)
    return RawLog({"": list(read_tensorboard(file))})


FORMAT = Format(
    kind="TensorBoard's events",
    patterns=("events.out.tfevents.*",),
    read=_read,
    settings=read_settings,
    settings_beside="*/events.out.tfevents.*",
    example="TensorBoard's events.out.…",
    described="`events.out.tfevents.…`",
    written_by="TensorBoard, for any framework; its package is not needed",
    # TensorBoard writes several files in the folder of a run.
    parts_share=attrgetter("parent"),
)
