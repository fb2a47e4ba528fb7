"""Typesets ``$…$`` and fenced ``math`` blocks as MathML when the site is built; a page needs no script for it."""

import html
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor


class Inline(InlineProcessor):
    """``$…$`` as GitHub reads it: no blank beside either sign, and no letter or figure after the second."""

    def __init__(self, md: Markdown) -> None:
        super().__init__(r"(?<![\\$\w])\$(?!\s)([^$\n]+?)(?<!\s)\$(?!\w)", md)

    def handleMatch(self, m: Any, data: str) -> tuple[str, int, int]:  # type: ignore[override]
        return self.md.htmlStash.store(convert(html.unescape(m[1]))), m.start(0), m.end(0)


class MathML(Extension):
    """``$…$`` in running text."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(Inline(md), "mathml", 186)  # after code (190), before backslashes (180)


def fence(source: str, *_: Any, **__: Any) -> str:
    """Return a fenced ``math`` block as HTML, with each formula that follows a blank line on its own line."""
    return "".join(
        f'<div class="formula">{convert(part, display="block")}</div>' for part in source.split("\n\n")
    )


def on_config(config: Any) -> Any:
    """Add both syntaxes to the Markdown of pages and of docstrings (an event of mkdocs)."""
    config.markdown_extensions.append(MathML())
    settings = config.mdx_configs.setdefault("pymdownx.superfences", {})
    settings["custom_fences"] = [{"name": "math", "class": "math", "format": fence}]
    return config
