"""Read the settings that a framework prints at the start of its console output.

verl prints its configuration as a dictionary, TRL its arguments as ``GRPOConfig(name=value, …)`` or in a line of
transformers, and slime and miles a table of Megatron's arguments. Only literals are parsed, and nothing is called.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rlvet.runs.endings import LOST

LARGEST_HEADER = 2**21
"""The number of bytes at the start of a console's output in which settings are looked for."""

MOST_LINES = 5000
"""The largest number of lines of one printed configuration."""

DEEPEST = 40
"""The largest number of open brackets in it."""

ENDINGS = (".log", ".txt", ".out")
"""Endings of files that may be a console's output."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Codes of a terminal, which Ray writes around the name of a worker."""

WORKER = re.compile(r"^\((?:[\w. ]+ )?pid=\d[^)]*\) ?")
"""The name of a worker before each line of Ray's output."""

JOINED = re.compile(r"\(\w{1,40} pid=\d")
"""The name of a worker within a line, of which what follows is another line."""

TEXTS = re.compile(r"'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\"")
"""Quoted texts, in which brackets do not count."""

INDENTED = re.compile(r" +(?:[:'\"{}\[\](),\d-]|True|False|None)")
"""The start of a line of a dictionary that `pprint` prints."""

PIECE = re.compile(r" *(?:[:'\"{}\[\](),\d-]|True|False|None)")
"""The start of a line, or of a piece of one, as Ray may break them."""

TRL_START = re.compile(r"(?:GRPOConfig|RLOOConfig)\($")
"""The line before TRL's arguments, which are printed one on each line."""

TRL_ARGUMENT = re.compile(r"^(\w+)=(.*?),?$")
"""A line of TRL's arguments."""

MEGATRON_START = re.compile(r"(?<!-)-{5,} (?:end of )?arguments -{5,}")
"""The line before and after Megatron's arguments."""

MEGATRON_ARGUMENT = re.compile(r"^ *(\w+) \.{3,} (.*)$")
"""A line of Megatron's arguments."""


class ConsoleSettings(NamedTuple):
    """Settings from a console's output."""

    framework: str
    """``verl``, ``trl`` or ``slime``. The arguments of miles are those of slime."""
    settings: Mapping[str, Any]
    """The settings, nested as in the framework's configuration."""


def read_console_settings(path: Path) -> ConsoleSettings | None:
    r"""Return the settings that the start of a file prints; None if there are none.

    Args:
        path: A regular file.

    >>> import tempfile
    >>> log = Path(tempfile.mkdtemp()) / "run.log"
    >>> _ = log.write_text("(TaskRunner pid=7) {'actor_rollout_ref': {'rollout': {'n': 1}},\n"
    ...                    "(TaskRunner pid=7)  'algorithm': {'adv_estimator': 'grpo'}}\n")
    >>> read_console_settings(log).settings["actor_rollout_ref"]
    {'rollout': {'n': 1}}
    """
    with path.open("rb") as file:
        text = file.read(LARGEST_HEADER).decode("utf-8", "replace")
    text = LOST.split(text)[-1]
    raw = [COLOURS.sub("", line) for line in text.split("\n")]
    lines = [WORKER.sub("", line) for line in raw]
    return _verl_settings(raw) or _trl_settings(lines) or _megatron_settings(lines)


def _verl_settings(lines: list[str]) -> ConsoleSettings | None:
    """Return the dictionary that verl prints with `pprint`; None if several runs printed settings that differ."""
    first: dict[str, Any] | None = None
    end = 0
    for number, line in enumerate(lines):
        prefix = _worker_of(line)
        if number < end or not line.startswith("{'", len(prefix)):
            continue
        printed = lines[number : number + MOST_LINES]
        settings, count = _parse_dictionary(printed, prefix, PIECE)
        if settings is None:
            settings, count = _parse_dictionary(printed, prefix, INDENTED)
        if settings is not None and "actor_rollout_ref" in settings:
            first = settings if first is None else first
            # Those of the trainer name the run and its folders.
            if settings | {"trainer": None} != first | {"trainer": None}:
                return None
            end = number + count
    return None if first is None else ConsoleSettings("verl", first)


def _worker_of(line: str) -> str:
    """Return the name of the worker before a line of Ray's output; empty without one."""
    match = WORKER.match(line)
    return match[0] if match else ""


def _parse_dictionary(
    lines: Iterable[str], prefix: str, part_of_it: re.Pattern[str]
) -> tuple[dict[str, Any] | None, int]:
    """Return the dictionary that begins with the first of these lines, None if it is none, and its number of lines.

    Args:
        lines: The lines, each with the name of its worker. Those of others may stand between its own.
        prefix: The name of the worker that prints it.
        part_of_it: What its further lines begin with. The others are left out.
    """
    text = []
    depth = 0
    count = 0
    for line in lines:
        count += 1
        part = line.removeprefix(prefix)
        if text and not (_worker_of(line) == prefix and part_of_it.match(part)):
            continue
        # Ray may join the line of another worker.
        part = JOINED.split(part)[0]
        text.append(part)
        for character in TEXTS.sub("", part):
            if character in "{[(":
                depth += 1
                if depth > DEEPEST:
                    return None, count
            elif character in "}])":
                depth -= 1
        if depth <= 0:
            break
    try:
        settings = ast.literal_eval("\n".join(text).strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None, count
    return settings if isinstance(settings, dict) else None, count


def _trl_settings(lines: list[str]) -> ConsoleSettings | None:
    """Return TRL's arguments, which are printed one on each line up to a closing bracket."""
    start = next((number for number, line in enumerate(lines) if TRL_START.search(line)), None)
    if start is None:
        return None
    settings = {}
    for line in islice(lines, start + 1, start + MOST_LINES):
        if line.startswith(")"):
            break
        match = TRL_ARGUMENT.match(line)
        if match is not None:
            settings[match[1]] = _parse_value(match[2])
    return ConsoleSettings("trl", settings) if settings else None


def _megatron_settings(lines: list[str]) -> ConsoleSettings | None:
    """Return the arguments of slime or miles, which Megatron prints as a table."""
    settings = dict(_megatron_arguments(lines))
    if "rollout_max_response_len" not in settings:
        return None
    return ConsoleSettings("slime", settings)


def _megatron_arguments(lines: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values between the first two lines of dashes around Megatron's arguments."""
    is_inside = False
    for line in lines:
        if MEGATRON_START.search(line):
            if is_inside:
                return
            is_inside = True
        elif is_inside:
            match = MEGATRON_ARGUMENT.match(line)
            if match is not None:
                yield match[1], _parse_value(match[2].strip())


def _parse_value(text: str) -> Any:
    """Return a literal of Python; the text itself if it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
