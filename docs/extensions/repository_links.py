"""Lets pages link to files of the repository that are not on the site, such as CONTRIBUTING.md and the reports.

On a code host the relative link works as it stands. On the site it leads to the file on the code host; where the
repository's address is not known, as in a local build, the first link to a file is followed by its path.
"""

import posixpath
import re
from typing import Any

OUTSIDE = re.compile(r"\[((?:[^][]|\[[^]]*\])*)\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")
"""A link whose address begins with ``../``."""


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace the links of a page to files outside of the folder of the pages (an event of mkdocs)."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    named: set[str] = set()

    def replaced(link: re.Match[str]) -> str:
        text, address, anchor = link.group(1), link.group(2), link.group(3) or ""
        path = posixpath.normpath(posixpath.join(folder, address))
        if path.startswith("docs/"):
            return link.group()
        if not config.repo_url:
            is_new = path not in named
            named.add(path)
            return f"{text} (`{path}`)" if is_new else text
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"

    return OUTSIDE.sub(replaced, markdown)
