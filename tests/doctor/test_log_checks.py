"""The checks of a log on courses of its metrics."""

import pytest

from bandpo.doctor.log_checks import log_findings


def course(steps=40, **metrics):
    """Return the rows of a healthy run whose reward rises, with some metrics replaced.

    Args:
        steps: Log steps.
        **metrics: Functions of the part of the run that is over, from 0 to 1.
    """
    functions = {"reward": lambda t: t, "entropy": lambda t: 1.0, "grad_norm": lambda t: 0.3} | metrics
    return [
        {"step": float(step)} | {name: value(step / steps) for name, value in functions.items()}
        for step in range(1, steps + 1)
    ]


def codes(rows, updates=4):
    """Return the codes of the faults and remarks, in their order."""
    return [finding.code for finding in log_findings(rows, updates) if finding.cause]


def test_a_healthy_run_has_no_findings():
    assert codes(course()) == []


@pytest.mark.parametrize(("name", "value"), [("learning_rate", 1e-10), ("grad_norm", 0.0)])
def test_no_step(name, value):
    rows = course(**{name: lambda t: value})
    assert codes(rows) == ["no-step"]


def test_entropy_that_drifts_is_step_too_large():
    assert codes(course(entropy=lambda t: 1 + 3 * t)) == ["step-too-large"]


def test_clip_idle():
    rows = course(clip_high=lambda t: 0.0, clip_low=lambda t: 0.0)
    assert codes(rows) == ["clip-idle"]
