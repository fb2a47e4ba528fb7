"""Makes the first page of the site from README, with the explorer above the picture of what a rule allows."""

import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

README = Path(__file__).parents[2] / "README.md"
PAGE = "index.md"
PICTURE = re.compile(r'<picture>.*?<img src="docs/(?P<file>[^"]+)" alt="(?P<alt>[^"]+)"></picture>')
BADGES = re.compile(r"^!\[[^]]*\]\(https://img\.shields\.io/.*\n\n", re.M)
"""The line of badges, which a code host shows; the site loads nothing from elsewhere."""
LINK = re.compile(r"\]\((?!https?:|#)(?P<address>[^)]+)\)")
EXPLORER = '<div id="explorer"></div>\n\n'
STYLES = ("uPlot.css", "explorer.css")
SCRIPTS = ("uPlot.js", "bounds.js", "chart.js", "explorer.js")


# Before the plugin of redirects, which lists the pages that there are.
@event_priority(100)
def on_files(files: Any, config: Any) -> Any:
    """Add the first page to the site (an event of mkdocs)."""
    if not files.get_file_from_path(PAGE):
        files.append(File.generated(config, PAGE, content=start_page(README.read_text(encoding="utf-8"))))
    return files


def start_page(readme: str) -> str:
    """Return the first page of the site.

    Args:
        readme: The text of README, whose links lead from the root of the repository.
    """
    text = LINK.sub(_link_from_docs, BADGES.sub("", readme))
    text, pictures = PICTURE.subn(rf"{EXPLORER}![\g<alt>](\g<file>)", text, count=1)
    if not pictures:
        raise ValueError("README.md has no <picture> above which the explorer could stand")
    styles = [f'<link rel="stylesheet" href="explorer/{name}">' for name in STYLES]
    scripts = [f'<script src="explorer/{name}"></script>' for name in SCRIPTS]
    return "\n".join([text, *styles, *scripts, ""])


def _link_from_docs(link: re.Match[str]) -> str:
    """Return a link of README as it stands on a page in the folder docs."""
    address = link["address"]
    inside = address.removeprefix("docs/")
    return f"]({inside})" if inside != address else f"](../{address})"
