"""Extract the final answer from a completion."""

import re
from dataclasses import dataclass

LONGEST_ANSWER = 1000
"""The longest answer, in characters.

A longer final answer is graded wrong. Of a text without a marked answer, this many characters at its end are searched.
"""

# A box, or a number after the command without braces.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([-+]?\d[\d.,]*))")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_HASHED = re.compile(r"####[ \t]*([^\n]*)")
_HEADING = re.compile(r"$|#|[*_]*(?:[^\W\d_]{2}|\d+[.):]\s+\S)")
_TWO_WORDS = re.compile(r"(?<![\\{a-zA-Z])[a-zA-Z]{2,}\s+[a-zA-Z]{2,}")


# A per cent sign or a base after the box is part of the answer.
_AFTER_BOX = re.compile(
    r"\s*\$?\s*(\\?%|\\(?:text|mathrm)\s*\{\s*per ?cent\s*\}|per ?cent(?:age)?\b(?! points?\b)|_\s*(?:\{[^{}\n]*\}|\d))"
)

_NUMBER = r"(?:\d{1,3}(?:(?:,|\\,|\{,\})\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+)"
_TERM = (
    rf"\(?[-+\u2212]?[$€£]?(?:\d+ \d+/\d+(?![\d/])"
    rf"|{_NUMBER}?\s?\\(?:[dt]?frac\s*\{{[^{{}}]*\}}\s*\{{[^{{}}]*\}}|sqrt\s*\{{[^{{}}]*\}}|pi\b)|{_NUMBER})"
    r"(?:\s*(?:\^|\*\*)\s*(?:\{[^{}]*\}|-?\d+))?\)?"
)
# A formula, or an expression of numbers; a dollar sign before a digit may be a currency.
_EXPRESSION = re.compile(
    r"(?:(?<!\\)\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)"
    r"|(?<![\\\d])\$(?=\S)((?:\\.|[^$\n\\])*?(?:\\.|[^\s$\\]))\$(?!\d)"
    rf"|(?<![\w.\\])({_TERM}(?:\s*[-+*/×÷]\s*{_TERM})*(?:_\{{?\d+\}}?)?))"
    r"(\s*(?:\\?%|per ?cent(?:age)?\b(?! points?\b)))?",
    re.DOTALL,
)
_ANSWER = re.compile(r"\banswers?\b", re.IGNORECASE)
_STATES = re.compile(r"(?:\b(?:is|are|was|be|equals?|get)\b|[:=→])[^\d:=]{0,40}$|^\W*$", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
# Words that join two answers, and words after which only the second one holds.
_ALTERNATIVE = {"or", "maybe", "perhaps", "possibly", "alternatively", "otherwise", "could", "might", "may"}
_RANGE = {"to", "through", "\u2013", "\u2014", "..."}
_RANGE_START = re.compile(r"\b(?:from|between)[\s$]*$", re.IGNORECASE)
_RESOLVING = {"but", "so", "thus", "hence", "therefore", "then", "rather", "actually", "instead", "no", "not"}
_HEDGE = re.compile(
    r"\s*(?:or|maybe|perhaps|possibly|alternatively|otherwise|(?:it|or it) (?:could|might|may)(?: also)? be)\b",
    re.IGNORECASE,
)
LONGEST_JOINT = 8
"""The largest number of words between two answers that are offered together."""
_NEGATION = re.compile(
    r"\b(?:false|wrong|incorrect|untrue|not (?:true|right|correct|the case)) that\b.*$"
    r"|\b(?:step|part|problem|question|equation|figure|section)[\s$#]*$"
    r"|\b(?:not (?:known|sure|certain|clear)|unknown|unsure|uncertain|undetermined"
    r"|(?:do not|don't|cannot|can't) (?:know|tell|say|determine))\b(?!.*\b(?:but|so|however|answer)\b).*$"
    r"|\b(?:not(?! only)|never|cannot|neither|nor|except|excluding|unlikely|\w+n't"
    r"|doubt|whether|if|(?:anything|everything) but|(?:different|differs) from|instead of|at (?:least|most)"
    r"|(?:other|rather|less|more|fewer|greater|larger|smaller) than)(?:\s+[\w=$]+){0,3}[\s$:*]*$",
    re.IGNORECASE,
)
_REJECTION = re.compile(
    r"[\s$*)]*(?:(?:is|are|was|would be)(?:n't| (?:\w+ )?(?:not|never|wrong|incorrect|false|impossible))\b"
    r"|(?:cannot|can't) be\b|\?)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ExtractedAnswer:
    """The answer of a completion.

    Attributes:
        text: The text of the answer. If prose offers several, they are joined by commas.
    """

    text: str


def extract(completion: str) -> ExtractedAnswer | None:
    r"""Extract the final answer of a completion, in time linear in its length.

    Text before the last ``</think>`` is ignored, unless nothing follows it. If there is an ``<answer>``, only the
    content of the last one is used. In the remaining text, the answer is the content of the last ``\boxed{}`` or
    ``\fbox{}``, or the number after a ``\boxed`` without braces. Without a box, it is the line after the last ``####``
    that does not begin a heading. Without that, it is the content of the ``<answer>``, or else it is searched in the
    prose of the last `LONGEST_ANSWER` characters (see `answer_of_prose`). A per cent sign or a base after a box is part
    of the answer.

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

    boxes = list(_BOX.finditer(text))
    if boxes:
        number = boxes[-1][1]
        return _box_content(text, boxes[-1].end()) if number is None else ExtractedAnswer(number)
    end = len(text.rstrip())
    for match in reversed(list(_HASHED.finditer(text))):
        is_heading = match.end() < end and _HEADING.match(match[1])
        if not is_heading:
            return _line_answer(match[1])
    if tag_content:
        return _line_answer(tag_content)
    return _prose_answer(text)


def _box_content(text: str, start: int) -> ExtractedAnswer | None:
    """Return the text from `start` to the brace that closes the box; None if none does."""
    depth = 1
    for brace in _BRACES.finditer(text, start, start + LONGEST_ANSWER + 2):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            content = text[start : brace.start()]
            after = _AFTER_BOX.match(text, brace.end())
            return ExtractedAnswer(content + after[1] if after and content.strip() else content)
    content = text[start : start + LONGEST_ANSWER + 1]
    return ExtractedAnswer(content) if len(content) > LONGEST_ANSWER else None


def _line_answer(text: str) -> ExtractedAnswer | None:
    """Return the answer of a line or of a tag, which may be a sentence."""
    # "The total is 9" is a sentence that holds an answer, and not the product of its letters.
    if _TWO_WORDS.search(text) and any(character.isdecimal() for character in text):
        return _prose_answer(text)
    return ExtractedAnswer(text.strip()[: LONGEST_ANSWER + 1])


def _prose_answer(text: str) -> ExtractedAnswer | None:
    answer = answer_of_prose(text[-LONGEST_ANSWER:])
    return None if answer is None else ExtractedAnswer(answer)


def answer_of_prose(text: str) -> str | None:
    """Return the answer that prose states: the expression after the last "answer", or else the last expression.

    If the prose offers several answers, all are returned, joined by commas. An expression that is denied, as in "not
    42", is no answer.

    >>> answer_of_prose("The answer is 7. I checked it in 2 ways."), answer_of_prose("It is 7 or 5.")
    ('7', '7, 5')
    >>> answer_of_prose("The answer is definitely not 42.")
    """
    text = text.replace("\u2019", "'")
    expressions = list(_EXPRESSION.finditer(text))
    if not expressions:
        return None
    index = _stated_after_anchor(text, expressions)
    is_anchored = index is not None
    if index is None:
        index = len(expressions) - 1
        # "5, not 7" states 5.
        if index and _is_denied(text, expressions, index):
            between = text[expressions[index - 1].end() : expressions[index].start()]
            if re.fullmatch(r"\s*[,;(]?\s*(?:and )?not\s*", between):
                index -= 1
    if _is_denied(text, expressions, index):
        return None

    # Take the expressions that are offered together with it.
    first = index
    while first and _offers_both(text, expressions, first - 1, is_anchored):
        first -= 1
    last = index
    while last + 1 < len(expressions) and _offers_both(text, expressions, last, is_anchored):
        last += 1
    answer = _content(expressions[first])
    for i in range(first + 1, last + 1):
        # 10 000 is one number, so a space stays.
        separator = ", " if text[expressions[i - 1].end() : expressions[i].start()].strip() else " "
        answer += separator + _content(expressions[i])
    return answer


def _content(expression: re.Match[str]) -> str:
    *formulas, per_cent = expression.groups()
    content = next(formula for formula in formulas if formula is not None).strip()
    return content + ("\\%" if per_cent else "")


def _stated_after_anchor(text: str, expressions: list[re.Match[str]]) -> int | None:
    """Return the index of the expression that the last sentence with "answer" states after this word; None if none."""
    for anchor in reversed(list(_ANSWER.finditer(text))):
        end = _SENTENCE_END.search(text, anchor.end())
        # "Answer:" may end a line.
        stop = end.start() if end and text[anchor.end() : end.start()].strip(" :*") else len(text)
        after = [i for i, expression in enumerate(expressions) if anchor.end() <= expression.start() < stop]
        stated = [
            i
            for i in after
            if _STATES.search(text[_previous_end(expressions, i, anchor.end()) : expressions[i].start()])
        ]
        for i in stated or after:
            if not _is_denied(text, expressions, i):
                return _end_of_equation(text, expressions, i)
        if after:
            return after[0]
    return None


def _previous_end(expressions: list[re.Match[str]], index: int, start: int) -> int:
    return max(start, expressions[index - 1].end()) if index else start


def _end_of_equation(text: str, expressions: list[re.Match[str]], index: int) -> int:
    """Return the index of the last side of an equation, such as 3 apples + 4 pears = 7."""
    last_side = index
    for i in range(index + 1, len(expressions)):
        between = text[expressions[i - 1].end() : expressions[i].start()]
        if not re.fullmatch(r"(?:\s*[a-zA-Z]+){0,3}\s*[-+*/×÷=]\s*", between):
            break
        if between.rstrip().endswith("="):
            last_side = i
    return last_side


def _is_denied(text: str, expressions: list[re.Match[str]], index: int) -> bool:
    """Return True if the text denies an expression, before it or after it."""
    before = text[_previous_end(expressions, index, 0) : expressions[index].start()]
    before = _SENTENCE_END.split(before)[-1]
    return bool(_NEGATION.search(before) or _REJECTION.match(text, expressions[index].end()))


def _offers_both(text: str, expressions: list[re.Match[str]], index: int, is_anchored: bool) -> bool:
    """Return True if the text offers an expression and the next one as answers, as in "7 or 5"."""
    between = text[expressions[index].end() : expressions[index + 1].start()]
    if not between.strip(" "):
        return True
    if is_anchored and between.strip() in _RANGE:
        return True
    if _RANGE_START.search(text[: expressions[index].start()]) and between.strip() in _RANGE | {"and"}:
        return True
    words = re.findall(r"[a-z']+", between.lower())
    if _RESOLVING & {*words} or len(words) > LONGEST_JOINT:
        return False
    *earlier, rest = _SENTENCE_END.split(between)
    if earlier:
        return bool(_HEDGE.match(rest))
    if _ALTERNATIVE & {*words}:
        return True
    is_list = between.strip() in (",", ";", ", and", "and")
    outside = text[: expressions[0].start()] + text[expressions[-1].end() :]
    return is_list and (is_anchored or not re.search(r"[a-zA-Z]", outside))
