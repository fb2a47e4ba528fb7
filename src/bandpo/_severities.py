"""How much a finding matters, of a run and of a configuration alike."""

SEVERITIES = ("stop", "fix", "look", "note")
"""Stop the run; fix it before the next run; look at it; nothing to do. The first two are faults."""


def is_at_least(severity: str, limit: str) -> bool:
    """Return whether a severity is as grave as another, or graver.

    >>> is_at_least("stop", "fix"), is_at_least("look", "fix")
    (True, False)
    """
    return SEVERITIES.index(severity) <= SEVERITIES.index(limit)
