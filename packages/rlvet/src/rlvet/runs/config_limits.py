"""Limits on YAML and TOML, which are checked before the content of a file is built.

PyYAML's loaders are recursive, so a deep file would end the process, and their merges (``<<``) copy what an alias
refers to, so a file of some hundred bytes could need gigabytes. Python's reader of TOML takes quadratic time for a key
of many parts.
"""

from __future__ import annotations

import re

from rlvet.errors import InvalidValue
from rlvet.runs.limits import DEEPEST_CONFIG, LONGEST_NUMBER, MOST_NODES

_TOML_TOKEN = re.compile(
    r"""
    (?P<part>
        \"\"\"(?:[^\\"]++|\\.|"(?!""))*+(?:\"{3,5}|$)  # strings of several lines
        |'''(?:[^']++|'(?!''))*+(?:'{3,5}|$)
        |"(?:[^\\"\n]++|\\.)*+"?+                   # strings, which may be keys
        |'[^'\n]*+'?+
        |[A-Za-z0-9_-]++                           # bare keys and numbers
    )
    |(?P<dot>\.)
    |(?P<space>[ \t]++)
    |\#[^\n]*+                                      # comments
    |.
    """,
    re.VERBOSE | re.DOTALL,
)
"""A token of TOML, as far as keys are concerned."""

_NUMBER = re.compile(r"[-+0-9_:.]+")


def check_yaml(text: str | bytes, name: object = "it") -> None:
    r"""Check that a YAML text is within the limits. A text that is not YAML passes, since its loader reports that.

    Args:
        text: The text.
        name: Its name in the error message.

    Raises:
        ValueError: if a limit is exceeded.

    >>> check_yaml("a: &a [1, 2]\nb: *a")
    >>> check_yaml("[" * 60)
    Traceback (most recent call last):
    rlvet.errors.InvalidValue: it is nested too deeply to be read
    """
    import yaml

    # The parser of libyaml, where it is installed, is ten times faster. Neither parser is recursive.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    count = 0
    # For each list and mapping around an event: its anchor, and the number of nodes before it.
    enclosing: list[tuple[str | None, int]] = []
    # The number of nodes of each anchor.
    sizes: dict[str, int] = {}
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.CollectionStartEvent):
                enclosing.append((event.anchor, count))
                count += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, start = enclosing.pop()
                if anchor is not None:
                    sizes[anchor] = count - start
            elif isinstance(event, yaml.AliasEvent):
                if any(event.anchor == anchor for anchor, _ in enclosing):
                    raise InvalidValue(f"{name} has an alias of a list or mapping within itself")
                count += sizes.get(event.anchor, 1)
            elif isinstance(event, yaml.ScalarEvent):
                count += 1
                if event.anchor is not None:
                    sizes[event.anchor] = 1
                if len(event.value) > LONGEST_NUMBER and (event.tag or _NUMBER.fullmatch(event.value)):
                    raise InvalidValue(f"{name} has a number of more than {LONGEST_NUMBER:,} characters")
            if len(enclosing) > DEEPEST_CONFIG:
                raise InvalidValue(f"{name} is nested too deeply to be read")
            if count > MOST_NODES:
                raise InvalidValue(f"{name} has more than {MOST_NODES:,} values, with its aliases expanded")
    except yaml.YAMLError:
        return


def check_toml(text: str, name: object = "it") -> None:
    r"""Check that no key of a TOML text has too many parts. A text that is not TOML passes.

    Args:
        text: The text.
        name: Its name in the error message.

    Raises:
        ValueError: if a key does.

    >>> check_toml("a.b.c = '" + "x." * 1000 + "'")
    >>> check_toml("a." * 60 + "b = 1")
    Traceback (most recent call last):
    rlvet.errors.InvalidValue: it is nested too deeply to be read
    """
    # A key is within one line, and few files have a line with as many dots.
    if not any(line.count(".") > DEEPEST_CONFIG for line in text.split("\n")):
        return
    dots = 0
    for token in _TOML_TOKEN.finditer(text):
        if token["dot"]:
            dots += 1
        elif not token["part"] and not token["space"]:
            dots = 0
        if dots > DEEPEST_CONFIG:
            raise InvalidValue(f"{name} is nested too deeply to be read")
