"""A reader of pages that finds sentences on entropy without an estimand.

A rule that learns sooner has less entropy after the same number of batches, whatever it does to entropy. So a
comparison of entropies says whether it is at equal step or at equal reward: in its sentence, in the bold words with
which its paragraph begins or in a heading above it, if these have one of the two alone, or, for a table, in the header
or in a paragraph beside it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

ESTIMAND = re.compile(r"equal (held-out )?(reward|step)")
SUBJECT = re.compile(r"\b(entrop(y|ies)|variety)\b|[\d\]] nats\b", re.I)
"""What a sentence is about."""
OTHER_SUBJECT = re.compile(
    r"entropy (bonus|coefficient|controller|term)|(coefficient|average|tokens) (of|by) (the )?entropy|cross[- ]entropy"
    r"|[\w/]+_entropy|entropy_\w+|`entropy-[a-z-]+`|`[a-z-]+-entropy`|audit/\w+"
    r"|(moved away by|distance of)[^.;,]*[\d.]+ nats"
    r"|KL[^.;,]*?\d+(\.\d+)? nats"
    r"|(tokens|those) that (reduce|lower) the entropy (most|much)"
    r"|^If [^,]*entropy[^,]*,|.*\?$|\]\([^)]*\)"
)
"""Parts of a sentence in which these words are about something else than the entropy of a policy under a rule."""
NUMBER = re.compile(r"(?<![\w.\[])[-+−]?\d+(\.\d+)?(?!\w)")
COMPARISON = re.compile(
    r"\b(keep|keeps|kept|keeping|lose|loses|lost|losing|gain|gains|gained|cost|costs|preserve\w*|prevent\w*|save[sd]?"
    r"|more|less|lower|lowers|lowered|lowest|higher|highest|raise[sd]?|rise|rises|rose|fall|falls|fell|above|below|least|most|same"
    r"|equal|equals|differ|differs|differed|difference|differences|change|changes|changed|collapse\w*|inflat\w+|ends?|ended"
    r"|effect|effects|minus)\b",
    re.I,
)
"""What is said of it."""
RULE = re.compile(
    r"\b(Band\w*|clips?|Clip-Higher|bounds?|rules?|arms?|constants?|room by mass|GRPO|\w+-(band|grpo))\b"
    r"|\[0?\.8, |FixedClip|Unclipped"
)
"""What it is said of."""


def asks_for_an_estimand(sentence: str) -> bool:
    """Return True if a sentence compares the entropies under two rules, or gives that of one as a number.

    Questions, conditions of an advice, and what KL and other terms have in nats are none.
    """
    text = OTHER_SUBJECT.sub(" ", sentence)
    said = COMPARISON.search(text) or NUMBER.search(RULE.sub(" ", text))
    return bool(SUBJECT.search(text) and said and RULE.search(text))


def estimands_of(text: str) -> set[str]:
    """Return what a text says that entropies are equal in: ``reward``, ``step`` or both."""
    return {match[2] for match in ESTIMAND.finditer(" ".join(text.split()))}


@dataclass(frozen=True)
class Block:
    """A paragraph, an item of a list or a table, with the headings above it."""

    headings: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def is_table(self) -> bool:
        """True if it is a table."""
        return self.lines[0].startswith("|")

    @property
    def text(self) -> str:
        """The text in one line."""
        return " ".join(" ".join(self.lines).split())


def blocks_of(markdown: str) -> Iterator[Block]:
    """Yield the blocks of a page, without fenced code and comments."""
    markdown = re.sub(r"^```.*?^```[^\n]*$|<!--.*?-->", "", markdown, flags=re.M | re.S)
    headings: list[tuple[int, str]] = []
    lines: list[str] = []
    for line in [*markdown.splitlines(), ""]:
        heading = re.match(r"(#+) (.*)", line)
        begins = not line.strip() or heading or re.match(r"\s*([-*]|\d+\.) ", line)
        if lines and (begins or line.startswith("|") != lines[0].startswith("|")):
            yield Block(tuple(title for _, title in headings), tuple(lines))
            lines = []
        if heading:
            depth = len(heading[1])
            headings = [(level, title) for level, title in headings if level < depth]
            headings.append((depth, heading[2]))
        elif line.strip():
            lines.append(line)


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a paragraph."""
    return re.split(r"(?<=[.!?])[*_)]*\s+(?=[*_(\[`]*[A-Z\d])", text)


def _lead(text: str) -> str:
    """Return the bold words with which a paragraph begins."""
    match = re.match(r"\s*(?:[-*] |\d+\. )?\*\*(.*?)\*\*", text)
    return match[1] if match else ""


def sentences_without_estimand(markdown: str) -> list[str]:
    """Return the sentences of a page, and a row of each table, that compare entropies and do not say at equal what.

    A sentence without the word entropy may take the estimand of the sentence before it in the same paragraph.
    """
    found: list[str] = []
    blocks = list(blocks_of(markdown))
    for index, block in enumerate(blocks):
        # The title of a page is of the whole page, and no estimand of one sentence.
        context = " ".join(block.headings[1:])
        if not block.is_table:
            found += _of_paragraph(block.text, context)
            continue
        beside = [other.text for other in blocks[max(0, index - 1) : index + 2] if not other.is_table]
        found += _of_table(block, " ".join([context, block.lines[0], *beside]), context)
    return found


def _of_paragraph(text: str, context: str) -> list[str]:
    found: list[str] = []
    before = ""
    lead = _lead(text)
    # Words that have both do not say which one a sentence has.
    is_told = len(estimands_of(f"{context} {lead}")) == 1
    rest = text.replace(lead, "", 1) if lead else text
    for index, sentence in enumerate([lead, *sentences_of(rest)]):
        own = sentence if re.search(r"entrop", sentence, re.I) else f"{before} {sentence}"
        if asks_for_an_estimand(sentence) and not is_told and not estimands_of(own):
            found.append(sentence)
        # The lead is no sentence that the next one continues.
        before = sentence if index else ""
    return found


def _of_table(block: Block, beside: str, context: str) -> list[str]:
    found: list[str] = []
    header = block.lines[0]
    of_rules = bool(RULE.search(block.text))
    names = [cell.strip() for cell in header.strip("| ").split("|")]
    for line in block.lines[2:]:
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        for name, cell in zip(names, cells, strict=False):
            # A cell with words is a paragraph of its own, a number is of its column and its row.
            if len(re.findall(r"[A-Za-z]{2,}", OTHER_SUBJECT.sub(" ", cell))) > 8:
                found += _of_paragraph(cell, f"{context} {name}")
                continue
            about = OTHER_SUBJECT.sub(" ", f"{name} {' '.join(cells[:2])}")
            if (
                of_rules
                and NUMBER.search(cell)
                and SUBJECT.search(about)
                and not estimands_of(f"{beside} {line}")
            ):
                return [*found, f"{header} … {line}"]
    return found
