"""The values of ``--fail-on``."""

from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters, as `bandpo._severities.SEVERITIES` has them."""

    stop = "stop"
    fix = "fix"
    look = "look"
    note = "note"
