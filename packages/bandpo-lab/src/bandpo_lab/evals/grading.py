"""Grade completions with math-verify, and the reward functions that use these grades.

The answer is one piece of the completion (see `extract`). Only that piece is compared, so that a completion cannot get
a score by listing many answers. math-verify runs in separate processes, which are killed if they take too long or too
much memory. Timeouts by signals, the usual way, do not work outside the main thread and do not interrupt arithmetic on
huge numbers.
"""

import hashlib
import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from importlib import metadata
from itertools import repeat
from pathlib import Path
from typing import Any

from bandpo_lab.errors import InvalidValue, MissingPackage, RunProblem
from bandpo_lab.evals.extraction import LONGEST_ANSWER, extract
from bandpo_lab.evals.normalize import bases, has_other_case, normal_form, primes, words_of
from bandpo_lab.evals.trivial_answers import check_triviality

_PER_CENT = re.compile(r"(.*?)((?:\s*\\%)*)\s*", re.DOTALL)
_WHOLE_NUMBER = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d+\.\d+")
# The name of a quantity that math-verify does not read, before its value.
_NAME = re.compile(
    r"^\s*(?:[A-Z]|\\(?:operatorname|mathrm|mathbb|text|mathbf)\s*\{[A-Za-z ]+\}"
    r"|\\(?:max|min|gcd|lcm|det|deg|Pr)(?![a-zA-Z])|[a-z](?=\s*\^\s*\{?\s*\*))"
    r"(?:_\{?\w+\}?)?(?:\^\s*(?:\{\s*(?:-1|\*|T)\s*\}|\*|T))?"
    r"\s*(?:\([^=()]*\)|\[[^=\[\]]*\]|[a-zA-Z](?![a-zA-Z]))?\s*=(?=[^=]*$)"
)
# The exclusion of a value from the domain of a fraction, after it
_EXCLUSION = re.compile(r"(?<=\})\s*,\s*(?:\\quad\s*)?([a-z])\s*\\neq?(?![a-z])\s*-?\d+\s*$")
_RATIO = re.compile(r"\d+(?::\d+)+")
_RATIO_IN_WORDS = re.compile(r"(?:\\text\s*\{\s*)?(\d+)\s*(?:\\text\s*\{)?\s*to\s*\}?\s*(\d+)\s*\}?")
_TRUNCATING = re.compile(r"\\[pb]?mod(?![a-z])|\\equiv(?![a-z])|\\[lcv]?dots|\.\.\.|…")
"""Operators at which math-verify stops reading, so that it ignores all that follows, and a congruence."""
_DEGREES = re.compile(
    r"(.*[\w})])\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|\\text\s*\{\s*degrees\s*\})\s*", re.DOTALL
)
# A choice and its words, such as B. Friday, without another choice.
_CHOICE_IN_WORDS = re.compile(
    r"(?:\\text\s*\{\s*)?(?:\(([A-Z])\)|([A-Z])[.:)])\s*\}?\s*(?:\\text\s*\{\s*)?"
    r"(?!.*(?:\b[A-Z]\b|(?i:\b(?:or|and|not|nor|neither|either|maybe|but|rather|instead|is|are|wrong|incorrect|never|except)\b)))"
    r"[a-zA-Z][a-zA-Z \-]+\.?\s*\}?"
)
# A choice and its value, such as (B) 12, without another choice.
_CHOICE = re.compile(
    r"\\text\s*\{\s*\(?([A-Z])[).]\s*\}\s*(?!.*(?:[A-Z]|\b(?:or|and|not)\b))(?:[\d.]|\\(?:\$|frac|sqrt|pi)).*",
    re.DOTALL,
)
# Values for each whole number, such as 2\pi k, k \in \mathbb{Z}
_FAMILY = re.compile(r"(.+?)\s*,\s*([a-z]\s*\\in\s*\\mathbb\s*\{?\s*[ZN]\s*\}?)")
_DETERMINANT = re.compile(r"\\begin\s*\{[vV]matrix\}")


