"""Read the commands of a shell script with their variables filled in. Nothing is run.

A variable has the last value that the script gives it before a command. One that is set in a branch, a loop or a
function, by the output of a command, or outside of the script is unread. ``${NAME:-default}`` has its default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

DEEPEST = 20
"""Levels of substitutions within substitutions that are read."""
MOST_WORDS = 100_000
"""Words of a script, and characters of a variable, that are read."""

UNKNOWN = "\0"
"""What stands in a text for a part that is not known. No script holds this character."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)")
_OPENING_WORDS = ("if", "for", "while", "until", "case", "select", "function", "{")
_CLOSING_WORDS = ("fi", "done", "esac", "}")
_BEFORE_A_COMMAND = ("then", "else", "elif", "do", "!", "time")
_DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")
_ENDS = "\n;&|()"


@dataclass(frozen=True)
class Word:
    """A word of a command."""

    text: str
    line: int
    unread: str = ""
    """Why part of the text is not known, as a phrase; empty if all of it is. `UNKNOWN` stands for that part."""


Command = Sequence[Word]
Variable = Word | Sequence[Word]
"""The value of a variable: one word, or those of an array."""


def read_commands(text: str) -> Iterator[Command]:
    """Read the commands of a script, each as its words.

    >>> script = "lr=1e-6\\npython -m verl.trainer.main_ppo actor.lr=$lr data.n=$((2 * 4)) key=$UNKNOWN"
    >>> (command,) = read_commands(script)
    >>> [word.text for word in command][3:5], command[5].unread
    (['actor.lr=1e-6', 'data.n=8'], 'the environment variable UNKNOWN')
    """
    return _Script(text).commands()


@dataclass
class _Piece:
    """A word that is being read."""

    line: int
    texts: list[str] = field(default_factory=list)
    unread: str = ""
    quoted: bool = False
    spliced: list[Word] | None = None
    """The words of an array, or of a text with spaces, that stand in place of this one."""
    size: int = 0
    """Number of characters and of words."""

    def add(self, text: str) -> None:
        self.texts.append(text)
        self.size += len(text)

    def splice(self, words: Iterable[Word]) -> None:
        self.spliced = self.spliced or []
        count = len(self.spliced)
        self.spliced.extend(words)
        self.size += len(self.spliced) - count

    def add_unknown(self, reason: str) -> None:
        self.texts.append(UNKNOWN)
        self.unread = self.unread or reason

    def words(self) -> list[Word]:
        if self.spliced is not None and not "".join(self.texts):
            return self.spliced
        text = "".join(self.texts)
        if self.spliced is not None:
            text += " ".join(word.text for word in self.spliced)
        if not text and not self.quoted:
            return []
        return [Word(text, self.line, self.unread)]


