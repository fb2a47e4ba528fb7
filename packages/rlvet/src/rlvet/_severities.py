"""Severities of findings, about runs and about configurations."""

SEVERITIES = ("stop", "fix", "look", "note")
"""From gravest to lightest: stop the run; fix it before the next run; worth a look; nothing to do. The first two are
faults."""

MEANINGS = {
    "stop": "end the run, which learns nothing or is losing what it has learned",
    "fix": "a fault to fix before the next run",
    "look": "not a fault by itself, but worth checking",
    "note": "no action is needed",
}
"""The meaning of each severity, in the words of docs/diagnose.md."""


def is_at_least(severity: str, limit: str) -> bool:
    """Return True if a severity is as grave as a limit, or graver.

    >>> is_at_least("stop", "fix"), is_at_least("look", "fix")
    (True, False)
    """
    return SEVERITIES.index(severity) <= SEVERITIES.index(limit)
