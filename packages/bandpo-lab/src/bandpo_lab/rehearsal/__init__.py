"""Rehearse a recipe for unmodified verl on two CPU cores, before renting GPUs. See `rehearse`."""

from bandpo_lab.rehearsal.checks import Check
from bandpo_lab.rehearsal.shrink import Change
from bandpo_lab.rehearsal.stages import NOT_COVERED, Rehearsal, rehearse

__all__ = ["NOT_COVERED", "Change", "Check", "Rehearsal", "rehearse"]
