import gc
import importlib.util
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from helpers.frameworks import needs

pytest.importorskip("math_verify")

from bandpo_lab.data.sources import load
from bandpo_lab.evals import grading
from bandpo_lab.evals.extraction import LONGEST_ANSWER, extract
from bandpo_lab.evals.golds import Gold, find_bad_golds
from bandpo_lab.evals.grading import MathGrader, compute_score, reward

TIME_LIMIT = 1.5  # as in conftest.py
WORKER = importlib.util.find_spec("bandpo_lab.evals.math_worker").origin


RIGHT = [
    ("27", r"\boxed{27}"),
    ("27", r"\boxed{27.0}"),
    ("27.0", r"Thus \boxed{27}."),
    ("27", r"First \boxed{3}, no: \boxed{27}"),
    ("27", "She walks 27 miles."),
    ("27", "Step 5 gives 9.\n#### 27"),
    ("27", r"\boxed{27 \text{ miles}}"),
    ("27", r"\boxed{x = 27}"),
    ("27", "The final answer is $27$. I hope it is correct."),
    ("1234", "#### 1,234"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    (r"\frac{1}{2}", r"\boxed{\dfrac12}"),
    (r"\frac{1}{2}", r"\boxed{1/2}"),
    (r"11\sqrt2", r"\boxed{11\sqrt{2}}"),
    (r"(3, \frac{\pi}{2})", r"\boxed{\left(3, \pi/2\right)}"),
    ("1, 2", r"\boxed{\{2, 1\}}"),
    ("[1, 2)", r"\boxed{[1, 2)}"),
    (r"\text{Evelyn}", r"\boxed{Evelyn}"),
    (r"\text{(B)}", r"\boxed{B}"),
    ("2500", r"\boxed{2.5 \times 10^3}"),
    ("x^2 + 2x + 1", r"\boxed{(x+1)^2}"),
    (r"90^\circ", r"\boxed{90}"),
    # E-notation, and numbers as Python writes them.
    ("4.5e33", r"\boxed{4.5 \times 10^{33}}"),
    (r"4.5 \times 10^{33}", r"\boxed{4.5e33}"),
    ("4.5e+33", r"\boxed{45 \cdot 10^{32}}"),
    ("1e-5", r"\boxed{10^{-5}}"),
    ("6.63e-34", r"\boxed{6.63 × 10^{-34}}"),
    ("2018", r"\boxed{2.018\times10^3}"),
    ("-1./3", r"\boxed{-\frac13}"),
    ("np.arcsin(10/13)", r"\boxed{\arcsin\frac{10}{13}}"),
    ("2**10", r"\boxed{1024}"),
    # Per cent, notes and units.
    ("62.5%", r"\boxed{62.5\%}"),
    ("62.5%", r"\boxed{\frac58}"),
    ("10", r"\boxed{10 \%}"),
    ("0.1", r"\boxed{10 \%}"),
    ("9 (apples)", r"\boxed{9}"),
    ("9", r"\boxed{9~\mathrm{m/s}}"),
    ("9", r"\boxed{9\,\mathrm{m}/\mathrm{s}^2}"),
    # Points, groups of digits, wrapped numbers.
    ("27", r"\boxed{27.}"),
    ("27", r"\boxed{−27.} or rather \boxed{27.}"),
    ("13535", r"\boxed{13\,535}"),
    ("1234", r"\boxed{1{,}234}"),
    ("1.25", r"\boxed{\text{1.25}}"),
    ("3.5", r"\boxed{3 1/2}"),
    # Where the answer stands.
    ("1" * 40, r"\boxed{1." + "1" * 39 + "e39}"),
    ("27", r"\boxed {27}"),
    ("27", r"\fbox{27}"),
    ("9", "<think>It may be 12</think><answer>9</answer>"),
    ("9", r"<think>\boxed{12}</think> The answer is 9."),
    ("9", "<answer>The total is 9 apples.</answer>"),
    ("9", r"<think>\boxed{9}</think>"),
    (r"\frac{14}{3}", "The answer is 14/3."),
    ("4.5e33", "The answer is $4.5e33$."),
    (r"4.5 \times 10^{33}", "The answer is 4.5e33."),
    ("-1./3", "The answer is $-1./3$."),
    (r"x=\frac{\mathrm{gb}}{f}", r"The answer is $x=\frac{\mathrm{gb}}{f}$."),
    ("27", r"The answer is $27 \text{ miles}$."),
    ("all real numbers", "The answer is $all real numbers$."),
    ("5", "#### 5."),
    ("5", "#### **5**"),
    ("5", "#### 5\n" + "And so on. " * 200),
    ("27", "#### Step 1: add 3\nThe answer is 27."),
    ("27", "#### 1. First add 3\nThe answer is 27."),
    # Sets, equations and texts.
    (r"(-\infty, 0]", r"\boxed{x \le 0}"),
    ("x^2 = -1", r"\boxed{x^2 + 1 = 0}"),
    ("f(x) = 2x", r"\boxed{f(x)=x+x}"),
    (r"\frac{1}{3}E_1+\frac{2}{3}E_2", r"\boxed{\frac{2}{3}E_{2} + \frac{1}{3}E_{1}}"),
    ("52_8", r"\boxed{52_{8}}"),
    ("No solution", r"\boxed{\text{no solution}}"),
    ("5", r"\boxed{2+3=5}"),
    ("480", r"\boxed{480 dollars}"),
    ("27", r"\boxed{27 cats}"),
    (r"2\sqrt{3}", r"\boxed{2√3}"),
    ("B", r"\boxed{B)}"),
    ("B", r"\boxed{Option B}"),
    ("e - 8", r"\boxed{e-8}"),
    ("-2", r"\boxed{- 2 = m}"),
    ("m=-2", r"\boxed{- 2 = m}"),
    (r"25\%", r"\boxed{$25 \%$}"),
]


@pytest.mark.parametrize(("gold", "completion"), RIGHT)
def test_right_answers_score_one(grader, gold, completion):
    verdict = grader.grade(completion, gold)
    assert (verdict.score, verdict.answer, verdict.reason) == (1.0, gold, "right")


WRONG = [
    ("27", r"\boxed{28}", "wrong"),
    ("27", r"\boxed{27} or rather \boxed{28}", "wrong"),
    ("27", r"\boxed{26.99999}", "wrong"),
    ("27", r"\boxed{-27}", "wrong"),
    ("27", "27 is the number of cats, and 28 the answer", "wrong"),
    ("27", r"27 \boxed{", "no answer"),
    ("27", r"27 \boxed{27", "no answer"),
    ("27", r"27 \boxed{}", "no answer"),
    ("27", "", "no answer"),
    ("27", " \n\t", "no answer"),
    ("27", "I cannot solve it.", "no answer"),
    (r"\frac{1}{2}", r"\boxed{2}", "wrong"),
    ("1, 2", r"\boxed{1}", "wrong"),
    ("[1, 2)", r"\boxed{[1, 2]}", "wrong"),
    (r"\text{Evelyn}", r"\boxed{Karla}", "wrong"),
    ("3e6", r"\boxed{18e}", "wrong"),
    ("4.5e33", r"\boxed{4.5e32}", "wrong"),
    ("6.63e-34", r"\boxed{5 \times 10^{-34}}", "wrong"),
    ("6.63e-34", r"\boxed{0}", "wrong"),
    ("0.0000001", r"\boxed{0.0000002}", "wrong"),
    ("N=n", r"\boxed{x=x}", "wrong"),
    ("N=n", r"\boxed{1=1}", "wrong"),
    ("x^2 = -1", r"\boxed{x^2 = -2}", "wrong"),
    ("x^2 = -1", r"\boxed{x = x + 1}", "wrong"),
    ("52_8", r"\boxed{52_9}", "wrong"),
    ("52_8", r"\boxed{53_8}", "wrong"),
    ("235", r"\boxed{1\,234}", "wrong"),
    ("235", r"\boxed{1 234}", "wrong"),
    ("6", r"\boxed{1 2 3}", "wrong"),
    (r"\frac{1}{3}E_1+\frac{2}{3}E_2", r"\boxed{\frac{2}{3}}", "wrong"),
    (r"\frac{2}{3}", r"\boxed{\frac{1}{3}E_1+\frac{2}{3}E_2}", "wrong"),
    ("5", r"\boxed{5\mathrm{i}+\frac{1}{2}}", "wrong"),
    ("3", r"\boxed{3\mathrm{e}^{2}}", "wrong"),
    ("2", r"\boxed{10 + 2\%}", "wrong"),
    ("12", "<think>It may be 12</think><answer>9</answer>", "wrong"),
    ("2", "#### 2**3**2", "wrong"),
    ("5", r"\boxed{6=5}", "wrong"),
    ("5", r"\boxed{500\%}", "wrong"),
    ("5", r"\boxed{5\text{ is wrong}}", "wrong"),
    ("5", r"\boxed{5\mod7}", "wrong"),
    ("5", r"\boxed{5,\ldots}", "wrong"),
    ("0", r"\boxed{2x+1=0}", "wrong"),
    ("5", r"\boxed{5 million}", "wrong"),
]

KNOWING = [  # the problem, its gold, an answer that equals the gold, and what is said of it
    ("Compute $\\sqrt{50}+\\sqrt{18}$.", r"8\sqrt{2}", r"\sqrt{50}+\sqrt{18}", "restated"),
    ("Factor $x^2+2x+1$.", "(x+1)^2", "x^2 + 2x + 1", "restated"),
    ("Write $0.5$ as a fraction.", r"\frac12", "0.5", "restated"),
    ("What is $3+4$?", "7", "4+3", "restated"),
    ("What is $3+4$?", "7", "3+4+0", "restated"),
    ("What is $3+4$?", "7", "9+9-9-9+2+8-3", "restated"),
    ("Simplify $\\frac{18}{24}$.", r"\frac34", r"\frac{6}{8}", "unsimplified"),
    ("Simplify $\\sqrt{48}$.", r"4\sqrt3", r"2\sqrt{12}", "unsimplified"),
    ("Simplify $\\sqrt{48}$.", r"4\sqrt3", r"4\sqrt{3}", "right"),
    ("A coin and $2$ dice: how many of $12$ cows?", "12", "x = 12", "right"),
    ("Of 8 balls 5 are red. What is the chance of red?", "0.625", r"\frac{5}{8}", "right"),
    ("Give $10$ per cent of 3 hours in minutes.", "18", r"18 \text{ minutes}", "right"),
    ("Simplify $-10-4(n-5)$", "10-4 n", "-4n+10", "right"),
    ("Solve $x^2=4$.", "2, -2", r"\{-2, 2\}", "right"),
]


@pytest.mark.parametrize(("problem", "gold", "answer", "reason"), KNOWING)
def test_an_answer_says_more_than_its_problem(grader, problem, gold, answer, reason):
    verdict = grader.grade(rf"\boxed{{{answer}}}", gold, problem)
    assert (verdict.reason, verdict.score) == (reason, float(reason == "right"))
    assert grader.grade(rf"\boxed{{{answer}}}", gold).reason == "right"


PAGE = Path(__file__).with_name("debatable.md").read_text(encoding="utf-8")
DEBATABLE = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (right|wrong) \| (.+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("gold", "answer", "verdict", "why"), DEBATABLE)
def test_the_documented_disagreements_are_as_documented(grader, gold, answer, verdict, why):
    assert len(DEBATABLE) == 18
    assert grader.grade(rf"\boxed{{{answer}}}", gold).reason == verdict
    if "listed" in why:
        assert find_bad_golds([Gold("x", gold)], grader)


MATCH_EVERYTHING = ["27, 28", r"27 \text{ or } 28", r"\{26, 27, 28\}", "[0, 999]", r"0 \le x \le 999"]
MATCH_EVERYTHING += [r"\mathbb{R}", "x", r"\infty", "26 = 27 = 28", r"26 \pm 1", r"\text{any number}"]
MATCH_EVERYTHING += [".*", "*", "True", "nan"]
MATCH_EVERYTHING = [rf"\boxed{{{answer}}}" for answer in MATCH_EVERYTHING]
MATCH_EVERYTHING += [" ".join(rf"\boxed{{{i}}}" for i in range(1000)), ", ".join(map(str, range(1000)))]


@pytest.mark.parametrize(
    ("gold", "completion", "reason"), WRONG + [("27", text, None) for text in MATCH_EVERYTHING]
)
def test_wrong_and_malformed_answers_score_zero(grader, gold, completion, reason):
    verdict = grader.grade(completion, gold)
    assert verdict.score == 0.0
    assert reason in (None, verdict.reason)


@pytest.mark.parametrize(
    "completion",
    [
        "9" * 1_000_000,
        "1," * 500_000,
        "$" * 1_000_000,
        r"\boxed{" + "9" * 1_000_000 + "}",
        r"\boxed{" + "{" * 1_000_000,
        r"\boxed{" * 150_000,
        "\\" * 1_000_000,
        r"\boxed{" + r"\frac{" * 300 + "1" + "}{2}" * 300 + "}",
        "(" * 100_000,
        "\x00\ud800\uffff",
    ],
)
def test_huge_answers_are_wrong_at_once(grader, completion):
    started = time.monotonic()
    assert grader.grade(completion, "27").score == 0.0
    assert time.monotonic() - started < 60  # of the clock, on a busy machine; quadratic searches take minutes


SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in ("10^{10^{10}}", "(" * 400 + "1" + ")" * 400)]


