"""Severities of findings, about runs and about configurations."""

SEVERITIES = ("stop", "fix", "look", "note")
"""From gravest to lightest: stop the run; fix it before the next run; worth a look; nothing to do. The first two are
faults."""


def is_at_least(severity: str, limit: str) -> bool:
    """Return True if a severity is as grave as a limit, or graver.

    >>> is_at_least("stop", "fix"), is_at_least("look", "fix")
    (True, False)
    """
    return SEVERITIES.index(severity) <= SEVERITIES.index(limit)
