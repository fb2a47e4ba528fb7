"""`scripts/conformance.py`: what is planted into textbook losses is found and named, or stays unexplained."""

from functools import partial

import pytest

import conformance
import method_references as reference
from bandpo.methods import GRPO
from conformance import Call, compare


def planted(batch, *, per_sequence=True, factor=1.0, weighted=True, **clip):
    """PPO's surrogate, with a difference or without."""
    values = factor * reference.ppo(batch.logp, batch.old, batch.advantages, batch.mask, **clip)
    if weighted:
        values = values * batch.weights
    if per_sequence:
        return reference.mean_of_sequence(values, batch.mask).sum() / batch.mask.any(1).sum()
    return (values * batch.mask).sum() / batch.mask.sum()


@pytest.mark.parametrize(
    ("difference", "found"),
    [
        ({}, []),
        ({"dual": 3.0}, ["dual clip of 3"]),
        ({"per_sequence": False}, ["averages over tokens"]),
        ({"per_sequence": False, "dual": 3.0}, ["averages over tokens", "dual clip of 3"]),
        ({"weighted": False}, ["importance weights left out"]),
        ({"high": 0.21}, None),
        ({"factor": 1.001}, None),
    ],
)
def test_what_was_planted_is_found(difference, found):
    verdict = compare(partial(planted, **difference), Call(GRPO(0.2, 0.2)), weighted=True)
    assert verdict.changes == found


def test_settings_are_numbers_where_they_can_be():
    assert conformance.settings("kind=GMPO epsilon=3e-4") == {"kind": "GMPO", "epsilon": 3e-4}