class _Script:
    def __init__(self, text: str):
        self.text = text.replace("\r\n", "\n")
        self.position = 0
        self.line = 1
        self.variables: dict[str, Variable] = {}
        self.depth = 0
        """Number of branches, loops and functions around the current command."""
        self.word_count = 0
        self.conditional = False
        """Whether the current command follows ``&&`` or ``||``."""

    def commands(self) -> Iterator[Command]:
        while self.position < len(self.text):
            command = self._next_command()
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
        """Return a command without the words of control structures before it, and keep their depth."""
        while command:
            first = command[0].text
            if first in _OPENING_WORDS:
                self.depth += 1
                if first == "for" and len(command) > 1:
                    self.variables[command[1].text] = Word(UNKNOWN, command[1].line, "the variable of a loop")
                    return []
                if first in ("case", "select", "function"):
                    return []
            elif first in _CLOSING_WORDS:
                self.depth = max(0, self.depth - 1)
            elif first not in _BEFORE_A_COMMAND:
                return command
            command = command[1:]
        return command

    def _assign(self, words: Command) -> None:
        for word in words:
            match = _ASSIGNMENT.match(word.text)
            assert match is not None
            name, operator = match[1], match[2]
            value = Word(word.text[match.end() :], word.line, word.unread)
            before = self.variables.get(name)
            if operator == "+=" and isinstance(before, Word):
                value = Word(before.text + value.text, word.line, before.unread or value.unread)
            if self._may_not_run() and before != value:
                value = Word(UNKNOWN, word.line, _set_in_a_branch(name))
            self.variables[name] = value

    def _may_not_run(self) -> bool:
        return self.depth > 0 or self.conditional

    def _assign_array(self, name: str, words: Sequence[Word], *, append: bool) -> None:
        before = self.variables.get(name, [])
        words_before = [before] if isinstance(before, Word) else before
        if self._may_not_run():
            words = [_marked(word, name) for word in words]
            if not append:
                words_before = [_marked(word, name) for word in words_before]
            append = True
        self.variables[name] = [*words_before, *words] if append else words

    def _next_command(self) -> Command:
        """Read up to the end of a command."""
        words: list[Word] = []
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
                if character == "(" and len(words) == 1 and self._at_function(words[0]):
                    words = []
                    at_start = True
                    continue
                if words:
                    # `&&` and `||` are left at their second character, by which the next command knows them.
                    self._advance(1)
                    return words
                self._advance(1)
            else:
                more = self._word_or_array(at_start=at_start)
                at_start = at_start and all(_may_precede_an_assignment(word.text) for word in more)
                words += more
                self.word_count += 1
                if self.word_count > MOST_WORDS or len(words) > MOST_WORDS:
                    self.position = len(self.text)
        return words

    def _at_function(self, word: Word) -> bool:
        """Skip ``()`` after the name of a function that is defined."""
        match = re.compile(r"\(\s*\)").match(self.text, self.position)
        if match is None or not _NAME.fullmatch(word.text.replace("-", "_")):
            return False
        self._advance(match.end() - match.start())
        return True

    def _word_or_array(self, *, at_start: bool) -> list[Word]:
        match = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)\(").match(self.text, self.position)
        if match is None or not at_start:
            return self._word(_ENDS + " \t<>")
        self._advance(match.end() - match.start())
        words = self._array_words()
        self._assign_array(match[1], words[:MOST_WORDS], append=match[2] == "+=")
        return []

    def _array_words(self) -> list[Word]:
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
                words += self._word(") \t\n")
                if self.position == position:
                    self._advance(1)
        return words

    def _word(self, ends: str) -> list[Word]:
        piece = _Piece(self.line)
        while self.position < len(self.text) and self.text[self.position] not in ends:
            self._read_part(piece, 0)
        return piece.words()

    def _read_part(self, piece: _Piece, depth: int) -> None:
        """Read one character, or what a quote or a substitution stands for."""
        character = self.text[self.position]
        if character == "\\":
            if self.text.startswith("\\\n", self.position):
                self._advance(2)
                return
            piece.add(self.text[self.position + 1 : self.position + 2])
            self._advance(2)
        elif character == "'":
            end = self.text.find("'", self.position + 1)
            end = len(self.text) if end < 0 else end
            piece.quoted = True
            piece.add(self.text[self.position + 1 : end])
            self._advance(end + 1 - self.position)
        elif character == '"':
            self._read_double_quotes(piece, depth)
        elif character == "`":
            end = self.text.find("`", self.position + 1)
            end = len(self.text) if end < 0 else end
            piece.add_unknown("the output of a command")
            self._advance(end + 1 - self.position)
        elif character == "$":
            self._read_substitution(piece, depth)
        else:
            piece.add(character)
            self._advance(1)

    def _read_double_quotes(self, piece: _Piece, depth: int) -> None:
        piece.quoted = True
        self._advance(1)
        while self.position < len(self.text) and self.text[self.position] != '"':
            character = self.text[self.position]
            if character in "$`" or (character == "\\" and self._escapes_in_quotes()):
                self._read_part(piece, depth)
            else:
                piece.add(character)
                self._advance(1)
        self._advance(1)

    def _escapes_in_quotes(self) -> bool:
        """Return whether a backslash within double quotes changes the character after it."""
        return self.text[self.position + 1 : self.position + 2] in ("", '"', "\\", "$", "`", "\n")

    def _read_substitution(self, piece: _Piece, depth: int) -> None:
        text, start = self.text, self.position
        if text.startswith("$((", start):
            end = text.find("))", start)
            end = len(text) if end < 0 else end
            self._substitute_arithmetic(piece, text[start + 3 : end])
            self._advance(end + 2 - start)
        elif text.startswith("$(", start):
            self._advance(self._length_of_command(start))
            piece.add_unknown("the output of a command")
        elif text.startswith("${", start):
            self._read_braces(piece, depth)
        elif text.startswith("$'", start):
            self._advance(1)
        elif (match := _NAME.match(text, start + 1)) is not None:
            self._advance(match.end() - start)
            self._substitute(piece, match[0])
        else:
            arguments = text[start + 1 : start + 2]
            if arguments in ("@", "*"):
                piece.splice([])
            elif arguments and arguments in "0123456789?#$!-":
                piece.add_unknown("an argument of the script")
            else:
                piece.add("$")
                self._advance(1)
                return
            self._advance(2)

    def _length_of_command(self, start: int) -> int:
        """Return the length of ``$(…)`` by its brackets."""
        level = 0
        for position in range(start + 1, len(self.text)):
            if self.text[position] == "(":
                level += 1
            elif self.text[position] == ")":
                level -= 1
                if not level:
                    return position + 1 - start
        return len(self.text) - start

    def _read_braces(self, piece: _Piece, depth: int) -> None:
        """Read ``${NAME}``, ``${NAME[@]}``, ``${NAME:-default}`` or ``${NAME:=default}``."""
        match = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(\[[@*]\])?(:?[-=]|\})").match(
            self.text, self.position
        )
        if match is None or depth >= DEEPEST:
            end = self.text.find("}", self.position)
            end = len(self.text) if end < 0 else end
            piece.add_unknown(f"the substitution {self.text[self.position : end + 1][:40]}")
            self._advance(end + 1 - self.position)
            return
        name, operator = match[1], match[3]
        self._advance(match.end() - match.start())
        if operator == "}":
            self._substitute(piece, name)
            return
        default = _Piece(self.line, quoted=True)
        while self.position < len(self.text) and self.text[self.position] != "}":
            self._read_part(default, depth + 1)
        self._advance(1)
        value = self.variables.get(name)
        is_empty = operator.startswith(":") and isinstance(value, Word) and not value.text
        if value is not None and not is_empty:
            self._substitute(piece, name)
            return
        (word,) = default.words() or [Word("", self.line)]
        piece.add(word.text)
        piece.unread = piece.unread or word.unread
        if operator.endswith("="):
            self.variables[name] = word

    def _substitute(self, piece: _Piece, name: str) -> None:
        value = self.variables.get(name)
        if value is None:
            piece.add_unknown(f"the environment variable {name}")
        elif piece.size + _size(value) > MOST_WORDS:
            piece.add_unknown(f"the variable {name}, which is too long")
        elif not isinstance(value, Word):
            piece.splice(value)
        elif piece.quoted or piece.texts or " " not in value.text.strip():
            piece.add(value.text)
            piece.unread = piece.unread or value.unread
        else:
            # Without quotes, a text with spaces is several words.
            words = [
                Word(part, value.line, value.unread if UNKNOWN in part else "") for part in value.text.split()
            ]
            piece.splice(words)

    def _substitute_arithmetic(self, piece: _Piece, expression: str) -> None:
        """Compute sums, differences, products and quotients of whole numbers and variables."""
        tokens: list[str] = re.findall(r"\d+|[A-Za-z_]\w*|[-+*/%()]|\S", expression.replace("$", " "))
        values: list[str] = []
        for token in tokens:
            if _NAME.fullmatch(token):
                variable = self.variables.get(token)
                if not isinstance(variable, Word) or variable.unread or not variable.text.strip().isdigit():
                    piece.add_unknown(f"the expression {expression.strip()[:40]}")
                    return
                token = variable.text.strip()
            values.append(token)
        result = _computed(values)
        if result is None:
            piece.add_unknown(f"the expression {expression.strip()[:40]}")
        else:
            piece.add(str(result))

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.position)
        self._advance((len(self.text) if end < 0 else end) - self.position)

    def _skip_redirection(self) -> None:
        match = re.compile(r"<<-?\s*(['\"]?)(\w+)\1").match(self.text, self.position)
        if match is None:
            self._advance(1)
            return
        # A text follows, up to a line that repeats the word.
        end = re.compile(rf"\n\s*{re.escape(match[2])}[ \t]*(?=\n|\Z)").search(self.text, match.end())
        stop = len(self.text) if end is None else end.end()
        self._advance(stop - self.position)

    def _advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.position, self.position + count)
        self.position += count


def _computed(tokens: Sequence[str]) -> int | None:
    """Compute an expression of whole numbers without brackets, ``*`` and ``/`` before ``+`` and ``-``."""
    if len(tokens) % 2 == 0 or len(tokens) > 99:
        return None
    numbers, operators = tokens[::2], tokens[1::2]
    if not all(number.isdigit() and len(number) <= 12 for number in numbers):
        return None
    if not all(operator in ("+", "-", "*", "/") for operator in operators):
        return None
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
    keywords = (*_OPENING_WORDS, *_BEFORE_A_COMMAND, *_DECLARATIONS)
    return text in keywords or text.startswith("-") or _ASSIGNMENT.match(text) is not None


def _set_in_a_branch(name: str) -> str:
    return f"{name}, which is set in a branch, a loop or a function"


def _marked(word: Word, name: str) -> Word:
    """Return a word that a command may have or not, as the script runs."""
    return Word(word.text + UNKNOWN, word.line, word.unread or _set_in_a_branch(name))


def _size(value: Variable) -> int:
    return len(value.text) if isinstance(value, Word) else len(value)
