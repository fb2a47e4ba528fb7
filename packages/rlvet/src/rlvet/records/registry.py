"""The checks of recorded tokens and of their advantages, which register themselves as those of a log do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlvet.checks.registry import Registry

if TYPE_CHECKING:
    from rlvet.records.first_pass import FirstPass
    from rlvet.records.recorded_advantages import RecordCase

ADVANTAGES: Registry[RecordCase] = Registry("rlvet.records.advantages")
"""The checks of the advantages, rewards and masks of a record."""
TOKENS: Registry[FirstPass] = Registry("rlvet.records.tokens")
"""The checks of a record's tokens."""
