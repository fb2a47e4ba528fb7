"""Puts the scripts that the explorer shares with `rlvet report` beside it on the site."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PAGE = Path(__file__).parents[2] / "packages/rlvet/src/rlvet/report/assets"
SHARED = ("uPlot.js", "uPlot.css", "uPlot-LICENSE", "bounds.js", "chart.js")


def on_files(files: Any, config: Any) -> Any:
    """Add the files that the explorer shares with reports to the site (an event of mkdocs)."""
    for name in SHARED:
        files.append(File.generated(config, f"explorer/{name}", abs_src_path=str(PAGE / name)))
    return files
