"""The values of ``--fail-on``."""

from enum import StrEnum


class Severity(StrEnum):
    """The severity of a finding, one of `bandpo._severities.SEVERITIES`."""

    stop = "stop"
    fix = "fix"
    look = "look"
    note = "note"
