"""Map where clip rules differ, on small tables over a grid of settings.

    PYTHONPATH=research python -m studies.tables_map                  # a few minutes on two idle cores
    PYTHONPATH=research python -m studies.tables_map --size full      # about two hours

The same command resumes. It writes the rows, a report of them and a figure.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from bandpo_lab.files.writing import locked, replacing
from bandpo_lab.output.console import echo
from bandpo_lab.output.style import save_figure
from studies.grid import Grid, GridPlan, run_grid
from studies.grid_report import draw_grid, grid_text


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate the cells that the map's file does not contain, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m studies.tables_map")
    parser.add_argument("--size", choices=("quick", "full"), default="quick", help="the settings and seeds")
    parser.add_argument("--output_dir", type=Path, help="folder for the map; by default runs/map-SIZE")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="simultaneous cells")
    options = parser.parse_args(arguments)
    plan = GridPlan.of_size(options.size)
    folder = options.output_dir or Path("runs") / f"map-{options.size}"
    file = folder / "map.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder), tqdm(total=len(plan.keys), unit="cell") as progress_bar:
            for count, cell in run_grid(plan, file, options.workers):
                progress_bar.update(count - progress_bar.n)
                progress_bar.set_postfix_str(f"{cell.setting}; {cell.optimizer}; {cell.arm}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted; the same command goes on with what is in {file}")
    grid = Grid.from_file(file)
    save_figure(draw_grid(grid), folder / "map.png")
    report = grid_text(grid)
    with replacing(folder / "map.md") as unfinished:
        unfinished.write_text(report, encoding="utf-8")
    echo(report)
    for name in ("map.png", "map.md", "map.jsonl"):
        echo(f"wrote {folder / name}")


if __name__ == "__main__":
    main()
