"""The public names of bandpo, as tests/public_names.txt keeps them: ``module: name``, a line each.

    python tests/public_names.py

writes the file anew. Sources are read, not imported, so no framework needs to be installed.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
SNAPSHOT = ROOT / "tests" / "public_names.txt"


def public_names() -> list[str]:
    """Return a line for each name in the ``__all__`` of a public module, sorted."""
    lines: list[str] = []
    for path in (SOURCE / "bandpo").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if any(part.startswith("_") for part in parts):
            continue
        lines += [f"{'.'.join(parts)}: {name}" for name in exported_names(path)]
    return sorted(lines)


def exported_names(path: Path) -> list[str]:
    """Return what ``__all__`` of a file holds: a list, or ``__all__ += module.__all__`` of modules beside it."""
    names: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        else:
            continue
        if [ast.unparse(target) for target in targets] != ["__all__"]:
            continue
        if isinstance(node.value, ast.Attribute):
            module = ast.unparse(node.value.value)
            names += exported_names(path.parent / f"{module}.py")
        else:
            assert node.value is not None
            names += ast.literal_eval(node.value)
    return names


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(public_names()) + "\n", encoding="utf-8")
