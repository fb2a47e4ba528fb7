"""Puts on the site the scripts and colours of `rlvet report` that it shares, and the scripts of the page on records."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

PAGE = Path(__file__).parents[2] / "packages/rlvet/src/rlvet/report/assets"
SHARED = ("uPlot.js", "uPlot.css", "uPlot-LICENSE", "bounds.js", "chart.js")

AUDIT_PAGE = "audit.md"
"""The page that shows the output of `bandpo audit --json`."""
AUDIT_SCRIPTS = ("chart.js", "audit.js")
PALETTE = "palette.css"
"""The style sheet with the variables of the colours."""


def on_config(config: Any) -> Any:
    """Add the style sheet of the colours to every page (an event of mkdocs)."""
    config.extra_css.insert(0, PALETTE)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files that the explorer shares with reports, and the colours, to the site (an event of mkdocs)."""
    from rlvet.report.palette import css_variables

    colours = css_variables(dark='[data-md-color-scheme="slate"]')
    files.append(File.generated(config, PALETTE, content=colours))
    for name in SHARED:
        files.append(File.generated(config, f"explorer/{name}", abs_src_path=str(PAGE / name)))
    return files


ID = re.compile(r'<[a-z][^>]*?\sid="([^"]+)"')
DRAWING = re.compile(r"<(svg|script|style)\b.*?</\1>", re.DOTALL)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Add the scripts and styles to the page that shows the output of `bandpo audit --json` (an event of mkdocs).

    Raises:
        PluginError: if two elements of a page have one id, such as a heading and what a script fills.
    """
    counts = Counter(ID.findall(DRAWING.sub("", output)))
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise PluginError(f"{page.file.src_uri} has two elements with the id {', '.join(twice)}")
    if page.file.src_uri != AUDIT_PAGE:
        return output
    added = '<link rel="stylesheet" href="../explorer/explorer.css">'
    added += "".join(f'<script src="../explorer/{name}"></script>' for name in AUDIT_SCRIPTS)
    return output.replace("</body>", f"{added}</body>", 1)
