"""Settings whose values are not shown, as what rlvet prints is pasted into issues."""

from __future__ import annotations

import re

NAME = re.compile(r"(?i)(token|secret|passw(or)?d|api_?key|access_?key|private_?key|credentials?|auth)$")
"""Names of what nobody should paste."""

PLAIN = re.compile(r"[+-]?[\d.,]+(e[+-]?\d+)?|True|False|None|null|")
"""A value that is no secret: a number, a truth value or nothing."""


def is_secret(name: str, value: str) -> bool:
    """Return whether a setting is a secret, by its name, unless its value is plain.

    Args:
        name: The name, or the last part of it.
        value: The value as text.

    >>> is_secret("env_vars.HF_TOKEN", "hf_abc"), is_secret("max_token", "512"), is_secret("tokenizer", "gpt2")
    (True, False, False)
    """
    return NAME.search(name) is not None and PLAIN.fullmatch(value) is None
