"""Write the page of the map under four optimizers from its committed rows.

    PYTHONPATH=research python scripts/map_page.py research/results/optimizers research/reports/optimizers/map.md

`studies.tables_map` writes the same report, without the introduction. Its file is committed in parts, one for each
optimizer.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from bandpo_lab.output.style import save_figure
from studies.grid import Grid, GridPlan
from studies.grid_report import draw_grid, grid_text

INTRODUCTION = """# A map of tables under four optimizers

Where does a bound that depends on the probability learn more than a constant bound? Policies are small tables of
logits, trained by `bandpo.policy_loss` with GRPO's advantages. The optimizers are the standard Adam with one second
moment for each logit (`adam`); a matrix with a row for each answer times a trained vector, both under the standard
Adam (`head-and-trunk`); an Adam with one second moment for the whole table (`shared-moment`); and SGD with momentum
(`momentum`). A claim is made only where all of them agree. The conclusions are in
[When does the clip rule matter?](../../../docs/when.md).

![The gain of two arms over the best constant by the share of rare winners' gradient that clip 0.2 blocks](map.png)

"""


@cache
def read_parts(folder: Path) -> Grid:
    """Return the grid whose rows are in the files of a folder, each of which has the grid's header.

    The grid of a folder is read once, since reading it and the intervals that it keeps take half a minute.
    """
    parts = [Grid.from_file(file) for file in sorted(folder.glob("*.jsonl.gz"))]
    cells = {key: cell for part in parts for key, cell in part.cells.items()}
    plan = GridPlan.of_size(parts[0].terms["size"])
    # The order of the plan is that of the tables.
    return Grid(parts[0].terms, {key: cells[key] for key in plan.keys if key in cells})


def main(rows: Path, page: Path) -> None:
    """Write the page and its figure."""
    grid = read_parts(rows)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(INTRODUCTION + grid_text(grid), encoding="utf-8")
    save_figure(draw_grid(grid), page.with_name("map.png"))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
