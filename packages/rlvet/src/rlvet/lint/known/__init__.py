"""The frameworks whose configurations are checked, each in a file of its own: names, defaults, marks and rules.

What rules of several frameworks share is in `rlvet.lint.topics`.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlvet.lint.framework import Framework
from rlvet.lint.known.openrlhf import OPENRLHF
from rlvet.lint.known.prime_rl import PRIME_RL
from rlvet.lint.known.skyrl import SKYRL
from rlvet.lint.known.trl import TRL
from rlvet.lint.known.verl import VERL

FRAMEWORKS: Mapping[str, Framework] = {
    framework.key: framework for framework in (TRL, VERL, SKYRL, PRIME_RL, OPENRLHF)
}
"""The frameworks by their keys, in the order of messages and of docs/lint.md."""
