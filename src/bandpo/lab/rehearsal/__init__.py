"""Rehearses a recipe for stock verl on two CPU cores, before you pay for GPUs. See `rehearse`."""

from bandpo.lab.rehearsal.checks import Check
from bandpo.lab.rehearsal.shrink import CannotRehearse, Change
from bandpo.lab.rehearsal.stages import NOT_COVERED, Rehearsal, rehearse

__all__ = ["NOT_COVERED", "CannotRehearse", "Change", "Check", "Rehearsal", "rehearse"]