@pytest.mark.parametrize("bomb", ["9^{9^{9^{9}}}", *SLOW])
def test_bombs_end_at_the_time_limit_and_the_next_answer_is_graded(grader, bomb):
    started = time.monotonic()
    verdict = grader.grade(rf"\boxed{{{bomb}}}", "27")
    assert verdict.score == 0.0
    assert verdict.reason in ("timeout", "failed")
    assert time.monotonic() - started < 20 * TIME_LIMIT + 10  # of the clock, on a busy machine
    assert grader.grade(r"\boxed{\frac{54}{2}}", "27").score == 1.0


@pytest.mark.slow
def test_a_costly_answer_is_graded_once(monkeypatch):
    asked, ask = [], MathGrader._ask
    monkeypatch.setattr(MathGrader, "_ask", lambda *question: asked.append(question) or ask(*question))
    with MathGrader(time_limit=TIME_LIMIT, workers=1) as grader:
        verdicts = {grader.grade(r"\boxed{10^{10^{10}}}", "27").reason for _ in range(5)}
    assert verdicts <= {"timeout", "failed"}
    assert len(asked) <= 2


def test_an_answer_whose_process_ended_otherwise_is_asked_once_more(grader, monkeypatch):
    deaths, ask = [1], grader._ask

    def dying(*question):
        if deaths[0]:
            deaths[0] -= 1
            return grading._Verdict(reason="failed")
        return ask(*question)

    monkeypatch.setattr(grader, "_ask", dying)
    assert grader.grade("#### 9870105", "9870105").reason == "right"
    deaths[0] = 2
    assert [grader.grade("#### 9870106", "9870106").reason for _ in range(2)] == ["failed", "failed"]


