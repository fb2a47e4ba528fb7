"""The search for the published method that a loss is, for one that is not what it claims to be."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from bandpo.certificate.gradient import PolicyTerm, relative_differences
from bandpo.certificate.variants import Case, Variant, fitted_bounds
from bandpo.core.errors import BandpoError
from bandpo.core.methods import METHODS, Method
from bandpo.core.rules import FixedClip

COMMON = {
    "low": (0.1, 0.3),
    "high": (0.3, 0.4, 3.0, 5.0),
    "radius": (0.01, 0.02, 0.03, 0.05, 0.1, 0.2),
    "epsilon": (0.1, 0.28, 0.3, 0.4),
    "dual_clip": (3.0, 5.0, 10.0),
    "max_weight": (2.0, 3.0, 5.0, 10.0),
    "max_ratio": (3.0, 5.0),
}
"""Values of parameters by their names, which are tried one at a time; beside them, half and twice the default."""


NEAR = 0.1
"""The relative difference beyond which a token is another one, whatever the tolerance."""


def find_method(expected: Variant, cases: Sequence[Case], tolerance: float) -> Variant | None:
    """Return a published method that has the gradient of a loss on every batch, with its average; None if none has.

    Each method is tried with its defaults, then with a fixed clip at the bounds that the loss has, then with other
    common values of a parameter; each with its own average, and with that of the expected method.

    Args:
        expected: What the loss claims to be.
        cases: The batches with the gradient of the loss.
        tolerance: The largest difference that counts as rounding.
    """
    # The batch 'usual' comes first, because it distinguishes most methods.
    ordered = sorted(cases, key=lambda case: case.batch.name != "usual")
    averages = dict.fromkeys((expected.aggregation, expected.average))
    for average, method in itertools.product(averages, _candidates(ordered)):
        of_rollout = expected.of_rollout and method.old_policy == "rollout"
        variant = replace(expected, method=method, aggregation=average, of_rollout=of_rollout)
        try:
            terms = (case.compared_with(variant) for case in ordered)
            if all(_is_near(term) and term.is_equal(tolerance) for term in terms):
                return variant
        except BandpoError:
            continue  # a method that needs more than the batches have, such as groups
    return None


def _is_near(term: PolicyTerm) -> bool:
    """Return False if so many tokens differ that no discontinuity explains it, which takes a quarter of the time."""
    different = relative_differences(term.gradient, term.expected, term.share) > NEAR
    return bool(different.sum() < 0.1 * term.batch.mask.sum())


def _candidates(cases: Sequence[Case]) -> Iterator[Method]:
    """Generate the published methods with parameters, the defaults of all of them first."""
    for paper in METHODS.values():
        yield paper.method()
    for paper in METHODS.values():
        parameters = inspect.signature(paper.method).parameters
        method = paper.method()
        if isinstance(method.clip, FixedClip) and {"low", "high"} <= parameters.keys():
            bounds = fitted_bounds(method, cases)
            if bounds is not None:
                low, high = bounds
                yield paper.method(low=low, high=high)
    for paper in METHODS.values():
        for name, parameter in inspect.signature(paper.method).parameters.items():
            default = parameter.default
            halves = (default / 2, default * 2) if isinstance(default, float) else ()
            for value in (*COMMON.get(name, ()), *halves):
                if value != default:
                    yield from _with(paper.method, name, value)


def _with(method: Callable[..., Method], name: str, value: float) -> Iterator[Method]:
    """Generate a method with another value of a parameter; none if it does not allow the value."""
    try:
        yield method(**{name: value})
    except BandpoError:
        return
