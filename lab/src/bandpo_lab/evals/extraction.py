"""The piece of a completion that is its answer."""

import re
from dataclasses import dataclass

LONGEST_ANSWER = 1000
"""Characters. A longer final answer is wrong; a longer text is searched for its last expression at its
end."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_HEADING = re.compile(r"$|#|[*_]*(?:[^\W\d_]{2}|\d+[.):]\s+\S)")
_TWO_WORDS = re.compile(r"(?<![\\{a-zA-Z])[a-zA-Z]{2,}\s+[a-zA-Z]{2,}")


@dataclass(frozen=True)
class Extracted:
    """The piece of a completion that is its answer, and whether a box held it."""

    text: str
    boxed: bool


def extract(completion: str) -> Extracted | None:
    r"""The final answer of a completion, in time linear in its length.

    What stands before the last ``</think>`` does not count, unless nothing follows it, and where there is a last
    ``<answer>``, only its content does. In the rest, the answer is the content of the last ``\boxed{}`` or
    ``\fbox{}``. Without a box it is the line after the last ``####`` that is no heading, and without that the
    last expression of the last `LONGEST_ANSWER` characters. A box that is opened last and never closed is no answer:
    the completion was cut, or hides something.

    None stands for no answer. One that is too long is cut at one character more than `LONGEST_ANSWER`.

    >>> extract(r"So $x = \boxed{\frac{1}{2}}$.").text
    '\\frac{1}{2}'
    >>> extract("She has 5 left. #### 5").text
    '5'
    >>> extract("<think>Is it 12?</think> <answer>9</answer>").text
    '9'
    """
    after = completion.rpartition("</think>")[2]
    text = after if after.strip() else completion
    tagged = text.rpartition("<answer>")[2].partition("</answer>")[0].strip() if "<answer>" in text else ""
    text = tagged or text
    boxes = [box.end() for box in _BOX.finditer(text)]
    if boxes:
        return _box_content(text, boxes[-1])
    end = len(text.rstrip())
    for mark in reversed(list(_MARKED.finditer(text))):
        if not (mark.end() < end and _HEADING.match(mark[1])):
            return _marked_answer(mark[1])
    if tagged:
        return _marked_answer(tagged)
    tail = text[-LONGEST_ANSWER:]
    return Extracted(tail, boxed=False) if tail.strip() else None


def _box_content(text: str, start: int) -> Extracted | None:
    depth = 1
    for brace in _BRACES.finditer(text, start, start + LONGEST_ANSWER + 2):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return Extracted(text[start : brace.start()], boxed=True)
    rest = text[start : start + LONGEST_ANSWER + 1]
    return Extracted(rest, boxed=True) if len(rest) > LONGEST_ANSWER else None


def _marked_answer(text: str) -> Extracted:
    # "The total is 9" is a sentence with an answer in it, and not the product of its letters.
    if _TWO_WORDS.search(text) and any(character.isdecimal() for character in text):
        return Extracted(text[-LONGEST_ANSWER:], boxed=False)
    return Extracted(text.strip()[: LONGEST_ANSWER + 1], boxed=True)
