"""Rehearse a recipe for unmodified verl on two CPU cores, before renting GPUs. See `rehearse`.

Nothing here is needed to run the recipe itself.
"""

from bandpo_lab.rehearsal.checks import Check
from bandpo_lab.rehearsal.shrink import Change
from bandpo_lab.rehearsal.stages import Rehearsal, rehearse

__all__ = ["Change", "Check", "Rehearsal", "rehearse"]
