"""Whether a completion's answer is right: math-verify in separate processes, and the reward functions on it.

The answer is one piece of the completion (see `extract`). Only that piece is compared, so that a completion
cannot win by listing everything. A process of its own compares it, and is ended when it takes too long or too much
memory. Signals, the usual way, fail outside the main thread and do not interrupt arithmetic on huge numbers.
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
from functools import cache, lru_cache
from importlib import metadata
from itertools import repeat
from pathlib import Path
from typing import Any

from bandpo.errors import InvalidValue, MissingPackage, RunProblem
from bandpo_lab.evals.extraction import LONGEST_ANSWER, extract
from bandpo_lab.evals.normalize import normal_form, normal_prose
from bandpo_lab.evals.question import fault

_BASE = re.compile(r"(?=[A-F]*\d)[\dA-F]+_\{?\s*(\d{1,2})\s*\}?")
_OPEN = re.compile(r"\\[pb]?mod(?![a-z])|\\[lcv]?dots|\.\.\.|…")
"""Of which math-verify reads only what stands before."""


@dataclass(frozen=True)
class Grade:
    """A verdict on one completion.

    Attributes:
        score: 1.0 right, 0.0 wrong.
        answer: The answer read, in a form in which equal answers are equal texts; None where there is none.
        reason: ``right``, ``wrong``, ``no answer``, ``too long``, ``timeout``, or ``failed`` (out of memory); where the
            problem is known, also ``restated`` and ``unsimplified`` (see `bandpo_lab.evals.question.fault`).
    """

    score: float
    answer: str | None
    reason: str


CORES = os.cpu_count() or 1

SLOW_ANSWERS = 24
"""Answers of a batch that may meet the grader's limit of time. The others then have `SHORT_LIMIT` each."""
SHORT_LIMIT = 1.0
"""Seconds of processor time. Ordinary answers take hundredths of a second, and the slowest of them some tenths."""
SLOW_ANSWERS_AT_SHORT_LIMIT = 96
"""Answers of a batch that may meet `SHORT_LIMIT` too. The others are then compared as texts."""


ANSWERS_IN_A_ROW = 512
"""Answers that are one batch where nothing else tells batches apart: verl asks for one answer at a time, and
`bandpo-lab eval` for those of a whole run."""


