"""The theory of the blocked share against a simulation that shares no formula with it."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from bandpo import FixedClip
from studies.blocked_share import RareAnswer


@pytest.mark.parametrize(("updates", "rise"), [(4, 0.325), (8, 0.079), (16, 0.023)])
def test_from_rest_a_clip_binds_above_so_many_nats(updates, rise):
    """Clip 0.2 binds only if g·S(U − 1) > ln 1.2; the figures were computed by another program."""
    assert RareAnswer(0.002, 128, updates, 1).binding_rise == pytest.approx(rise, abs=5e-4)


def simulated(rise, beta, epochs, minibatches, lag, draws, *, adam, batches=600):
    """Compute the share of gradients beyond 1.2 where one number is trained and its answer is drawn by chance."""
    generator = random.Random(0)
    chance_of_none = (1 - draws / 128) ** (128 / minibatches)
    drawn = [[generator.random() > chance_of_none for _ in range(minibatches)] for _ in range(batches)]
    logp = 0.0
    momentum = 0.0
    versions = []
    blocked = []
    for batch in range(batches):
        versions.append(logp)
        logp_old = versions[max(batch - lag, 0)]
        for update in range(epochs * minibatches):
            gradient = 0.0
            if drawn[batch - lag][update % minibatches]:
                beyond = math.exp(logp - logp_old) > 1.2
                blocked.append(beyond)
                gradient = 0.0 if beyond else 1.0
            if adam:  # its second moment is that of all other weights: 1
                momentum = beta * momentum + (1 - beta) * gradient
                logp += rise * momentum
            else:  # at a rate with which a gradient makes the rise in the end
                momentum = beta * momentum + gradient
                logp += rise * (1 - beta) * momentum
    return sum(blocked) / len(blocked)


def test_the_theory_gives_the_blocked_share_of_a_simulation():
    """Over optimizers, rises, epochs × minibatches, lags and draws."""
    uses = [(1, 1), (1, 4), (4, 1), (4, 4), (1, 16), (16, 1)]
    gaps = []
    gaps_without_lag = []
    for beta, (epochs, minibatches), lag, draws, rise in itertools.product(
        (0.0, 0.9), uses, (0, 1, 4, 8), (0.1, 0.25, 1.0, 10.0), (0.01, 0.05, 0.2, 0.5)
    ):
        answer = RareAnswer(draws / 128, 128, epochs, minibatches, lag, beta)
        share = simulated(rise, beta, epochs, minibatches, lag, draws, adam=beta == 0.9 and lag == 4)
        gaps.append(answer.blocked_share(rise) - share)
        gaps_without_lag.append(replace(answer, lag=0).blocked_share(rise) - share)
    assert sum(map(abs, gaps)) / len(gaps) < 0.04
    assert abs(sum(gaps)) / len(gaps) < 0.01
    assert sum(map(abs, gaps_without_lag)) / len(gaps) > 0.15


@pytest.mark.parametrize(
    ("minibatches", "lag", "share"),
    [(4, 4, 0.65), (4, 4, 0.59), (4, 8, 0.68), (4, 8, 0.76), (1, 4, 0.70), (1, 4, 0.52)],
)
def test_stale_data_are_blocked_as_a_program_written_apart_from_this_one_saw(minibatches, lag, share):
    assert RareAnswer(0.002, 128, 1, minibatches, lag).blocked_share(0.3) == pytest.approx(share, abs=0.25)


def test_a_rule_without_an_upper_bound_blocks_nothing():
    answer = RareAnswer(0.002, 128, 1, 4, 4, rule=FixedClip(0.2, math.inf))
    assert answer.blocked_share(0.3) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probability": 0.0}, "probability must be between 0 and 1, got 0"),
        ({"batch": 0}, "must be at least 1"),
        ({"lag": -4}, "lag at least 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(RareAnswer(0.002, 128, 4, 4), **change)