def test_nothing_in_an_answer_is_executed(grader, tmp_path):
    target = tmp_path / "touched"
    code = f"__import__('pathlib').Path('{target}').touch()"
    for completion in (rf"\boxed{{{code}}}", code, f"#### {code}", f"<answer>{code}</answer>"):
        assert grader.grade(completion, "27").score == 0.0
        assert grader.grade("#### 27", completion).score == 0.0
    assert not target.exists()


HOSTILE = ["__import__('os').getpid()", "answer: 1+__import__('os').getpid()", r"\text{__import__('os')}"]
HOSTILE += [r"\operatorname{exec}(1)", r"\mathrm{eval}(2)", "1+1;exec('2')", "3 .__class__", "3**2 .real"]
HOSTILE += ["lambda: 1", "[1 for i in (2,3)]", "3 if 1 else 2", "it is 3*(1+8)"]


@pytest.mark.slow
def test_what_sympy_evaluates_holds_no_name():
    """SymPy reads a number by evaluating it as Python: nothing but digits and operators may reach that."""
    code = f"""
import json, runpy
from bandpo_lab.evals.extraction import extract
from bandpo_lab.evals.normalize import normal_form
import sympy.parsing.sympy_parser as parser
compare = runpy.run_path({WORKER!r})["grade_pair"]
seen, stringify = [], parser.stringify_expr
compare("xyz", "1")  # loads SymPy's units, which are named by such strings
parser.stringify_expr = lambda text, *rest: seen.append(text) or stringify(text, *rest)
for answer in {HOSTILE!r}:
    for completion in (answer, "#### " + answer):
        extracted = extract(completion)
        try:
            compare(normal_form(extracted.text if extracted else answer), "27")
        except Exception:
            pass
print(json.dumps(seen))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    evaluated = json.loads(run.stdout)
    assert len(evaluated) > 10
    assert [text for text in evaluated if not re.fullmatch(r"[\d.\s()*/+-]+", text)] == []


def test_grading_works_from_threads(grader):
    with ThreadPoolExecutor(8) as threads:
        verdicts = threads.map(lambda i: grader.grade(rf"\boxed{{{i}}}", str(i)).score, range(8))
    assert [*verdicts] == [1.0] * 8
    assert [grader.grade(*pair).score for pair in ((r"\boxed{1}", "1"), (r"\boxed{2}", "3"))] == [1.0, 0.0]


def test_a_process_that_died_is_replaced_and_ends_with_its_grader():
    grader = MathGrader(workers=1)
    assert grader.grade("#### 5", "5").score == 1.0
    worker = grader._slots.get()
    worker.process.kill()
    worker.process.wait()
    grader._slots.put(worker)
    assert grader.grade("#### 6", "6").score == 1.0
    worker = grader._slots.get()
    process = worker.process
    del grader, worker
    gc.collect()
    assert process.poll() is not None


def test_equal_wrong_answers_vote_together(grader):
    halves = ("0.5", r"\frac{1}{2}", "1/2", r"\frac{2}{4}")
    assert {grader.grade(rf"\boxed{{{half}}}", "27").answer for half in halves} == {"1/2"}


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\frac{1}{2}} and } more", r"\frac{1}{2}"),
        ("#### 1\n#### 2\nend", "2"),
    ],
)
def test_extraction_balances_braces(completion, text):
    assert extract(completion).text == text
    for length in (LONGEST_ANSWER, LONGEST_ANSWER + 1):  # what is longer is cut there, and wrong
        assert len(extract(rf"\boxed{{{'1' * length}}}").text) == length


def test_reward_in_trls_form():
    messages = [{"role": "assistant", "content": r"\boxed{3}"}]
    assert reward([messages, r"\boxed{4}"], answer=["3", "3"], prompt=["a", "b"]) == [1.0, 0.0]
    restated = {"answer": ["7"], "prompts": [[{"role": "user", "content": "What is $3+4$?"}]]}
    assert reward([r"\boxed{3+4}"], **restated) == [0.0]
    assert reward([r"\boxed{7}"], **restated) == [1.0]
    assert compute_score("math", r"\boxed{3+4}", "7", {"problem": "What is $3+4$?"})["reason"] == "restated"
    with pytest.raises(ValueError, match="time_limit"):
        MathGrader(time_limit=0)
    with pytest.raises(ValueError, match="one answer for each"):
        reward(["a"], answer=[])


def test_score_in_verls_form_feeds_verls_validation():
    needs("verl")
    from verl.trainer.ppo.metric_utils import process_validation_metrics as process

    completions = [r"\boxed{3}", r"\boxed{3.0}", r"\boxed{4}", "no idea"]
    results = [compute_score("amc23", text, "3", {"index": 0}) for text in completions]
    assert [r["score"] for r in results] == [1.0, 1.0, 0.0, 0.0]
    assert [r["reason"] for r in results] == ["right", "right", "wrong", "no answer"]
    columns = {key: [r[key] for r in results] for key in results[0]}
    table = process(["amc23"] * 4, ["p"] * 4, columns)["amc23"]["acc"]
    assert table["mean@4"] == 0.5
    assert table["maj@4/mean"] > 0.5


def test_verl_finds_the_reward_function_by_its_path():
    needs("verl")
    from verl.utils.import_utils import load_extern_object

    assert load_extern_object("pkg://bandpo_lab.evals.grading", "compute_score") is compute_score


def test_gold_answers_of_the_real_sets_are_right_and_others_wrong(grader, real_data):
    files = [real_data / f"{name}.jsonl" for name in ("aime24", "aime25", "amc23", "gsm8k_test")]
    golds = [problem.answer for file in files for problem in load(str(file)).problems]
    assert len(golds) == 1419
    for right in (r"So it is \boxed{%s}.", "The final answer is $%s$."):
        assert {grader.grade(right % gold, gold).score for gold in golds} == {1.0}
    for wrong in (r"So it is \boxed{%s1}.", r"%s \boxed{0.5}", r"\boxed{%s", r"\boxed{%s \text{ or } 0.5}"):
        assert {grader.grade(wrong % gold, gold).score for gold in golds} == {0.0}


def hostile(base, count):
    """Answers that would each take all of their time, and are no others' of these tests."""
    return [rf"\boxed{{{base}^{{9^{{9^{{{k}}}}}}}}}" for k in range(10, 10 + count)]


