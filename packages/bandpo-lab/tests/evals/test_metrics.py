import itertools
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_lab.evals.metrics import estimate, maj_at_k, mean_at_k, pass_at_k, per_problem


@given(st.integers(1, 40), st.data())
def test_pass_is_chens_formula(n, data):
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    expected = 1 - comb(n - right, k) / comb(n, k)
    assert pass_at_k([[1] * right + [0] * (n - right)], k)[0] == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.data())
def test_pass_of_graded_scores_is_the_mean_best_of_all_subsets(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    expected = np.mean([max(s) for s in itertools.combinations(scores, k)])
    assert pass_at_k([scores], k)[0] == pytest.approx(expected, abs=1e-12)


def test_majority_by_hand():
    correct = [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    answers = [
        ["7", "7", "3", "4", "5"],  # two votes of five carry it
        ["1", "1", "2", "2", "3"],  # a tie between right and wrong: half
        [None] * 5,  # nobody answered
        ["9", None, None, None, None],  # abstentions do not outvote
    ]
    assert maj_at_k(correct, answers).tolist() == [1.0, 0.5, 0.0, 1.0]


def test_interval_over_seeds_sees_the_seeds():
    by_seed = np.stack([np.full(500, level) for level in (0.1, 0.3, 0.5, 0.7)])
    e = estimate(by_seed)
    assert e.value == pytest.approx(0.4)
    # The spread is of 4 seeds, standard deviation 0.258, so 0.129 for their mean; t with 3 degrees is 3.18.
    assert (e.high - e.low) / 2 == pytest.approx(3.18 * 0.129, rel=0.02)


@pytest.mark.parametrize(("ability", "k"), [((1, 1), 1), ((0.3, 2), 1), ((0.1, 1.5), 8), ((4, 0.6), 8)])
def test_intervals_hold_the_truth_in_95_of_100_cases(ability, k):
    """Of 30 problems and 8 samples: a mean, and the difference of two models that are as good."""
    rng = np.random.default_rng(0)
    truth = np.mean(1 - (1 - rng.beta(*ability, 1_000_000)) ** k)
    held = []
    for _ in range(300):
        p = rng.beta(*ability, (30, 1))
        first, second = (pass_at_k(rng.random((30, 8)) < p, k) for _ in range(2))
        alone, apart = estimate(first), estimate(first, minus=second, smooth=k == 1)
        held.append((alone.low <= truth <= alone.high, apart.low <= 0 <= apart.high))
    assert np.mean(held, axis=0).min() > 0.91  # three standard errors below 0.95


def test_names_and_powers_and_many_samples():
    table = per_problem([[1, 0, 0], [0, 0, 0]], [["a", "b", "b"], ["x", "y", "z"]])
    assert list(table) == ["mean@3", "pass@2", "pass@3", "maj@3"]
    assert table["pass@3"].mean() == 0.5
    assert table["maj@3"].mean() == 0.0
    assert per_problem([[1, 0, 0]])["pass@3"].tolist() == [1.0]
    assert pass_at_k([[1] + [0] * 4095], 2048)[0] == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [[], [[]], [1, 0], [[2.0]], [[-1.0]], [[float("nan")]]])
def test_malformed_scores_are_refused(bad):
    with pytest.raises(ValueError, match="scores must"):
        mean_at_k(bad)


@pytest.mark.parametrize("k", [1.5, 1.0, "1"])
def test_k_must_be_whole(k):
    with pytest.raises(TypeError, match="whole number of samples"):
        pass_at_k([[1, 0]], k)
    assert pass_at_k([[1, 0]], np.int64(2)).shape == (1,)


def test_other_bad_input_is_refused():
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"k = {k}"):
            pass_at_k([[1, 0]], k)
    with pytest.raises(ValueError, match="shape of the scores"):
        maj_at_k([[1, 0]], [["a"]])
    with pytest.raises(ValueError, match="values must"):
        estimate([])
