"""Compare two configurations of TRL or verl in what they train, or two logs in where their metrics part.

No setting is judged here, as `rlvet.lint` does.
Nothing in a file is imported or executed. Only the standard library and PyYAML are needed.
"""

from rlvet.compare.difference import Difference, diff

__all__ = ["Difference", "diff"]
