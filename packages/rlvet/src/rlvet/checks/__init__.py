"""Checks of a log's metrics: what is wrong with a run, causes before their effects, with one remedy for each.

They need only the standard library. The checks of recorded tokens are in `rlvet.records`.
"""

from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.findings import Coverage, Finding

__all__ = ["Coverage", "Diagnosis", "Finding"]
