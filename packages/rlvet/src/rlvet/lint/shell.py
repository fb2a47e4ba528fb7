"""Read the commands of a shell script, and substitute their variables. Nothing is executed.

A variable has the last value that is assigned to it before a command. A value is unknown if it is assigned in a branch,
a loop or a function, if it is the output of a command, or if it comes from outside the script. ``${NAME:-default}`` has
its default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rlvet.runs.limits import (
    DEEPEST_SHELL,
    LONGEST_ARRAY,
    LONGEST_UNCERTAIN_ARRAY,
    MOST_SUBSTITUTED,
    MOST_WORDS,
)

UNKNOWN = "\0"
"""Placeholder for an unknown part of a text. No script contains this character."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)")
_OPENING_WORDS = ("if", "for", "while", "until", "case", "select", "function", "{")
_CLOSING_WORDS = ("fi", "done", "esac", "}")
_BEFORE_A_COMMAND = ("then", "else", "elif", "do", "!", "time")
_DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")
_ENDS = "\n;&|()"
_ARRAY_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)\(")
_BRACES = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(\[[@*]\])?(:?[-=]|\})")
_FUNCTION_BRACKETS = re.compile(r"\(\s*\)")
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


@dataclass(frozen=True)
class Word:
    """A word of a command."""

    text: str
    """The text, with `UNKNOWN` in place of a part that is not known."""
    line: int
    """The line in the script, counted from 1."""
    unread: str = ""
    """A description of the unknown part; empty if all of the text is known."""


Command = Sequence[Word]
"""The words of a command."""
Variable = Word | Sequence[Word]
"""The value of a variable: one word, or the words of an array."""


def read_commands(text: str) -> Iterator[Command]:
    r"""Yield the commands of a script, each as a sequence of words.

    >>> script = "lr=1e-6\npython -m verl.trainer.main_ppo actor.lr=$lr data.n=$((2 * 4)) key=$UNKNOWN"
    >>> (command,) = read_commands(script)
    >>> [word.text for word in command][3:5], command[5].unread
    (['actor.lr=1e-6', 'data.n=8'], 'the environment variable UNKNOWN')
    """
    return _Script(text).commands()


@dataclass
class _WordBuilder:
    """A word that is being read, part by part."""

    line: int
    texts: list[str] = field(default_factory=list)
    """The parts of the text so far."""
    unread: str = ""
    """A description of the first unknown part."""
    quoted: bool = False
    """True if some part is quoted, so that an empty text is a word too."""
    spliced: list[Word] | None = None
    """The words of an array, or of an unquoted text with spaces, that replace this word."""
    size: int = 0
    """Number of characters, plus the number of spliced words."""

    def add(self, text: str) -> None:
        """Add a known part."""
        self.texts.append(text)
        self.size += len(text)

    def splice(self, words: Iterable[Word]) -> None:
        """Add words that replace this one."""
        if self.spliced is None:
            self.spliced = []
        new_words = list(words)
        self.spliced += new_words
        self.size += len(new_words)

    def add_unknown(self, reason: str) -> None:
        """Add a part that is not known."""
        self.texts.append(UNKNOWN)
        self.unread = self.unread or reason

    def words(self) -> list[Word]:
        """Return the finished words: none for an empty text without quotes."""
        text = "".join(self.texts)
        if self.spliced is not None and not text:
            return self.spliced
        if self.spliced is not None:
            text += " ".join(word.text for word in self.spliced)
        if not text and not self.quoted:
            return []
        return [Word(text, self.line, self.unread)]


