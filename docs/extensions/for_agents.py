"""Puts on the site what agents read: llms.txt, with a link to every page, and the skill of rlvet as in the wheel."""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SKILL = Path(__file__).parents[2] / "packages/rlvet/src/rlvet/skill"
FOLDER = "skill"
"""Where the folder of the wheel lies on the site."""
NOT_PROSE = ("#", "|", "<", "!", "- ", ">", "    ")
"""The beginnings of lines that belong to no paragraph."""


def on_post_build(config: Any) -> None:
    """Write llms.txt, and copy the skill, to the finished site (an event of mkdocs)."""
    site = Path(config["site_dir"])
    shutil.copytree(SKILL, site / FOLDER, dirs_exist_ok=True)
    text = llms_text(config["site_name"], config["site_description"], config["nav"], Path(config["docs_dir"]))
    (site / "llms.txt").write_text(text, encoding="utf-8")


def llms_text(name: str, description: str, nav: Sequence[Mapping[str, Any]], docs: Path) -> str:
    """Return llms.txt of the site, in the form of llmstxt.org: a title, a summary, and lists of links.

    Args:
        name: The name of the site.
        description: The site in a sentence.
        nav: The navigation, as mkdocs.yml has it.
        docs: The folder of the pages.
    """
    skill = (SKILL / "llms.txt").read_text(encoding="utf-8")
    of_agents = skill.partition("## For agents\n")[2].replace("](", f"]({FOLDER}/")
    lines = [f"# {name}", "", f"> {description}", "", "## For agents", of_agents.rstrip()]
    for section in nav:
        for title, content in section.items():
            lines += ["", f"## {title}", ""]
            lines += [
                _line_of_page(page_title, _source(docs, page), page)
                for page_title, page in _pages(title, content)
            ]
    return "\n".join(lines) + "\n"


def _pages(title: str, content: Any) -> Iterator[tuple[str, str]]:
    """Yield the title and the file of each page of a part of the navigation, in order."""
    if isinstance(content, str):
        yield title, content
        return
    for entry in content:
        for name, item in entry.items():
            yield from _pages(name, item)


def _source(docs: Path, page: str) -> Path:
    """Return the file of a page's text. The first page is made from README."""
    file = docs / page
    return file if file.is_file() else docs.parent / "README.md"


def _line_of_page(title: str, file: Path, page: str) -> str:
    """Return the line of a page: a link to its file on the site, and its first sentence."""
    folder = page.removesuffix(".md")
    target = "index.html" if folder == "index" else f"{folder}/index.html"
    sentence = first_sentence(file.read_text(encoding="utf-8"))
    return f"- [{title}]({target}): {sentence}" if sentence else f"- [{title}]({target})"


def first_sentence(page: str) -> str:
    """Return the first sentence of a page's first paragraph, without markup; empty if the page has no paragraph."""
    text = re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.S)
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.S | re.M)
    for paragraph in re.split(r"\n\s*\n", text):
        if not paragraph.strip() or paragraph.lstrip("\n").startswith(NOT_PROSE):
            continue
        words = " ".join(paragraph.split())
        words = re.sub(r"\[([^][]*)\]\([^()]*\)", r"\1", words)
        words = re.sub(r"[*`]", "", words)
        return re.split(r"(?<=[.!?:])\s", words)[0].rstrip(":.")
    return ""
