"""The colours of reports, of the pages that share their scripts, and of figures: one colour for each clip rule.

All of them are in ``assets/palette.json``. No other file has a colour. This module needs only the standard library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from itertools import count
from typing import NamedTuple


class Colour(NamedTuple):
    """A colour on a light and on a dark page, and how a line of this colour is drawn in a figure."""

    light: str
    """The colour on a light page."""
    dark: str
    """The colour on a dark page."""
    line: str = "-"
    """The style of a line in matplotlib."""
    marker: str = "o"
    """The marker of a point in matplotlib."""


_PALETTE = json.loads((resources.files("rlvet.report") / "assets/palette.json").read_text(encoding="utf-8"))

PAGE: Mapping[str, Colour] = {name: Colour(**colour) for name, colour in _PALETTE["page"].items()}
"""The colours of text, backgrounds, lines and severities."""

_PATTERNS: dict[str, re.Pattern[str]] = {}
COLOURS: dict[str, Colour] = {}
"""The colours of rules, and the others, by the names of their CSS variables."""

for _name, _rule in _PALETTE["rules"].items():
    _PATTERNS[f"rule-{_name}"] = re.compile(_rule.pop("names"))
    COLOURS[f"rule-{_name}"] = Colour(**_rule)
OTHERS = [f"other-{number}" for number, _ in enumerate(_PALETTE["others"], 1)]
"""The names of colours that are no rule's, in the order in which they are used."""
COLOURS |= {name: Colour(**colour) for name, colour in zip(OTHERS, _PALETTE["others"], strict=True)}


def rule_colour(name: str) -> str | None:
    """Return the name of a clip rule's colour; None if the rule has none of its own.

    Args:
        name: The rule as figures and reports name it: its text, or its name in a study.

    >>> rule_colour("Band(KL(), 0.05)"), rule_colour("BandAbove()"), rule_colour("clip 0.2")
    ('rule-band', 'rule-band-above', 'rule-clip')
    """
    return next((colour for colour, pattern in _PATTERNS.items() if pattern.fullmatch(name)), None)


def colours_of(labels: Iterable[str]) -> dict[str, str]:
    """Return the name of a colour for each label: its rule's, or the next one that is no rule's.

    >>> colours_of(["BandPO()", "seed 1", "FixedClip(0.2)", "seed 2"])
    {'BandPO()': 'rule-band', 'seed 1': 'other-1', 'FixedClip(0.2)': 'rule-clip', 'seed 2': 'other-2'}
    """
    number = count()
    return {label: rule_colour(label) or OTHERS[next(number) % len(OTHERS)] for label in labels}


def css_variables(*, root: str = ":root", dark: str = "") -> str:
    """Return CSS that defines a variable for each colour, such as ``--rule-band`` and ``--ink``.

    Args:
        root: The selector of the elements that have the variables.
        dark: The selector of these elements on a dark page; by default the system's setting decides.
    """
    colours = {**PAGE, **COLOURS}
    light_lines = "".join(f" --{name}: {colour.light};" for name, colour in colours.items())
    dark_lines = "".join(f" --{name}: {colour.dark};" for name, colour in colours.items())
    if dark:
        return f"{root} {{{light_lines} }}\n{dark} {{{dark_lines} }}\n"
    query = "@media screen and (prefers-color-scheme: dark)"
    return f"{root} {{{light_lines} }}\n{query} {{ {root} {{{dark_lines} }} }}\n"
