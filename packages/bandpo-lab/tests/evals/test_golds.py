import pytest

pytest.importorskip("math_verify")

from bandpo_lab.data.sources import load
from bandpo_lab.evals.golds import Gold, find_bad_golds, renderings, value_of

USABLE = [
    "27", "-7", "0", "2.50", "1,234", r"1\,234", "4.5e33", "3e6", "1e-5", "2.7778e-6", r"2.5 \times 10^{3}",
    "-1./3", "62.5%", r"8 \%", "9 (apples)", "np.arcsin(10/13)", "2*np.pi", "1/3", r"\frac{1}{2}", r"11\sqrt2",
    r"(3, \frac{\pi}{2})", "1, 2", "[1, 2)", r"\text{Evelyn}", "Evelyn", r"\text{(B)}", "No solution",
    "x^2 + 2x + 1", "f(x)=2x", "x=2", r"90^\circ", "52_8", r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", "40, 200",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\mathbb{R}", "k \\geqslant 2", "x=-1,3",
]  # fmt: skip

UNUSABLE = [
    ("", "empty"),
    ("1" * 1001, "longer than 1000 characters"),
    (r"\frac{", "not read as mathematics"),
    ("9**9**9**9", "not read as mathematics"),
    ("np.foo(3)", "not read as mathematics"),
    ("3:00", "not read as mathematics"),
    ("9^{9^{9^{9}}}", "cannot be compared"),
    ("2e-3", r"does not accept"),  # 2·e - 3, or 0.002
    ("N=n", "does not accept"),  # math-verify does not tell N from n
    ("5 dozen", "does not accept"),
    ("MR=SRMC", "does not accept"),
]


def test_other_spellings_of_usable_golds_are_right(grader):
    assert find_bad_golds([Gold(gold, gold) for gold in USABLE], grader) == []


@pytest.mark.parametrize(("gold", "reason"), UNUSABLE)
def test_golds_that_cannot_be_used_are_named_with_the_reason(grader, gold, reason):
    assert reason in find_bad_golds([Gold("x", gold)], grader)[0].reason


def test_a_gold_that_accepts_another_value_is_found(monkeypatch, grader):
    monkeypatch.setattr("bandpo_lab.evals.golds.renderings", lambda gold: ([gold], [r"\frac{54}{2}"]))
    assert "accepts" in find_bad_golds([Gold("x", "27")], grader)[0].reason


def test_each_rule_checks_its_own_golds():
    assert find_bad_golds([Gold("a", "N=n", "multiplication")]) == []


@pytest.mark.parametrize(
    ("gold", "value"),
    [("1,234", 1234), ("2.5e3", 2500), (r"2.5 \times 10^{3}", 2500), ("50%", 0.5), (r"$-\frac{1}{2}$", -0.5)],
)
def test_values_are_read_without_math_verify(gold, value):
    assert value_of(gold) == value
    unplain = ["52_8", "40, 200", "5 4.6", "$48$, $384$", "1e999", "nan", "1/0", "x", "2e"]
    assert [other for other in unplain if value_of(other) is not None] == []


def test_renderings_of_an_expression():
    right, wrong = renderings("a=b1+speed")
    assert right == ["a=b1+speed", "a = b1 + speed", r"a=b1+\text{speed}"]
    assert wrong == ["a=b2+speed", "x=x"]


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (("aime24", "aime25", "amc23", "gsm8k_test"), 1419),
        pytest.param(("gsm8k_train",), 7473, marks=pytest.mark.exhaustive),
    ],
)
def test_every_gold_of_the_real_sets_can_be_used(names, count, real_data, grader):
    sets = [load(str(real_data / f"{name}.jsonl")) for name in names]
    golds = [Gold(problem.id, problem.answer) for each in sets for problem in each.problems]
    assert len(golds) == count
    assert find_bad_golds(golds, grader) == []
