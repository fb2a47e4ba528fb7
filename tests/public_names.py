"""The public names of bandpo, as tests/public_names.txt has them: ``module: name``, a line each.

    python tests/public_names.py

writes that file, and the three lists of names in packages/bandpo/src/bandpo/__init__.py: the imports for type checkers, ``_MODULES``
and ``__all__``. Sources are read, not imported, so no framework needs to be installed.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
SNAPSHOT = ROOT / "tests" / "public_names.txt"
ROOT_MODULE = SOURCE / "bandpo" / "__init__.py"
WHOLE_MODULES = ("divergences", "methods", "objectives", "rules", "schedules", "token_rules")
"""Modules of bandpo whose public names can all be imported from the root."""


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


def modules_of_names() -> dict[str, str]:
    """Return the module of each name that the root offers, sorted as in its source.

    Names of `WHOLE_MODULES` come from their ``__all__``; the others are those that ``_MODULES`` has.
    """
    assignments = [node for node in ast.parse(ROOT_MODULE.read_text()).body if isinstance(node, ast.Assign)]
    (table,) = [node.value for node in assignments if ast.unparse(node.targets[0]) == "_MODULES"]
    modules = {
        name: module
        for name, module in ast.literal_eval(table).items()
        if module.removeprefix("bandpo.") not in WHOLE_MODULES
    }
    for module in WHOLE_MODULES:
        path = SOURCE / "bandpo" / f"{module}.py"
        if not path.exists():
            path = SOURCE / "bandpo" / module / "__init__.py"
        modules |= dict.fromkeys(exported_names(path), f"bandpo.{module}")
    return dict(sorted(modules.items(), key=lambda item: (item[1], name_order(item[0]))))


def name_order(name: str) -> tuple[int, str]:
    """Return the key by which ruff sorts names: constants, classes, functions."""
    if name.isupper():
        return 0, name
    return (1, name) if name[0].isupper() else (2, name)


def root_source() -> str:
    """Return the source of packages/bandpo/src/bandpo/__init__.py with its three lists of names as they should be."""
    modules = modules_of_names()
    imports = []
    for module in dict.fromkeys(modules.values()):
        names = [name for name in modules if modules[name] == module]
        if len(names) == 1:
            imports.append(f"    from {module} import {names[0]}")
        else:
            imports += [f"    from {module} import (", *(f"        {name}," for name in names), "    )"]
    table = ["_MODULES = {", *(f'    "{name}": "{module}",' for name, module in modules.items()), "}"]
    exports = ["__all__ = [", *(f'    "{name}",' for name in sorted(modules, key=name_order)), "]"]

    text = ROOT_MODULE.read_text(encoding="utf-8")
    lines = text.splitlines()
    # From the end of the file, so that the numbers of the lines before stay right.
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.If):
            named = [one for one in node.body if isinstance(one, ast.ImportFrom) and one.module != "bandpo"]
            lines[named[0].lineno - 1 : named[-1].end_lineno] = imports
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            lines[node.lineno - 1 : node.end_lineno] = table
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            lines[node.lineno - 1 : node.end_lineno] = exports
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    ROOT_MODULE.write_text(root_source(), encoding="utf-8")
    SNAPSHOT.write_text("\n".join(public_names()) + "\n", encoding="utf-8")
