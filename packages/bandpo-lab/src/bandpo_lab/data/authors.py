"""The prompts and rewards with which the paper's authors trained, for ``+paper=authors``.

They follow the authors' scripts and data files (OpenMOSS/BandPO), and verl computes the scores. Two things are not from
the authors: the wording of the prompts of CommonsenseQA and APPS, which ask for the same form of answer, and the
conversion of numbered choices to letters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bandpo_lab.errors import InvalidValue

MATH = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
"""DAPO's prompt, as in the data set DAPO-Math-17k (Apache-2.0)."""

SPACED = MATH.replace("{problem}", " {problem} ")
"""The same prompt with a space on both sides of the problem, as in the authors' other sets for mathematics."""

CHOICE = (
    "{problem}\n\nThink it through, then give the letter of one choice on a last line of the form Answer: X"
)

CODE = (
    "{problem}\n\nWrite a Python program that reads from standard input and writes to standard output. Put it in one "
    "```python block."
)


@dataclass(frozen=True)
class Style:
    """The prompt of a set with ``{problem}`` in it, and the data source, which selects the reward."""

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
    r"""Return the first choice that an answer names, or a letter alone on the last line.

    >>> letter("B looks right, but no.\nAnswer: C"), letter("So:\nD"), letter("Answer: all of them")
    ('C', 'D', None)
    """
    match = _LETTER.search(text)
    if match:
        return match[1].upper()
    last_line = text.strip().rpartition("\n")[2].strip()
    return last_line if re.fullmatch("[A-E]", last_line) else None


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float | str]:
    """Compute the reward of one completion for verl.

    Set ``reward.custom_reward_function.path=pkg://bandpo_lab.data.authors``. The rewards are:

    - training sets for mathematics and AIME: DAPO's, 1 or −1 by the text after the last "Answer:" in the last 300
      characters. Without such a line, verl 0.9.1 searches for a box; the authors' copy and this function do not.
    - AMC: 1 or 0 by the last box, although the prompt does not ask for a box.
    - CommonsenseQA and ARC: 1 or −1 by the letter.

    Args:
        data_source: The data source, which selects the reward.
        solution_str: The text of the completion.
        ground_truth: The right answer.
        extra_info: Not used.

    Returns:
        ``score``, ``acc`` (1.0 or 0.0) and ``pred``, the extracted answer.

    Raises:
        ValueError: There is no reward for the data source.

    >>> compute_score("commonsense_qa", "Answer: B", "A")
    {'score': -1.0, 'acc': 0.0, 'pred': 'B'}
    """
    if data_source == "math_dapo" or data_source.startswith("aime"):
        from verl.utils.reward_score import math_dapo

        is_right, answer = math_dapo.is_correct_minerva(solution_str[-300:], ground_truth)
        return _result(is_right, answer, wrong_score=-1.0)
    if data_source == "lighteval/MATH":
        from verl.utils.reward_score import math_reward

        box = math_reward.last_boxed_only_string(solution_str)
        is_right = math_reward.compute_score(solution_str, ground_truth) == 1.0
        return _result(is_right, box or "", wrong_score=0.0)
    if data_source == "commonsense_qa":
        answer = letter(solution_str)
        return _result(answer == ground_truth, answer or "", wrong_score=-1.0)
    raise InvalidValue(
        f"no reward for the data source {data_source!r}: prepare the data by `bandpo-lab data prepare ... --authors`; "
        "for apps use +paper/task=apps, whose reward is verl's own"
    )


def _result(is_right: bool, answer: str, wrong_score: float) -> dict[str, float | str]:
    return {"score": 1.0 if is_right else wrong_score, "acc": float(is_right), "pred": answer}
