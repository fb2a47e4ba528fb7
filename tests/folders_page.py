"""The picture of the folders in MAINTAINING.md, which is made from their imports and from their first lines.

    python tests/folders_page.py

writes it anew.
"""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter

from helpers.layers import ALLOWED, FOLDERS, imports_of, layer_of, module_name
from pages import ROOT

PAGE = ROOT / "MAINTAINING.md"
BEGIN, END = "<!-- folders: begin -->\n", "<!-- folders: end -->\n"

WITHOUT_FOLDER = {
    "bandpo": "the names of the package, from its folders",
    "bandpo.shared": "what all folders but `core` may import: files, the terminal, whether rlvet is installed",
    "rlvet": "`open_run` and `diagnose`, which send a path to the log or to the record",
    "rlvet.shared": "what all folders may import: errors, numbers, severities, the terminal",
    "bandpo_lab": "`compare`, and the version",
    "bandpo_lab.shared": "what all folders may import: errors",
}
"""What is in layers that are files of a package's own folder, or a whole package."""


def arrows() -> dict[str, set[str]]:
    """Return for each layer the layers that its modules import, within functions and for annotations too."""
    found: dict[str, set[str]] = {layer: set() for layer in ALLOWED}
    for package, folder in FOLDERS.items():
        for path in sorted((folder / package).rglob("*.py")):
            if path.name == "__main__.py":
                continue
            layer = layer_of(module_name(path))
            assert layer is not None
            found[layer] |= {other for one in imports_of(path) if (other := layer_of(one.module))} - {layer}
    return found


def levels(found: dict[str, set[str]]) -> dict[str, int]:
    """Return the height of each layer: 0 if it imports no other one, else one more than the highest that it imports.

    Raises:
        CycleError: if layers import each other in a circle.
    """
    heights: dict[str, int] = {}
    for layer in TopologicalSorter(found).static_order():
        heights[layer] = 1 + max((heights[other] for other in found[layer]), default=-1)
    return heights


def contents_of(layer: str) -> str:
    """Return what is in a layer, the first sentence of its folder's docstring."""
    if layer in WITHOUT_FOLDER:
        return WITHOUT_FOLDER[layer]
    folder = FOLDERS[layer.partition(".")[0]].joinpath(*layer.split("."))
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    line = text.partition("\n")[0]
    return line.partition(". ")[0].rstrip(".")


def shown(layer: str) -> str:
    """Return a layer as the page names it: modules beside the folders of a package are no package of their own."""
    package, _, folder = layer.partition(".")
    return f"`{package}/*.py`" if folder == "shared" else f"`{layer}`"


def table() -> str:
    """Return the table of the layers, each below all that it imports."""
    found = arrows()
    heights = levels(found)
    ordered = sorted(found, key=lambda layer: (heights[layer], layer))
    lines = ["| | folder | what is in it | imports |", "|---|---|---|---|"]
    for layer in ordered:
        others = ", ".join(shown(other) for other in ordered if other in found[layer])
        lines.append(f"| {heights[layer]} | {shown(layer)} | {contents_of(layer)} | {others} |")
    return "\n".join([*lines, ""])


def page_with_table() -> str:
    """Return the page with the table as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(), encoding="utf-8")
