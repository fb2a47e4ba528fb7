"""The line of each setting in a YAML or TOML file, by its dotted name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlvet.errors import InvalidValue
from rlvet.runs.limits import DEEPEST_CONFIG, MOST_SETTINGS


def yaml_scalars(root: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the scalars and lists of a YAML node with their dotted names.

    Values of merged mappings (``<<``) come before the values that override them.

    Args:
        root: The node of the whole file.
        path: The path of the file, for messages.

    Raises:
        ValueError: if there are more than `MOST_SETTINGS`, with aliases expanded.
    """
    import yaml

    pending: list[tuple[str, Any]] = [("", root)]
    count = 0
    while pending:
        prefix, node = pending.pop()
        count += 1
        if count > MOST_SETTINGS:
            raise InvalidValue(f"{path} has more than {MOST_SETTINGS:,} settings, and is no configuration")
        if not isinstance(node, yaml.MappingNode):
            yield prefix, node
            continue
        merged: list[tuple[str, Any]] = []
        children: list[tuple[str, Any]] = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.tag == "tag:yaml.org,2002:merge":
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for source in reversed(sources):
                    if isinstance(source, yaml.MappingNode):
                        merged.append((prefix, source))
            else:
                children.append((f"{prefix}.{key.value}" if prefix else key.value, value))
        # The list is a stack: its last entry is read first, and may be overridden by later ones.
        pending += [*reversed(children), *reversed(merged)]


def toml_lines(text: str) -> dict[str, int]:
    """Return the line number of each table header and each key at the beginning of a line."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), 1):
        header = re.match(r"\s*+(\[\[?+)([\w.\"'\s-]++)\]", line)
        if header is not None and header[2].count(".") <= DEEPEST_CONFIG:
            table = re.sub(r"[\"'\s]", "", header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
            table = _add_indices(table, counts)
            lines.setdefault(table, number)
            continue
        key = re.match(r"\s*+([\w.-]++)\s*+=", line)
        if key is not None:
            lines.setdefault(f"{table}.{key[1]}" if table else key[1], number)
    return lines


def _add_indices(table: str, counts: Mapping[str, int]) -> str:
    """Return the name of a table with the index of each list of tables that contains it.

    Args:
        table: The name in the table's header.
        counts: The index of the last table of each list so far, by the name of the list.
    """
    indexed_name = ""
    name = ""
    for part in table.split("."):
        name = f"{name}.{part}" if name else part
        indexed_name = f"{indexed_name}.{part}" if indexed_name else part
        if name in counts:
            indexed_name += f".{counts[name]}"
    return indexed_name


def line_of(lines: Mapping[str, int], name: str) -> int | None:
    """Return the line of a setting, or of the innermost table with a known line that contains it.

    Args:
        lines: Lines by dotted names.
        name: The dotted name of the setting.

    >>> line_of({"optim": 4, "optim.lr": 5}, "optim.lr"), line_of({"optim": 4}, "optim.betas"), line_of({}, "seed")
    (5, 4, None)
    """
    while name:
        if name in lines:
            return lines[name]
        name = name.rpartition(".")[0]
    return None