class BatchTime:
    """What the answers of a batch may still take of the grader, from any thread.

    Once `SLOW_ANSWERS` of a batch have met the grader's limit of time, the others have `SHORT_LIMIT` each, and once
    `SLOW_ANSWERS_AT_SHORT_LIMIT` have met that, the others are compared as texts.

    Args:
        size: Answers of a batch, after which another begins; None where all belong to one.
        warns: Whether to warn where the answers of a batch begin to have less time, for a caller that never ends.
    """

    def __init__(self, size: int | None = None, *, warns: bool = False) -> None:
        self._size = size
        self._warns = warns
        self._lock = threading.Lock()
        self._slow = 0
        self._slow_at_short_limit = 0
        self._asked = 0
        self._is_hurried = False
        self.hurried = 0
        """Answers that had less time than the first of their batch."""

    def limit_of_next(self, usual: float) -> float:
        """Return the seconds that the next answer has; 0 if it is compared as a text."""
        with self._lock:
            if self._size is not None and self._asked and self._asked % self._size == 0:
                self._slow = 0
                self._slow_at_short_limit = 0
                self._is_hurried = False
            self._asked += 1
            if self._slow < SLOW_ANSWERS:
                return usual
            self.hurried += 1
            begins_to_hurry = not self._is_hurried
            self._is_hurried = True
            limit = (
                min(usual, SHORT_LIMIT) if self._slow_at_short_limit < SLOW_ANSWERS_AT_SHORT_LIMIT else 0.0
            )
            asked = self._asked
        if self._warns and begins_to_hurry and self._size is not None:
            last = -(-asked // self._size) * self._size
            warnings.warn(
                f"answers {asked:,} to {last:,} of this process have less time in the grader, as {SLOW_ANSWERS} of "
                f"those from {last - self._size + 1:,} on met its limit: right answers among them may score 0",
                stacklevel=2,
            )
        return limit

    def count_slow(self, limit: float, usual: float) -> None:
        """Count an answer that ended a process of the grader."""
        with self._lock:
            if limit < usual:
                self._slow_at_short_limit += 1
            else:
                self._slow += 1

    def warn_of(self, answers: int, batch: str) -> None:
        """Warn if answers had less time.

        Args:
            answers: How many there were.
            batch: What the answers that met the limit belong to, in words.
        """
        if self.hurried:
            warnings.warn(
                f"{self.hurried} of {answers} answers had less time in the grader, as {SLOW_ANSWERS} others of "
                f"{batch} met its limit: right answers among them may have scored 0",
                stacklevel=3,
            )


DECIDING = ("extraction", "grading", "math_worker", "normalize", "question")


class MathGrader:
    """Compares answers with math-verify in a few processes, from any thread.

    Args:
        time_limit: Seconds of processor time one answer may take (of the clock, on Windows).
        memory: Bytes a process may address, where the system has such a limit (Linux, macOS).
        workers: Processes, each started when first needed.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: A setting out of range.

    >>> with MathGrader() as grader:
    ...     grader.grade("It is $\\\\boxed{0.5}$.", "\\\\frac{1}{2}").reason
    'right'
    """

    def __init__(self, *, time_limit: float = 5.0, memory: int = 4 << 30, workers: int = CORES) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingPackage(
                "grading needs math-verify: in a clone of bandpo, pip install . './lab[eval]'"
            )
        if not (time_limit > 0 and workers >= 1):
            raise InvalidValue(
                f"time_limit = {time_limit} must be above 0 and workers = {workers} at least 1"
            )
        self._settings = time_limit, memory
        self.workers = workers
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._slots.put(None)
        # A model repeats its answers, the costly ones too.
        self._compare = lru_cache(maxsize=100_000)(self._verdict)

    def grade(
        self, completion: str, gold: str, problem: str | None = None, batch_time: BatchTime | None = None
    ) -> Grade:
        """Grades one completion, within about the time limit whatever it holds.

        The gold, the right answer, is LaTeX or a plain number, without a box. With the problem, as in training, an
        answer must say more than it. The time that its batch may take is that of the answer too.
        """
        extracted = extract(completion)
        if extracted is None:
            return Grade(0.0, None, "no answer")
        if len(extracted.text) > LONGEST_ANSWER:
            return Grade(0.0, None, "too long")
        normal = normal_form if extracted.boxed else normal_prose
        answer, gold_form = normal(extracted.text), normal_form(gold)
        usual = self._settings[0]
        limit = usual if batch_time is None else batch_time.limit_of_next(usual)
        if limit:
            started = time.monotonic()
            verdict = self._compare(answer, extracted.boxed, gold_form, limit)
            # An answer that was given before takes no time.
            if batch_time and verdict.reason and time.monotonic() - started >= limit / 2:
                batch_time.count_slow(limit, usual)
        else:
            is_equal = answer == gold_form
            verdict = _Verdict(right=is_equal, answer=answer, reason=None if is_equal else "timeout")
        if verdict.reason is not None:
            return Grade(0.0, None, verdict.reason)
        if verdict.right:
            reason = fault(extracted.text, gold, problem) if problem and extracted.boxed else None
            return Grade(float(reason is None), gold, reason or "right")
        return Grade(0.0, verdict.answer, "no answer" if verdict.answer is None else "wrong")

    def reads(self, gold: str) -> bool:
        """Whether math-verify reads a gold as mathematics, and not as a text that only itself can match."""
        normal = normal_form(gold)
        return self._compare(normal, True, normal, self._settings[0]).read

    def close(self) -> None:
        """Ends the processes; the grader can be used again and starts new ones."""
        for _ in range(self.workers):
            worker = self._slots.get()
            if worker is not None:
                worker.stop()
            self._slots.put(None)

    def __enter__(self) -> "MathGrader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verdict(self, answer: str, boxed: bool, gold: str, limit: float) -> "_Verdict":
        bases = _BASE.fullmatch(answer), _BASE.fullmatch(gold)
        if bases[0] and bases[1] and bases[0][1] != bases[1][1]:  # math-verify ignores bases
            return _Verdict(answer=answer)
        if boxed and _OPEN.search(answer) and not _OPEN.search(gold):
            return _Verdict(answer=answer)
        if re.fullmatch(r"-?\d+", gold) and gold not in ("0", "1"):
            answer = answer.removesuffix("\\%")  # a unit, and no share
        verdict = self._ask(answer, boxed, gold, limit)
        # Something else than this answer may have ended the process.
        return self._ask(answer, boxed, gold, limit) if verdict.reason == "failed" else verdict

    def _ask(self, answer: str, boxed: bool, gold: str, limit: float) -> "_Verdict":
        worker = self._slots.get()
        survivor = None
        try:
            if worker is None or worker.process.poll() is not None:
                worker = _Worker(*self._settings)
            verdict = worker.ask({"answer": answer, "boxed": boxed, "gold": gold}, limit)
            survivor = None if verdict.reason else worker
            return verdict
        finally:
            self._slots.put(survivor)
            if survivor is None and worker is not None:
                worker.stop()


@dataclass(frozen=True)
class _Verdict:
    right: bool = False
    answer: str | None = None
    read: bool = False
    reason: str | None = None  # why the process died


class _Worker:
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
        if self._line() != "ready\n":
            raise RunProblem(
                f"the grading process does not start; try: {sys.executable} {script} 5 4000000000"
            )

    def ask(self, question: dict[str, Any], limit: float) -> _Verdict:
        started = time.monotonic()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(question | {"seconds": limit}) + "\n")
            self.process.stdin.flush()
            line = self._line()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            return _Verdict(reason="timeout" if time.monotonic() - started >= limit else "failed")
        return _Verdict(**json.loads(line))

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def _stop(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # the buffer may hold text for a process that has died
                pipe.close()


@cache
def version() -> str:
    """A hash of what decides a verdict: the modules here, and the packages that they ask."""
    sources = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in DECIDING]
    packages = " ".join(f"{name} {metadata.version(name)}" for name in ("math-verify", "sympy"))
    return hashlib.sha256(b"".join(sources) + packages.encode()).hexdigest()


