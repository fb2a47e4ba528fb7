"""Puts on the site the scripts that the explorer shares with `rlvet report`, and those of the page on records."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PAGE = Path(__file__).parents[2] / "packages/rlvet/src/rlvet/report/assets"
SHARED = ("uPlot.js", "uPlot.css", "uPlot-LICENSE", "bounds.js", "chart.js")

AUDIT_PAGE = "audit.md"
"""The page that shows the output of `bandpo audit --json`."""
AUDIT_SCRIPTS = ("chart.js", "audit.js")


def on_files(files: Any, config: Any) -> Any:
    """Add the files that the explorer shares with reports to the site (an event of mkdocs)."""
    for name in SHARED:
        files.append(File.generated(config, f"explorer/{name}", abs_src_path=str(PAGE / name)))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Add the scripts and styles to the page that shows the output of `bandpo audit --json` (an event of mkdocs)."""
    if page.file.src_uri != AUDIT_PAGE:
        return output
    added = '<link rel="stylesheet" href="../explorer/explorer.css">'
    added += "".join(f'<script src="../explorer/{name}"></script>' for name in AUDIT_SCRIPTS)
    return output.replace("</body>", f"{added}</body>", 1)
