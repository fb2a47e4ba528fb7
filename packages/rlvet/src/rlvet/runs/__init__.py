"""Readers of a run's log and of the configuration beside it, in a process with limits; no tokens, and no judgement.

Reading a log or a configuration needs the standard library and PyYAML. Records of tokens are in `rlvet.records`.
"""

from rlvet.runs.run import Run
from rlvet.runs.setup import Setup

__all__ = ["Run", "Setup"]