@lru_cache(maxsize=1)
def shared_grader(pid: int) -> MathGrader:
    """One for each process: pipes shared with a forked parent would mix up their answers."""
    return MathGrader()


@lru_cache(maxsize=1)
def shared_time(pid: int) -> BatchTime:
    """The time of the answers that verl asks for one at a time; one for each process."""
    return BatchTime(ANSWERS_IN_A_ROW, warns=True)


def _grade_multiplication(completion: str, gold: str) -> Grade:
    from bandpo_lab.tasks.multiplication import reward

    score = reward([completion], [gold])[0]
    answer = completion.replace(">", "|").rpartition("|")[2] or None
    return Grade(score, answer, "right" if score else "no answer" if answer is None else "wrong")


RULES: Mapping[str, Callable[[str, str], Grade]] = {"multiplication": _grade_multiplication}
"""How completions of the package's own tasks are graded, by `data_source`; everything else is mathematics."""


def grade(
    completion: str,
    gold: str,
    data_source: str = "math",
    problem: str | None = None,
    batch_time: BatchTime | None = None,
) -> Grade:
    """Grade one completion against a gold of `bandpo-lab data prepare`, by the rule of its data source (`RULES`).

    With the problem, an answer that only restates it is wrong, and so is one that it asks to simplify.

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
    """Reward function for TRL, on the columns that `bandpo-lab data prepare` writes: ``reward_funcs=reward``.

    Prompts and completions are texts, or messages of which the last counts. Without data sources all are mathematics,
    and without prompts a restated problem may be right.

    Once `SLOW_ANSWERS` of a batch have met the grader's limit of time, the others have `SHORT_LIMIT` each, and once
    `SLOW_ANSWERS_AT_SHORT_LIMIT` have met that, the others are right only if their text is the answer's. A warning says
    so.

    Raises:
        ValueError: The sequences differ in length.

    >>> reward(["The answer is $\\\\frac{1}{2}$."], ["0.5"])
    [1.0]
    """
    sources = ["math"] * len(completions) if data_source is None else data_source
    if not len(completions) == len(answer) == len(sources):
        raise InvalidValue(
            f"{len(completions)} completions for {len(answer)} answers: give one answer for each"
        )
    texts, problems = (
        [text if isinstance(text, str) else text[-1]["content"] for text in column]
        for column in (completions, prompts or [""] * len(completions))
    )
    batch_time = BatchTime()
    with ThreadPoolExecutor(CORES) as executor:
        verdicts = list(executor.map(grade, texts, answer, sources, problems, repeat(batch_time)))
    batch_time.warn_of(len(texts), "their batch")
    return [verdict.score for verdict in verdicts]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float | str]:
    """Reward function for verl: ``reward.custom_reward_function.path=pkg://bandpo_lab.evals.grading``.

    verl asks each of its processes for one answer at a time. `ANSWERS_IN_A_ROW` of them are a batch, whose answers have
    less time once many met the grader's limit, as in `reward`; a warning says so.

    Returns:
        ``score`` and ``acc`` (1.0 or 0.0), ``pred`` (the answer read, empty where there is none; verl's
        majority vote counts it) and ``reason`` (see `Grade`).

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
