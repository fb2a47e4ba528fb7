"""The severities of findings about runs and configurations."""

SEVERITIES = ("stop", "fix", "look", "note")
"""From the highest to the lowest: stop the run, fix it before the next run, look at it, nothing to do. The first two
are faults."""


def is_at_least(severity: str, limit: str) -> bool:
    """Return True if a severity is as high as a limit, or higher.

    >>> is_at_least("stop", "fix"), is_at_least("look", "fix")
    (True, False)
    """
    return SEVERITIES.index(severity) <= SEVERITIES.index(limit)
