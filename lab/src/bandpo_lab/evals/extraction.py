"""Extract the final answer from a completion."""

import re
from dataclasses import dataclass

LONGEST_ANSWER = 1000
"""The longest answer, in characters.

A longer final answer is graded wrong. Of a text without a marked answer, this many characters at its end are searched.
"""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_HASHED = re.compile(r"####[ \t]*([^\n]*)")
_HEADING = re.compile(r"$|#|[*_]*(?:[^\W\d_]{2}|\d+[.):]\s+\S)")
_TWO_WORDS = re.compile(r"(?<![\\{a-zA-Z])[a-zA-Z]{2,}\s+[a-zA-Z]{2,}")


@dataclass(frozen=True)
class ExtractedAnswer:
    """The answer of a completion.

    Attributes:
        text: The text of the answer.
        boxed: True if the text is the answer alone; False if it is prose that holds the answer.
    """

    text: str
    boxed: bool


def extract(completion: str) -> ExtractedAnswer | None:
    r"""Extract the final answer of a completion, in time linear in its length.

    Text before the last ``</think>`` is ignored, unless nothing follows it. If there is an ``<answer>``, only the
    content of the last one is used. In the remaining text, the answer is the content of the last ``\boxed{}`` or
    ``\fbox{}``. Without a box, it is the line after the last ``####`` that does not begin a heading. Without that, it
    is the content of the ``<answer>``, or else the last `LONGEST_ANSWER` characters as prose.

    If the last box is never closed, there is no answer: the completion was cut, or hides something.

    Returns:
        The answer, or None if there is none. An answer that is too long is cut to `LONGEST_ANSWER` + 1 characters.

    >>> extract(r"So $x = \boxed{\frac{1}{2}}$.").text
    '\\frac{1}{2}'
    >>> extract("She has 5 left. #### 5").text
    '5'
    >>> extract("<think>Is it 12?</think> <answer>9</answer>").text
    '9'
    """
    # Remove the reasoning, and keep the content of the answer tag.
    after_reasoning = completion.rpartition("</think>")[2]
    text = after_reasoning if after_reasoning.strip() else completion
    tag_content = ""
    if "<answer>" in text:
        tag_content = text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    text = tag_content or text

    boxes = [box.end() for box in _BOX.finditer(text)]
    if boxes:
        return _box_content(text, boxes[-1])
    end = len(text.rstrip())
    for match in reversed(list(_HASHED.finditer(text))):
        is_heading = match.end() < end and _HEADING.match(match[1])
        if not is_heading:
            return _line_answer(match[1])
    if tag_content:
        return _line_answer(tag_content)
    tail = text[-LONGEST_ANSWER:]
    return ExtractedAnswer(tail, boxed=False) if tail.strip() else None


def _box_content(text: str, start: int) -> ExtractedAnswer | None:
    """Return the text from `start` to the brace that closes the box; None if none does."""
    depth = 1
    for brace in _BRACES.finditer(text, start, start + LONGEST_ANSWER + 2):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return ExtractedAnswer(text[start : brace.start()], boxed=True)
    content = text[start : start + LONGEST_ANSWER + 1]
    return ExtractedAnswer(content, boxed=True) if len(content) > LONGEST_ANSWER else None


def _line_answer(text: str) -> ExtractedAnswer:
    """Return the answer of a line or of a tag, which may be a sentence."""
    # "The total is 9" is a sentence that holds an answer, and not the product of its letters.
    if _TWO_WORDS.search(text) and any(character.isdecimal() for character in text):
        return ExtractedAnswer(text[-LONGEST_ANSWER:], boxed=False)
    return ExtractedAnswer(text.strip()[: LONGEST_ANSWER + 1], boxed=True)
