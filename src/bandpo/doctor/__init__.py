"""Findings about a run, as functions of it: what is wrong, causes first, with one thing to do for each.

Checks of a log need the standard library alone, those of recorded tokens need numpy.
"""

from bandpo.doctor.diagnosis import Diagnosis, diagnose
from bandpo.doctor.findings import Coverage, Finding

__all__ = ["Coverage", "Diagnosis", "Finding", "diagnose"]