@pytest.mark.slow
def test_a_batch_of_hostile_answers_has_a_limit_of_time(quick_limits):
    """Of 40 answers that would each take all of their time, two do; honest answers among them keep their scores."""
    honest = [r"\boxed{42}", r"\boxed{41}", r"\boxed{42.0}"]
    with pytest.warns(UserWarning, match="answers had less time in the grader, as 1 others"):
        scores = grading.reward([r"\boxed{42.0}", *hostile(9, 40), *honest], ["42"] * 44)
    assert scores == [1.0, *[0.0] * 40, 1.0, 0.0, 0.0]
    assert set(quick_limits) == {TIME_LIMIT, grading.SHORT_LIMIT}
    assert len(quick_limits) <= 5  # a process that runs out of memory is asked twice


@pytest.mark.slow
def test_hostile_answers_that_verl_asks_for_one_by_one_have_a_limit_of_time(quick_limits, monkeypatch):
    """So many in a row are a batch; the next has all of its time again."""
    monkeypatch.setattr(grading, "ANSWERS_IN_A_ROW", 20)
    monkeypatch.setattr(grading, "shared_time", cache(grading.shared_time.__wrapped__))
    with pytest.warns(UserWarning, match="less time in the grader") as warned:
        reasons = [compute_score("math", text, "42")["reason"] for text in hostile(8, 18)]
    assert set(reasons) <= {"timeout", "failed"}
    assert [str(warning.message) for warning in warned] == [
        "answers 2 to 20 of this process have less time in the grader, as 1 of those from 1 on met its limit: right "
        "answers among them may score 0"
    ]
    assert len(quick_limits) <= 4
    # The last two of the batch are compared as texts, the first of the next by the grader.
    quick_limits.clear()
    texts = (r"\boxed{42}", r"\boxed{43.0}", r"\boxed{42.000}")
    assert [compute_score("math", text, "42")["score"] for text in texts] == [1.0, 0.0, 1.0]
    assert quick_limits == [TIME_LIMIT]


def test_a_batch_without_hostile_answers_gives_no_warning(one_grader):
    assert reward([r"\boxed{42.0}"] * 30, ["42"] * 30) == [1.0] * 30