@dataclass(frozen=True)
class Grade:
    """The grade of one completion.

    Attributes:
        score: 1.0 for a right answer, 0.0 for a wrong one.
        answer: The extracted answer, in a form in which equal answers are equal texts; None if there is none.
        reason: ``right``, ``wrong``, ``no answer``, ``too long``, ``timeout``, or ``failed`` (out of memory); if the
            problem is known, also ``restated`` and ``unsimplified`` (see
            `bandpo_lab.evals.trivial_answers.check_triviality`).
    """

    score: float
    answer: str | None
    reason: str


CORES = os.cpu_count() or 1

SLOW_ANSWERS = 24
"""The number of answers of a batch that may reach the time limit. After that, the limit is `SHORT_LIMIT`."""
SHORT_LIMIT = 1.0
"""The shorter limit, in seconds of processor time. Most answers take hundredths of a second, the slowest tenths."""
SLOW_ANSWERS_AT_SHORT_LIMIT = 96
"""The number of answers of a batch that may reach `SHORT_LIMIT`. After that, answers are compared as texts."""


ANSWERS_IN_A_ROW = 512
"""The size of a batch if the caller has no batches: verl asks for one answer at a time, and `bandpo-lab eval` for all
answers of a run."""


class BatchTime:
    """The time limit for the answers of a batch, which gets shorter after many slow answers; usable from any thread.

    Once `SLOW_ANSWERS` of a batch have reached the grader's time limit, the limit of the others is `SHORT_LIMIT`. Once
    `SLOW_ANSWERS_AT_SHORT_LIMIT` have reached that, the others are compared as texts.

    Args:
        size: The number of answers of a batch, after which the next batch begins; None if there is one batch.
        warns: If True, warn as soon as the limit of a batch gets shorter, for callers that do not call `warn_of`.
    """

    def __init__(self, size: int | None = None, *, warns: bool = False) -> None:
        self._size = size
        self._warns = warns
        self._lock = threading.Lock()
        self._slow = 0
        self._slow_at_short_limit = 0
        self._requests = 0
        self._batch_is_limited = False
        self.limited = 0
        """The number of answers whose limit was shorter than the grader's."""

    def limit_of_next(self, usual: float) -> float:
        """Return the time limit of the next answer in seconds; 0 if it is to be compared as a text.

        Args:
            usual: The grader's time limit, in seconds.
        """
        with self._lock:
            # Begin the next batch.
            if self._size is not None and self._requests and self._requests % self._size == 0:
                self._slow = 0
                self._slow_at_short_limit = 0
                self._batch_is_limited = False
            self._requests += 1
            if self._slow < SLOW_ANSWERS:
                return usual
            self.limited += 1
            is_first_limited = not self._batch_is_limited
            self._batch_is_limited = True
            limit = 0.0
            if self._slow_at_short_limit < SLOW_ANSWERS_AT_SHORT_LIMIT:
                limit = min(usual, SHORT_LIMIT)
            number = self._requests
        if self._warns and is_first_limited and self._size is not None:
            last = -(-number // self._size) * self._size
            warnings.warn(
                f"answers {number:,} to {last:,} of this process have less time in the grader, as {SLOW_ANSWERS} of "
                f"those from {last - self._size + 1:,} on met its limit: right answers among them may score 0",
                stacklevel=2,
            )
        return limit

    def count_slow(self, limit: float, usual: float) -> None:
        """Count an answer that reached its time limit."""
        with self._lock:
            if limit < usual:
                self._slow_at_short_limit += 1
            else:
                self._slow += 1

    def warn_of(self, answers: int, batch: str) -> None:
        """Warn if the limit of some answers was shorter than the grader's.

        Args:
            answers: The number of answers.
            batch: The words for the batch in the message, such as "their batch".
        """
        if self.limited:
            warnings.warn(
                f"{self.limited} of {answers} answers had less time in the grader, as {SLOW_ANSWERS} others of "
                f"{batch} met its limit: right answers among them may have scored 0",
                stacklevel=3,
            )


GRADING_MODULES = ("extraction", "grading", "inequalities", "math_worker", "normalize", "trivial_answers")
"""The modules whose code decides grades."""


class MathGrader:
    r"""A grader that compares answers with math-verify in a few processes; usable from any thread.

    Args:
        time_limit: The time limit of one answer, in seconds of processor time (of the clock, on Windows).
        memory: The memory limit of a process in bytes, on systems that have such a limit (Linux, macOS).
        workers: The number of processes; each is started when it is first needed.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: A setting is out of range.

    >>> with MathGrader() as grader:
    ...     grader.grade("It is $\\boxed{0.5}$.", "\\frac{1}{2}").reason
    'right'
    """

    def __init__(self, *, time_limit: float = 5.0, memory: int = 4 << 30, workers: int = CORES) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingPackage(
                "grading needs math-verify: in a clone of bandpo, pip install ./packages/rlvet ./packages/bandpo "
                "'./packages/bandpo-lab[eval]'"
            )
        if not (time_limit > 0 and workers >= 1):
            raise InvalidValue(
                f"time_limit = {time_limit} must be above 0 and workers = {workers} at least 1"
            )
        self._time_limit = time_limit
        self._memory = memory
        self.workers = workers
        # One entry per process: None if the process is not running.
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._slots.put(None)
        # A model repeats its answers, and so those that are slow to compare.
        self._compare_cached = lru_cache(maxsize=100_000)(self._compare)

    def grade(
        self, completion: str, gold: str, problem: str | None = None, batch_time: BatchTime | None = None
    ) -> Grade:
        """Grade one completion, in not much more than the time limit.

        Args:
            completion: The text of the completion.
            gold: The right answer: LaTeX or a plain number, without a box.
            problem: The text of the problem. If given, as in training, an answer that only restates it is wrong.
            batch_time: The time limit for the batch of the completion.
        """
        extracted = extract(completion)
        if extracted is None:
            return Grade(0.0, None, "no answer")
        if len(extracted.text) > LONGEST_ANSWER:
            return Grade(0.0, None, "too long")
        answer = normal_form(extracted.text)
        if not answer:
            return Grade(0.0, None, "no answer")
        gold_form = normal_form(gold)
        usual = self._time_limit
        limit = usual if batch_time is None else batch_time.limit_of_next(usual)
        if limit:
            start = time.monotonic()
            verdict = self._compare_cached(answer, gold_form, limit)
            # A cached comparison takes no time, so it is not counted again.
            if batch_time and verdict.reason and time.monotonic() - start >= limit / 2:
                batch_time.count_slow(limit, usual)
        else:
            # The batch has used up its time: compare the texts, without SymPy.
            is_equal = answer == gold_form
            verdict = _Verdict(right=is_equal, answer=answer, reason=None if is_equal else "timeout")

        if verdict.reason is not None:
            return Grade(0.0, None, verdict.reason)
        if verdict.right:
            reason = None
            if problem:
                reason = check_triviality(extracted.text, gold, problem)
            return Grade(float(reason is None), gold, reason or "right")
        return Grade(0.0, verdict.answer, "no answer" if verdict.answer is None else "wrong")

    def reads(self, gold: str) -> bool:
        """Return True if math-verify parses a gold as mathematics, False if only the same text can match it."""
        normal = normal_form(gold)
        return self._compare_cached(normal, normal, self._time_limit).is_mathematics

    def close(self) -> None:
        """End the processes; if the grader is used again, it starts new ones."""
        for _ in range(self.workers):
            worker = self._slots.get()
            if worker is not None:
                worker.stop()
            self._slots.put(None)

    def __enter__(self) -> "MathGrader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compare(self, answer: str, gold: str, limit: float) -> "_Verdict":
        """Compare normalized texts, with rules for what math-verify ignores."""
        values = _comparable(answer, gold)
        if values is None:
            return _Verdict(answer=answer)
        verdict = self._ask(*values, limit)
        if verdict.reason == "failed":
            # The process may have ended for another reason than this answer, so try once more.
            verdict = self._ask(*values, limit)
        return verdict

    def _ask(self, answer: str, gold: str, limit: float) -> "_Verdict":
        """Compare normalized texts in a process, which is stopped if it fails."""
        worker = self._slots.get()
        reusable_worker = None
        try:
            if worker is None or worker.process.poll() is not None:
                worker = _Worker(self._time_limit, self._memory)
            verdict = worker.ask({"answer": answer, "gold": gold}, limit)
            if not verdict.reason:
                reusable_worker = worker
            return verdict
        finally:
            self._slots.put(reusable_worker)
            if reusable_worker is None and worker is not None:
                worker.stop()


def _comparable(answer: str, gold: str) -> tuple[str, str] | None:
    """Return an answer and a gold as math-verify is to compare them; None if they differ in what it ignores."""
    words = words_of(answer)
    if answer == gold or (words is not None and words == words_of(gold)):
        return _without_per_cent(gold, gold)
    if bases(answer) != bases(gold) or primes(answer) != primes(gold) or has_other_case(answer, gold):
        return None
    if len(_DETERMINANT.findall(answer)) != len(_DETERMINANT.findall(gold)):
        return None
    if "=" not in gold:
        answer = _NAME.sub("", answer)
    if r"\ne" not in gold:
        answer = _EXCLUSION.sub("", answer)
    choice = _CHOICE.fullmatch(answer)
    if choice is not None and len(gold) == 1:
        return choice[1], gold
    choice = _CHOICE_IN_WORDS.fullmatch(answer)
    if choice is not None and re.fullmatch("[A-Z]", gold):
        return choice[1] or choice[2], gold
    if _TRUNCATING.search(answer) and not _TRUNCATING.search(gold):
        return None
    answer_family = _FAMILY.fullmatch(answer)
    gold_family = _FAMILY.fullmatch(gold)
    if answer_family and gold_family:
        if re.sub(r"\s", "", answer_family[2]) != re.sub(r"\s", "", gold_family[2]):
            return None
        return answer_family[1], gold_family[1]
    ratio = _RATIO_IN_WORDS.fullmatch(answer)
    if ratio is not None and _RATIO.fullmatch(gold):
        return f"{ratio[1]}:{ratio[2]}", gold
    return _without_per_cent(_in_radians(answer, gold), _in_radians(gold, answer))


def _in_radians(angle: str, other: str) -> str:
    r"""Return a normalized angle in degrees in radians, if the other text is a multiple of \pi without degrees."""
    match = _DEGREES.fullmatch(angle)
    if match is None or r"\pi" not in other or _DEGREES.fullmatch(other):
        return angle
    name, equals, value = match[1].rpartition("=")
    return rf"{name}{equals}\frac{{({value})\pi}}{{180}}"


def _without_per_cent(answer: str, gold: str) -> tuple[str, str] | None:
    """Return two normalized texts of the same values without their per cent signs; None if the signs are doubled.

    x % is x / 100. But a whole number other than 0 and 1 is the same with and without its sign: data sets leave the
    sign out if the problem asks for a percentage. So is a decimal above 1 for a gold with the sign, as 12.5 for 12.5 %.
    """
    answer_number, answer_signs = _split_per_cent(answer)
    gold_number, gold_signs = _split_per_cent(gold)
    if max(answer_signs, gold_signs) > 1:
        return (answer, gold) if answer == gold else None
    if answer_signs == gold_signs:
        return answer_number, gold_number
    whole = gold_number if answer_signs else answer_number
    if _WHOLE_NUMBER.fullmatch(whole) and whole not in ("0", "1"):
        return answer_number, gold_number
    if gold_signs and _DECIMAL.fullmatch(answer_number) and abs(Decimal(answer_number)) > 1:
        return answer_number, gold_number
    if answer_signs:
        return _hundredth(answer_number), gold_number
    return answer_number, _hundredth(gold_number)


def _split_per_cent(text: str) -> tuple[str, int]:
    """Return a text without the per cent signs at its end, and their number; a sum and a list keep their signs."""
    match = _PER_CENT.fullmatch(text)
    assert match is not None
    signs = match[2].count("%")
    is_sum_or_list = re.search(r"%|,|;|\\text|(?<=[^\s({^=])\s*[-+]", match[1])
    if signs == 1 and is_sum_or_list and not re.fullmatch(r"\(.*\)|\\left\(.*\\right\)", match[1]):
        return text, 0
    return match[1], signs


def _hundredth(text: str) -> str:
    """Return the hundredth of a normalized text; of an equation, the hundredth of its right side."""
    name, equals, value = text.rpartition("=")
    if re.fullmatch(r"\s*[-+]?(?:\d+\.?\d*|\.\d+)\s*", value):
        return f"{name}{equals}{Decimal(value.strip()).scaleb(-2):f}"
    return rf"{name}{equals}\frac{{{value}}}{{100}}"


@dataclass(frozen=True)
class _Verdict:
    """The reply of a process."""

    right: bool = False
    answer: str | None = None
    is_mathematics: bool = False
    """True if math-verify parses the gold as mathematics."""
    reason: str | None = None
    """The reason why the process ended without a reply: `timeout` or `failed`; None if it replied."""


class _Worker:
    """A process that runs `math_worker.py`."""

    def __init__(self, time_limit: float, memory: int) -> None:
        script = Path(__file__).with_name("math_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(time_limit), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        self.stop = weakref.finalize(self, _stop, self.process)
        if self._read_line() != "ready\n":
            raise RunProblem(
                f"the grading process does not start; try: {sys.executable} {script} 5 4000000000"
            )

    def ask(self, question: dict[str, Any], limit: float) -> _Verdict:
        """Send one comparison to the process and return its reply."""
        start = time.monotonic()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(question | {"seconds": limit}) + "\n")
            self.process.stdin.flush()
            line = self._read_line()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            return _Verdict(reason="timeout" if time.monotonic() - start >= limit else "failed")
        return _Verdict(**json.loads(line))

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def _stop(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # the buffer may hold text for a process that has ended
                pipe.close()


@cache
def version() -> str:
    """Return a hash of the code that decides grades: the modules here, and the versions of the packages they use."""
    sources = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in GRADING_MODULES]
    packages = " ".join(f"{name} {metadata.version(name)}" for name in ("math-verify", "sympy"))
    return hashlib.sha256(b"".join(sources) + packages.encode()).hexdigest()


@lru_cache(maxsize=1)
def shared_grader(pid: int) -> MathGrader:
    """Return the grader of a process; a forked process that used its parent's pipes would mix up the replies."""
    return MathGrader()


@lru_cache(maxsize=1)
def shared_time(pid: int) -> BatchTime:
    """Return the time limit of a process in which verl requests one grade at a time.

    Each `ANSWERS_IN_A_ROW` requests count as a batch.
    """
    return BatchTime(ANSWERS_IN_A_ROW, warns=True)


def _grade_multiplication(completion: str, gold: str) -> Grade:
    from bandpo_lab.tasks.multiplication import reward

    score = reward([completion], [gold])[0]
    answer = completion.replace(">", "|").rpartition("|")[2] or None
    if score:
        reason = "right"
    else:
        reason = "no answer" if answer is None else "wrong"
    return Grade(score, answer, reason)


RULES: Mapping[str, Callable[[str, str], Grade]] = {"multiplication": _grade_multiplication}
"""The grading rules of the package's own tasks, by `data_source`; all other data sources are mathematics."""


def grade(
    completion: str,
    gold: str,
    data_source: str = "math",
    problem: str | None = None,
    batch_time: BatchTime | None = None,
) -> Grade:
    """Grade one completion by the rule of its data source (`RULES`).

    Args:
        completion: The text of the completion.
        gold: The right answer, as `bandpo-lab data prepare` writes it.
        data_source: The name of the data source.
        problem: The text of the problem. If given, an answer that only restates it is wrong, and so is one that is not
            simplified if the problem asks for that.
        batch_time: The time limit for the batch of the completion.

    >>> grade("|3222", "3222", "multiplication").score
    1.0
    """
    rule = RULES.get(data_source)
    if rule:
        return rule(completion, gold)
    return shared_grader(os.getpid()).grade(completion, gold, problem, batch_time)


def reward(
    completions: Sequence[str | Sequence[Mapping[str, str]]],
    answer: Sequence[str],
    data_source: Sequence[str] | None = None,
    prompts: Sequence[str | Sequence[Mapping[str, str]]] | None = None,
    **columns: Any,
) -> list[float]:
    r"""Compute the rewards of a batch, as a reward function for TRL: ``reward_funcs=reward``.

    Once `SLOW_ANSWERS` of a batch have reached the grader's time limit, the limit of the others is `SHORT_LIMIT`. Once
    `SLOW_ANSWERS_AT_SHORT_LIMIT` have reached that, the others are right only if they are the same text as the gold. In
    both cases a warning is given.

    Args:
        completions: Texts, or lists of messages of which the last is used.
        answer: The gold answers, a column that `bandpo-lab data prepare` writes.
        data_source: The data sources, another column that it writes; by default, all are mathematics.
        prompts: Texts, or lists of messages of which the last is used. Without prompts, an answer that only restates
            its problem may be graded as right.
        **columns: Further columns, which are ignored.

    Returns:
        1.0 for each right completion and 0.0 for each wrong one.

    Raises:
        ValueError: The sequences differ in length.

    >>> reward(["The answer is $\\frac{1}{2}$."], ["0.5"])
    [1.0]
    """
    sources = ["math"] * len(completions) if data_source is None else data_source
    if not len(completions) == len(answer) == len(sources):
        raise InvalidValue(
            f"{len(completions)} completions for {len(answer)} answers: give one answer for each"
        )
    texts = [_last_text(completion) for completion in completions]
    problems = [_last_text(prompt) for prompt in prompts or [""] * len(completions)]
    batch_time = BatchTime()
    with ThreadPoolExecutor(CORES) as executor:
        verdicts = list(executor.map(grade, texts, answer, sources, problems, repeat(batch_time)))
    batch_time.warn_of(len(texts), "their batch")
    return [verdict.score for verdict in verdicts]


def _last_text(conversation: str | Sequence[Mapping[str, str]]) -> str:
    """Return a text as it is, and of messages the content of the last one."""
    return conversation if isinstance(conversation, str) else conversation[-1]["content"]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float | str]:
    """Compute the reward of one completion for verl.

    Set ``reward.custom_reward_function.path=pkg://bandpo_lab.evals.grading``. verl asks each of its processes for one
    answer at a time. `ANSWERS_IN_A_ROW` of them are a batch, in which the time limit gets shorter after many slow
    answers, with a warning, as in `reward`.

    Args:
        data_source: The name of the data source, which selects the rule of grading.
        solution_str: The text of the completion.
        ground_truth: The gold answer.
        extra_info: Further columns of the row; its ``problem`` is the text of the problem.

    Returns:
        ``score`` and ``acc`` (1.0 or 0.0), ``pred`` (the extracted answer, empty if there is none, which verl's
        majority vote counts) and ``reason`` (see `Grade`).

    >>> compute_score("gsm8k", "#### 4", "5")["reason"]
    'wrong'
    """
    problem = (extra_info or {}).get("problem")
    verdict = grade(solution_str, ground_truth, data_source, problem, shared_time(os.getpid()))
    return {
        "score": verdict.score,
        "acc": verdict.score,
        "pred": verdict.answer or "",
        "reason": verdict.reason,
    }
