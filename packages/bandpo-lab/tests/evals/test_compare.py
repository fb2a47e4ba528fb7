import numpy as np
import pytest

from bandpo_lab.evals.compare import compare_scores
from bandpo_lab.evals.metrics import estimate
from bandpo_lab.evals.report import Scores


def scores(values, metric="mean@4", problems=None):
    values = np.asarray(values, dtype=float)
    ids = problems or tuple(f"p{i}" for i in range(len(values)))
    return {"set": Scores(ids, {metric: values}, {})}


def test_pairing_takes_out_how_hard_the_problems_are():
    rng = np.random.default_rng(0)
    first = rng.random(100)
    second = first + rng.normal(0.05, 0.05, 100)
    paired = estimate(second, first)
    assert paired.value == pytest.approx((second - first).mean())
    assert (paired.high - paired.low) / 2 == pytest.approx(1.96 * (second - first).std() / 10, rel=0.15)
    # Apart, each side's interval is wider than the whole difference.
    assert estimate(first).high > estimate(second).low
    assert paired.low > 0


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        ([0.9] * 30, "the second is better"),
        ([0.1] * 30, "the first is better"),
        ([0.5] * 30, "no difference can be claimed"),
        ([0.0, 1.0] * 15, "no difference can be claimed"),
    ],
)
def test_plain_words(second, verdict):
    (difference,) = compare_scores([scores([0.5] * 30)], [scores(second)])
    assert difference.verdict == verdict
    assert difference.first == 0.5
    assert difference.interval.value == pytest.approx(difference.second - 0.5)


def test_one_metric_decides_and_the_others_are_corrected():
    """Of ten secondary metrics with p = 0.02 none can be claimed; the primary one with the same p can."""
    values = 0.5 + np.linspace(-0.1, 0.1, 30) + 0.0275
    table = {"mean@4": values} | {f"pass@{k}": values for k in range(2, 12)}
    ids = tuple(map(str, range(30)))
    sides = [
        {"set": Scores(ids, {n: v * (i or 0) + 0.5 * (1 - i) for n, v in table.items()}, {})} for i in (0, 1)
    ]
    primary, *others = compare_scores(sides[:1], sides[1:])
    assert primary.p == primary.interval.p
    assert 0.005 < primary.p < 0.05
    assert primary.verdict == "the second is better"
    assert {d.verdict for d in others} == {"no difference can be claimed"}


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="different problems"):
        compare_scores([scores([0.5, 0.5])], [scores([0.5, 0.5], problems=("a", "b"))])
    with pytest.raises(ValueError, match="no data source and metric in common"):
        compare_scores([scores([0.5])], [scores([0.5], metric="mean@8")])
    with pytest.raises(ValueError, match="at least one run"):
        compare_scores([], [scores([0.5])])
    with pytest.raises(ValueError, match="3 and 2 problems"):
        estimate([0, 1, 1], [0, 1])
