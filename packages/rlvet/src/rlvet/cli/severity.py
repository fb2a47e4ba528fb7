"""The values of ``--fail-on``."""

from enum import StrEnum


class Severity(StrEnum):
    """The severity of a finding, one of `rlvet._severities.SEVERITIES`."""

    stop = "stop"
    fix = "fix"
    look = "look"
    note = "note"