class _Script:
    """A parser of a shell script, which keeps the values of its variables.

    Args:
        text: The script.
    """

    def __init__(self, text: str):
        self.text = text.replace("\r\n", "\n")
        self.position = 0
        self.line = 1
        self.variables: dict[str, Variable] = {}
        # Number of branches, loops and functions around the current command.
        self.depth = 0
        self.word_count = 0
        # Number of characters of all substituted variables.
        self.substituted = 0
        # True if the current command follows && or ||, and may not run.
        self.conditional = False

    def commands(self) -> Iterator[Command]:
        """Yield the commands in order, and assign variables on the way."""
        while self.position < len(self.text):
            command = self._read_command()
            command = self._without_keywords(command)
            if not command:
                continue
            if all(_ASSIGNMENT.match(word.text) for word in command):
                self._assign(command)
            elif command[0].text in _DECLARATIONS:
                self._assign([word for word in command[1:] if _ASSIGNMENT.match(word.text)])
            else:
                yield command

    def _without_keywords(self, command: Command) -> Command:
        """Remove the keywords of control structures at the start of a command, and update their depth."""
        for index, word in enumerate(command):
            first = word.text
            if first in _OPENING_WORDS:
                self.depth += 1
                if first == "for" and index + 1 < len(command):
                    name = command[index + 1]
                    self.variables[name.text] = Word(UNKNOWN, name.line, "the variable of a loop")
                    return []
                if first in ("case", "select", "function"):
                    return []
            elif first in _CLOSING_WORDS:
                self.depth = max(0, self.depth - 1)
            elif first not in _BEFORE_A_COMMAND:
                return command[index:]
        return []

    def _assign(self, words: Command) -> None:
        """Assign the values of words such as ``name=value`` and ``name+=value``."""
        for word in words:
            match = _ASSIGNMENT.match(word.text)
            assert match is not None
            name = match[1]
            operator = match[2]
            value = Word(word.text[match.end() :], word.line, word.unread)
            old_value = self.variables.get(name)
            if operator == "+=" and isinstance(old_value, Word):
                value = Word(old_value.text + value.text, word.line, old_value.unread or value.unread)
            if len(value.text) > MOST_WORDS:
                value = Word(UNKNOWN, word.line, _too_long(name))
            if self._may_not_run() and old_value != value:
                value = Word(UNKNOWN, word.line, _set_in_a_branch(name))
            self.variables[name] = value

    def _may_not_run(self) -> bool:
        """Return whether the current command may not run, or run several times."""
        return self.depth > 0 or self.conditional

    def _assign_array(self, name: str, words: Sequence[Word], *, append: bool) -> None:
        """Assign an array.

        Args:
            name: The name of the variable.
            words: The words of the array.
            append: True for ``name+=(…)``.
        """
        old_value = self.variables.get(name, [])
        old_words = [old_value] if isinstance(old_value, Word) else old_value
        if self._may_not_run():
            # The array has the old words, the new ones or both, so all of these are marked as uncertain.
            words = [_mark_uncertain(word, name) for word in words]
            if not append:
                old_words = [_mark_uncertain(word, name) for word in old_words]
            append = True
        array = [*old_words, *words] if append else words
        longest = LONGEST_UNCERTAIN_ARRAY if self._may_not_run() else LONGEST_ARRAY
        if len(array) > longest:
            self.variables[name] = Word(UNKNOWN, self.line, _too_long(name))
        else:
            self.variables[name] = array

    def _read_command(self) -> Command:
        """Read up to the end of a command."""
        words: list[Word] = []
        # True until the first word that is no assignment and no keyword.
        at_start = True
        self.conditional = self.text.startswith(("&&", "||"), max(0, self.position - 1))
        while self.position < len(self.text):
            character = self.text[self.position]
            if self.text.startswith("\\\n", self.position):
                self._advance(2)
            elif character in " \t":
                self._advance(1)
            elif character == "#":
                self._skip_comment()
            elif character in "<>":
                self._skip_redirection()
            elif character in _ENDS:
                if character == "(" and len(words) == 1 and self._skip_function_brackets(words[0]):
                    words = []
                    at_start = True
                    continue
                # Of && and || only the first character is consumed. The next command is conditional if it follows one.
                self._advance(1)
                if words:
                    return words
            else:
                new_words = self._read_word_or_array(at_start=at_start)
                at_start = at_start and all(_may_precede_an_assignment(word.text) for word in new_words)
                words += new_words
                self.word_count += 1
                if self.word_count > MOST_WORDS or len(words) > MOST_WORDS:
                    # The rest of the script is not read.
                    self.position = len(self.text)
        return words

    def _skip_function_brackets(self, word: Word) -> bool:
        """Skip ``()`` after the name of a function that is being defined; return False if there are no brackets."""
        match = _FUNCTION_BRACKETS.match(self.text, self.position)
        if match is None or not _NAME.fullmatch(word.text.replace("-", "_")):
            return False
        self._advance(match.end() - match.start())
        return True

    def _read_word_or_array(self, *, at_start: bool) -> list[Word]:
        """Return the next words of a command. If an array is assigned here, store it and return no words.

        Args:
            at_start: True if an array may be assigned here.
        """
        match = _ARRAY_ASSIGNMENT.match(self.text, self.position)
        if match is None or not at_start:
            return self._read_words(_ENDS + " \t<>")
        self._advance(match.end() - match.start())
        words = self._read_array()
        self._assign_array(match[1], words[:MOST_WORDS], append=match[2] == "+=")
        return []

    def _read_array(self) -> list[Word]:
        """Read the words between the brackets of an array."""
        words: list[Word] = []
        while self.position < len(self.text):
            character = self.text[self.position]
            if character == ")":
                self._advance(1)
                break
            if self.text.startswith("\\\n", self.position):
                self._advance(2)
            elif character in " \t\n":
                self._advance(1)
            elif character == "#":
                self._skip_comment()
            elif len(words) > MOST_WORDS:
                break
            else:
                position = self.position
                words += self._read_words(") \t\n")
                # Skip a character that is neither a word nor an end.
                if self.position == position:
                    self._advance(1)
        return words

    def _read_words(self, ends: str) -> list[Word]:
        """Read one word, which a substitution may split into several.

        Args:
            ends: The characters that end it.
        """
        word = _WordBuilder(self.line)
        while self.position < len(self.text) and self.text[self.position] not in ends:
            self._read_part(word, 0)
        return word.words()

    def _find_end(self, character: str) -> int:
        """Return the position of the next occurrence of a character, or the end of the script."""
        end = self.text.find(character, self.position + 1)
        return len(self.text) if end < 0 else end

    def _read_part(self, word: _WordBuilder, depth: int) -> None:
        """Read one character, a quoted part or a substitution.

        Args:
            word: The word to add the part to.
            depth: The number of substitutions around this one.
        """
        character = self.text[self.position]
        if character == "\\":
            if self.text.startswith("\\\n", self.position):
                self._advance(2)
                return
            word.add(self.text[self.position + 1 : self.position + 2])
            self._advance(2)
        elif character == "'":
            end = self._find_end("'")
            word.quoted = True
            word.add(self.text[self.position + 1 : end])
            self._advance(end + 1 - self.position)
        elif character == '"':
            self._read_double_quotes(word, depth)
        elif character == "`":
            end = self._find_end("`")
            word.add_unknown("the output of a command")
            self._advance(end + 1 - self.position)
        elif character == "$":
            self._read_substitution(word, depth)
        else:
            word.add(character)
            self._advance(1)

    def _read_double_quotes(self, word: _WordBuilder, depth: int) -> None:
        """Read a part in double quotes, with substitutions."""
        word.quoted = True
        self._advance(1)
        while self.position < len(self.text) and self.text[self.position] != '"':
            character = self.text[self.position]
            if character in "$`" or (character == "\\" and self._escapes_in_quotes()):
                self._read_part(word, depth)
            else:
                word.add(character)
                self._advance(1)
        self._advance(1)

    def _escapes_in_quotes(self) -> bool:
        """Return whether a backslash within double quotes escapes the character after it."""
        return self.text[self.position + 1 : self.position + 2] in ("", '"', "\\", "$", "`", "\n")

    def _read_substitution(self, word: _WordBuilder, depth: int) -> None:
        """Read a part that begins with ``$``."""
        text = self.text
        start = self.position
        if text.startswith("$((", start):
            end = text.find("))", start)
            end = len(text) if end < 0 else end
            self._substitute_arithmetic(word, text[start + 3 : end])
            self._advance(end + 2 - start)
            return
        if text.startswith("$(", start):
            self._advance(self._length_of_command(start))
            word.add_unknown("the output of a command")
            return
        if text.startswith("${", start):
            self._read_braces(word, depth)
            return
        if text.startswith("$'", start):
            # The quoted part is read next.
            self._advance(1)
            return
        match = _NAME.match(text, start + 1)
        if match is not None:
            self._advance(match.end() - start)
            self._substitute(word, match[0])
            return

        parameter = text[start + 1 : start + 2]
        if parameter in ("@", "*"):
            # The arguments of the script are taken to be none.
            word.splice([])
            self._advance(2)
        elif parameter and parameter in "0123456789?#$!-":
            word.add_unknown("an argument of the script")
            self._advance(2)
        else:
            word.add("$")
            self._advance(1)

    def _length_of_command(self, start: int) -> int:
        """Return the length of a command substitution ``$(…)``, from its brackets."""
        level = 0
        for position in range(start + 1, len(self.text)):
            if self.text[position] == "(":
                level += 1
            elif self.text[position] == ")":
                level -= 1
                if not level:
                    return position + 1 - start
        return len(self.text) - start

    def _read_braces(self, word: _WordBuilder, depth: int) -> None:
        """Read ``${NAME}``, ``${NAME[@]}``, ``${NAME:-default}`` or ``${NAME:=default}``."""
        match = _BRACES.match(self.text, self.position)
        if match is None or depth >= DEEPEST_SHELL:
            end = self._find_end("}")
            word.add_unknown(f"the substitution {self.text[self.position : end + 1][:40]}")
            self._advance(end + 1 - self.position)
            return
        name = match[1]
        operator = match[3]
        self._advance(match.end() - match.start())
        if operator == "}":
            self._substitute(word, name)
            return

        # The default is read even if it is not used.
        default_builder = _WordBuilder(self.line, quoted=True)
        while self.position < len(self.text) and self.text[self.position] != "}":
            self._read_part(default_builder, depth + 1)
        self._advance(1)
        value = self.variables.get(name)
        is_empty = operator.startswith(":") and isinstance(value, Word) and not value.text
        if value is not None and not is_empty:
            self._substitute(word, name)
            return
        (default,) = default_builder.words() or [Word("", self.line)]
        word.add(default.text)
        word.unread = word.unread or default.unread
        if operator.endswith("="):
            self.variables[name] = default

    def _substitute(self, word: _WordBuilder, name: str) -> None:
        """Add the value of a variable to a word."""
        value = self.variables.get(name)
        if self.substituted <= MOST_SUBSTITUTED:
            self.substituted += _count_characters(value)
        if value is None:
            word.add_unknown(f"the environment variable {name}")
        elif self.substituted > MOST_SUBSTITUTED or word.size + _size(value) > MOST_WORDS:
            word.add_unknown(_too_long(name))
        elif not isinstance(value, Word):
            word.splice(value)
        elif word.quoted or word.texts or " " not in value.text.strip():
            word.add(value.text)
            word.unread = word.unread or value.unread
        else:
            # Without quotes, a text with spaces is several words.
            words = []
            for part in value.text.split():
                unread = value.unread if UNKNOWN in part else ""
                words.append(Word(part, value.line, unread))
            word.splice(words)

    def _substitute_arithmetic(self, word: _WordBuilder, expression: str) -> None:
        """Add the result of an arithmetic expression of whole numbers and variables to a word."""
        tokens: list[str] = re.findall(r"\d+|[A-Za-z_]\w*|[-+*/%()]|\S", expression.replace("$", " "))
        values: list[str] = []
        for token in tokens:
            if _NAME.fullmatch(token):
                variable = self.variables.get(token)
                if not isinstance(variable, Word) or variable.unread or not variable.text.strip().isdigit():
                    word.add_unknown(f"the expression {expression.strip()[:40]}")
                    return
                token = variable.text.strip()
            values.append(token)
        result = _compute(values)
        if result is None:
            word.add_unknown(f"the expression {expression.strip()[:40]}")
        else:
            word.add(str(result))

    def _skip_comment(self) -> None:
        """Skip a comment up to the end of the line."""
        self._advance(self._find_end("\n") - self.position)

    def _skip_redirection(self) -> None:
        """Skip ``<`` or ``>``, or a here-document."""
        match = _HERE_DOCUMENT.match(self.text, self.position)
        if match is None:
            self._advance(1)
            return
        # A here-document ends at a line that contains only its delimiter.
        end = re.compile(rf"\n[^\S\n]*+{re.escape(match[2])}[ \t]*+(?=\n|\Z)").search(self.text, match.end())
        stop = len(self.text) if end is None else end.end()
        self._advance(stop - self.position)

    def _advance(self, count: int) -> None:
        """Move by a number of characters, and count the lines."""
        self.line += self.text.count("\n", self.position, self.position + count)
        self.position += count


