"""The sources of the three packages, for processes that tests start."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = tuple(ROOT / "packages" / name / "src" for name in ("rlvet", "bandpo", "bandpo-lab"))
"""The folders that hold the packages, to be put on the path of imports."""
