"""What the documentation prints: its fenced blocks, and its `bandpo` commands."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "lab/src/bandpo_lab/recipes").rglob("*.md"))


class Block(NamedTuple):
    """A fenced block."""

    page: str
    heading: str
    """The nearest one above it."""
    language: str
    title: str
    """A file's name, where the block is a file."""
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """Of these languages; of all if none is given."""
    found, heading = [], ""
    pattern = r'^#+ (?P<heading>.*)$|^```(?P<language>\w+)(?: title="(?P<title>.*)")?\n(?P<text>(?s:.*?))^```'
    for match in re.finditer(pattern, page.read_text(), re.M):
        heading = match["heading"] or heading
        if match["language"] and (not languages or match["language"] in languages):
            found.append(Block(page.name, heading, match["language"], match["title"] or "", match["text"]))
    return found


def commands(page: Path) -> list[list[str]]:
    """Every `bandpo …` on a line of a shell or indented block, or in a code span, as words after `bandpo`."""
    fenced = "".join(block.text for block in blocks(page, "sh", "console"))
    indented = "".join(re.findall(r"^    .*\n", page.read_text(), re.M))
    lines = (fenced + indented).replace("\\\n", " ")
    found = re.findall(r"^(?: *|\$ )bandpo (.*)$", lines, re.M) + re.findall(
        r"`bandpo ([^`]+)`", page.read_text()
    )
    return [shlex.split(command, comments=True) for command in found]


def framework_blocks(heading: str) -> list[str]:
    """The blocks of docs/frameworks.md under the heading of a framework."""
    page = ROOT / "docs/frameworks.md"
    return [block.text for block in blocks(page) if block.heading.startswith(heading)]
