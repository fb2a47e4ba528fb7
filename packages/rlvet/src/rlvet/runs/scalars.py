"""Parse a scalar value of a YAML file or a command line."""

from __future__ import annotations

import re
from typing import Any

LONGEST_NUMBER = 40
"""Number of characters of the longest text that is parsed as a number."""

_WORDS = {
    "": None,
    "~": None,
    "null": None,
    "none": None,
    "true": True,
    "false": False,
    "yes": True,
    "no": False,
    "on": True,
    "off": False,
}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*+)?+\.?[0-9]*+([eE][-+]?[0-9]++)?")


def read_scalar(text: str) -> Any:
    """Parse a text as a number, a boolean, None or a list; return the text itself if it is none of these.

    Numbers such as ``1e-6`` are floats, as for hydra and argparse. YAML 1.1 would parse it as text.

    >>> read_scalar("1e-6"), read_scalar("256"), read_scalar("True"), read_scalar("null"), read_scalar("grpo")
    (1e-06, 256, True, None, 'grpo')
    >>> read_scalar("[0.2, 0.28]"), read_scalar("'low_var_kl'")
    ([0.2, 0.28], 'low_var_kl')
    """
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.startswith("[") and text.endswith("]") and "[" not in text[1:]:
        items = [item for item in text[1:-1].split(",") if item.strip()]
        return [read_scalar(item) for item in items]
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) > LONGEST_NUMBER:
        return text
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text) and any(character.isdigit() for character in text):
        try:
            return float(text.replace("_", ""))
        except ValueError:
            return text
    return text