def _compute(tokens: Sequence[str]) -> int | None:
    """Compute an expression of whole numbers with ``+``, ``-``, ``*`` and ``/``; return None for any other."""
    if len(tokens) % 2 == 0 or len(tokens) > 99:
        return None
    numbers = tokens[::2]
    operators = tokens[1::2]
    if not all(number.isdigit() and len(number) <= 12 for number in numbers):
        return None
    if not all(operator in ("+", "-", "*", "/") for operator in operators):
        return None
    # Products and quotients are computed at once, and the terms are added at the end.
    terms = [int(numbers[0])]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            terms[-1] *= int(number)
        elif operator == "/":
            if not int(number):
                return None
            terms[-1] = int(terms[-1] / int(number))
        else:
            terms.append(int(number) if operator == "+" else -int(number))
    return sum(terms)


def _may_precede_an_assignment(text: str) -> bool:
    """Return whether an array may be assigned after a word, such as a keyword or another assignment."""
    keywords = (*_OPENING_WORDS, *_BEFORE_A_COMMAND, *_DECLARATIONS)
    return text in keywords or text.startswith("-") or _ASSIGNMENT.match(text) is not None


def _set_in_a_branch(name: str) -> str:
    """Describe a variable whose value is not certain."""
    return f"{name}, which is set in a branch, a loop or a function"


def _mark_uncertain(word: Word, name: str) -> Word:
    """Return a word that an array may or may not contain, with an unknown part."""
    if word.text.endswith(UNKNOWN):
        return word
    return Word(word.text + UNKNOWN, word.line, word.unread or _set_in_a_branch(name))


def _too_long(name: str) -> str:
    """Describe a variable whose value is not read, since it is too long."""
    return f"the variable {name}, which is too long"


def _count_characters(value: Variable | None) -> int:
    """Return the number of characters of a variable's value."""
    words = [value] if isinstance(value, Word) else value or ()
    return sum(len(word.text) + 1 for word in words)


def _size(value: Variable) -> int:
    """Return the number of characters of a word, or of words of an array."""
    return len(value.text) if isinstance(value, Word) else len(value)
