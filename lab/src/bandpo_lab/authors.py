"""The prompts and rewards with which the paper's authors trained, for ``+paper=authors``.

What their scripts and data files say (OpenMOSS/BandPO), as facts; verl computes the scores. Two things are ours: the
wording of the prompts of CommonsenseQA and APPS, which ask for the same form of answer, and the reading of numbered
choices as letters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bandpo.errors import InvalidValue

MATH = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
"""DAPO's prompt, as in the data set DAPO-Math-17k (Apache-2.0)."""

SPACED = MATH.replace("{problem}", " {problem} ")
"""The same with a blank on both sides of the problem, which the authors have in every other set."""

CHOICE = (
    "{problem}\n\nThink it through, then give the letter of one choice on a last line of the form Answer: X"
)

CODE = (
    "{problem}\n\nWrite a Python program that reads from standard input and writes to standard output. Put it in one "
    "```python block."
)


@dataclass(frozen=True)
class Style:
    """How a set is asked and graded: the text around ``{problem}``, and the name by which a reward is chosen."""

    template: str
    data_source: str


STYLES: Mapping[str, Style] = {
    "dapo-math-17k": Style(MATH, "math_dapo"),
    "math-12k-3-5": Style(SPACED, "math_dapo"),
    "aime24": Style(SPACED, "aime_2024"),
    "aime25": Style(SPACED, "aime_2025"),
    "amc23": Style(SPACED, "lighteval/MATH"),
    "commonsenseqa-train": Style(CHOICE, "commonsense_qa"),
    "arc-challenge": Style(CHOICE, "commonsense_qa"),
    "apps-train": Style(CODE, "apps"),
    "apps-val": Style(CODE, "apps"),
}


_LETTER = re.compile(r"\banswer(?:\s*:|\s+is\s*:?)\s*\(?([A-E])\b", re.IGNORECASE)


def letter(text: str) -> str | None:
    """The choice that an answer names first, or a letter alone on the last line.

    >>> letter("B looks right, but no.\\nAnswer: C"), letter("So:\\nD"), letter("Answer: all of them")
    ('C', 'D', None)
    """
    found = _LETTER.search(text)
    if found:
        return found[1].upper()
    last = text.strip().rpartition("\n")[2].strip()
    return last if re.fullmatch("[A-E]", last) else None


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float | str]:
    """Reward function for verl: ``reward.custom_reward_function.path=pkg://bandpo_lab.authors``.

    DAPO's for training and AIME: 1 or −1 by what follows the last "Answer:" of the last 300 characters. Where there is
    no such line, verl 0.9.1 looks for a box; the authors' copy does not, and neither does this. AMC: 1 or 0
    by the last box, although the prompt asks for no box. CommonsenseQA and ARC: 1 or −1 by the letter.

    Returns:
        ``score``, ``acc`` (1.0 or 0.0) and ``pred``, the answer read.

    Raises:
        ValueError: Another data source.

    >>> compute_score("commonsense_qa", "Answer: B", "A")
    {'score': -1.0, 'acc': 0.0, 'pred': 'B'}
    """
    if data_source == "math_dapo" or data_source.startswith("aime"):
        from verl.utils.reward_score import math_dapo

        right, answer = math_dapo.is_correct_minerva(solution_str[-300:], ground_truth)
        return _scored(right, answer, wrong=-1.0)
    if data_source == "lighteval/MATH":
        from verl.utils.reward_score import math_reward

        box = math_reward.last_boxed_only_string(solution_str)
        return _scored(math_reward.compute_score(solution_str, ground_truth) == 1.0, box or "", wrong=0.0)
    if data_source == "commonsense_qa":
        answer = letter(solution_str)
        return _scored(answer == ground_truth, answer or "", wrong=-1.0)
    raise InvalidValue(
        f"no reward for the data source {data_source!r}: prepare the data by `bandpo-lab data prepare ... --authors`; "
        "for apps use +paper/task=apps, whose reward is verl's own"
    )


def _scored(right: bool, answer: str, wrong: float) -> dict[str, float | str]:
    return {"score": 1.0 if right else wrong, "acc": float(right), "pred": answer}
