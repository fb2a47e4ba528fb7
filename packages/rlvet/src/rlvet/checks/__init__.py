"""Diagnose a run: find its faults, causes before their effects, with one remedy for each.

The checks of a log need only the standard library; those of recorded tokens also need numpy.
"""

from rlvet.checks.diagnosis import Diagnosis, diagnose
from rlvet.checks.findings import Coverage, Finding

__all__ = ["Coverage", "Diagnosis", "Finding", "diagnose"]
