"""A loss that is not what it claims to be is named as the published method that it is."""

import re

import pytest

from bandpo import policy_loss
from bandpo.core.methods import METHODS
from bandpo.testing import assert_is
from selection import mostly_slow


def named(method, claimed):
    """Return the method that the error about a claim names; None if it names none."""
    with pytest.raises(AssertionError) as caught:
        assert_is(lambda *tensors: policy_loss(*tensors, method=method).loss, claimed)
    found = re.search(r"It has the gradient of (.*)\.$", str(caught.value))
    return found and found[1]


@pytest.mark.parametrize("name", mostly_slow(METHODS, 12))
def test_each_published_method_is_named(name):
    method = METHODS[name].method()
    assert named(method, "DAPO()" if name == "BandPO" else "BandPO()") == repr(method)


PARAMETERS = [
    "GRPO(low=0.1, high=0.23)",
    "GSPO(low=0.1, high=0.2)",
    "BandPO(radius=0.02)",
    "UPGRPO(epsilon=0.1)",
    "SAPO(positive=2.0)",
    "M2PO(threshold=0.02)",
]


@pytest.mark.parametrize("text", mostly_slow(PARAMETERS, 6))
def test_a_method_is_named_with_its_parameters(text):
    name, arguments = text.rstrip(")").split("(")
    said = named(text, "CISPO()")
    assert said.startswith(f"{name}(")
    assert arguments in said or all(word in said for word in arguments.split(", "))


def test_a_method_with_the_claimed_average_is_named_with_it():
    def loss(*tensors):
        return policy_loss(*tensors, method="SPO()", aggregation="seq-mean-token-mean").loss

    with pytest.raises(AssertionError, match=r"gradient of SPO\(.*\) with aggregation='seq-mean-token-mean'"):
        assert_is(loss, "SAPO()")


def test_a_loss_that_is_no_published_method_is_named_as_none():
    def loss(logp, logp_old, advantages, mask):
        return -((logp - logp_old).exp().sqrt() * advantages[:, None] * mask).sum() / mask.sum()

    with pytest.raises(AssertionError) as caught:
        assert_is(loss, "BandPO()")
    assert "It has the gradient of" not in str(caught.value)
