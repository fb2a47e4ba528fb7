"""The folders of the packages, which of them may import from which, and which do."""

import ast
import functools
from typing import NamedTuple

from pages import ROOT

FOLDERS = {
    name.replace("-", "_"): ROOT / "packages" / name / "src" for name in ("bandpo", "rlvet", "bandpo-lab")
}
"""The folder that contains the source of each package."""
SHARED = {
    "bandpo": {"_adapters", "_atomic", "_current_folder", "_siblings", "_terminal"},
    "rlvet": {
        "errors",
        "plugins",
        "_atomic",
        "_current_folder",
        "_limits",
        "_numbers",
        "_severities",
        "_shown",
        "_terminal",
    },
    "bandpo_lab": {"errors"},
}
"""Modules of a package that all its layers may import, except for `bandpo.core`."""
ALLOWED = {
    "bandpo": {"bandpo.shared", "bandpo.core", "bandpo.certificate"},
    "bandpo.core": set(),
    "bandpo.shared": {"bandpo.core"},
    "bandpo.certificate": {"bandpo.core"},
    "bandpo.audit": {"bandpo", "bandpo.shared", "bandpo.core"},
    "bandpo.testing": {"bandpo.shared", "bandpo.core", "bandpo.certificate", "bandpo.audit"},
    "bandpo.replay": {"bandpo.shared", "bandpo.core", "bandpo.audit", "rlvet"},
    "bandpo.watch": {"bandpo.shared", "bandpo.core", "bandpo.audit", "rlvet"},
    "bandpo.integrations": {"bandpo.shared", "bandpo.core", "bandpo.certificate", "bandpo.audit"},
    "bandpo.cli": {"bandpo", "bandpo.shared", "bandpo.core", "bandpo.audit", "bandpo.integrations"},
    "rlvet": {"rlvet.shared", "rlvet.runs", "rlvet.lint", "rlvet.checks", "rlvet.records"},
    "rlvet.shared": set(),
    "rlvet.runs": {"rlvet.shared"},
    "rlvet.lint": {"rlvet.shared", "rlvet.runs"},
    "rlvet.checks": {"rlvet.shared", "rlvet.runs", "rlvet.lint"},
    "rlvet.records": {"rlvet.shared", "rlvet.runs", "rlvet.checks"},
    "rlvet.compare": {"rlvet", "rlvet.shared", "rlvet.runs", "rlvet.lint", "rlvet.checks", "rlvet.records"},
    "rlvet.report": {"rlvet", "rlvet.shared", "rlvet.runs", "rlvet.checks", "rlvet.records"},
    "rlvet.cli": {
        "rlvet",
        "rlvet.shared",
        "rlvet.runs",
        "rlvet.lint",
        "rlvet.checks",
        "rlvet.records",
        "rlvet.compare",
        "rlvet.report",
    },
    "bandpo_lab": {"rlvet", "bandpo_lab.toy"},
    "bandpo_lab.shared": {"rlvet"},
    "bandpo_lab.files": {"rlvet", "bandpo_lab.shared"},
    "bandpo_lab.tasks": {"bandpo", "bandpo_lab.shared"},
    "bandpo_lab.output": {"rlvet", "bandpo_lab.shared", "bandpo_lab.files"},
    "bandpo_lab.cluster": {"bandpo", "bandpo_lab.shared", "bandpo_lab.output"},
    "bandpo_lab.evals": {"bandpo_lab.shared", "bandpo_lab.files", "bandpo_lab.tasks", "bandpo_lab.output"},
    "bandpo_lab.data": {
        "bandpo_lab.shared",
        "bandpo_lab.files",
        "bandpo_lab.tasks",
        "bandpo_lab.output",
        "bandpo_lab.evals",
    },
    "bandpo_lab.rehearsal": {
        "bandpo",
        "rlvet",
        "bandpo_lab.shared",
        "bandpo_lab.files",
        "bandpo_lab.cluster",
        "bandpo_lab.evals",
    },
    "bandpo_lab.models": {
        "bandpo_lab.shared",
        "bandpo_lab.files",
        "bandpo_lab.tasks",
        "bandpo_lab.output",
        "bandpo_lab.data",
    },
    "bandpo_lab.training": {
        "bandpo",
        "rlvet",
        "bandpo_lab.shared",
        "bandpo_lab.files",
        "bandpo_lab.tasks",
        "bandpo_lab.output",
        "bandpo_lab.evals",
        "bandpo_lab.models",
    },
    "bandpo_lab.study": {
        "bandpo",
        "rlvet",
        "bandpo_lab.shared",
        "bandpo_lab.files",
        "bandpo_lab.output",
        "bandpo_lab.evals",
        "bandpo_lab.training",
    },
    "bandpo_lab.toy": {
        "bandpo",
        "rlvet",
        "bandpo_lab.shared",
        "bandpo_lab.files",
        "bandpo_lab.tasks",
        "bandpo_lab.output",
        "bandpo_lab.evals",
        "bandpo_lab.study",
    },
    "bandpo_lab.cli": {
        "bandpo",
        "rlvet",
        "bandpo_lab",
        "bandpo_lab.shared",
        "bandpo_lab.files",
        "bandpo_lab.tasks",
        "bandpo_lab.output",
        "bandpo_lab.cluster",
        "bandpo_lab.evals",
        "bandpo_lab.data",
        "bandpo_lab.rehearsal",
        "bandpo_lab.models",
        "bandpo_lab.training",
        "bandpo_lab.study",
        "bandpo_lab.toy",
    },
}
"""For each layer, the layers from which its modules may import. A package's name alone stands for its ``__init__``,
or, of another package, for all its layers."""
WITHIN_FUNCTIONS = {
    "bandpo.testing": {"rlvet"},
    "bandpo.integrations": {"bandpo.watch", "rlvet"},
    "bandpo.cli": {"bandpo.replay", "bandpo.watch", "bandpo.testing", "rlvet"},
}
"""Layers that a module may import only within a function or for annotations, as they need rlvet."""


class Import(NamedTuple):
    """An import of a module, or of a name that may be one."""

    module: str
    """The dotted name."""
    kind: str
    """``top``, ``annotations`` or ``function``: where it is."""


def module_name(path):
    """Return the dotted name of a file of one of the packages."""
    folder = next(folder for folder in FOLDERS.values() if path.is_relative_to(folder))
    return ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports_of(path):
    """Return all imports of a file, with relative ones resolved; of ``from a import b`` those of ``a`` and ``a.b``."""
    package = module_name(path).split(".")
    if path.stem != "__init__":
        package.pop()
    found = []

    def visit(node, kind):
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, kind) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            if node.level == 0 or node.module:
                found.append(Import(module, kind))
            found.extend(Import(f"{module}.{alias.name}", kind) for alias in node.names)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kind = "function"
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            kind = "annotations"
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                visit(child, kind)

    visit(ast.parse(path.read_text()), "top")
    return found


def layer_of(module):
    """Return the layer of a module of ours by its dotted name; None for other modules."""
    package, part, *_ = [*module.split("."), ""]
    if package not in FOLDERS:
        return None
    if part in SHARED.get(package, ()):
        return f"{package}.shared"
    layer = f"{package}.{part}"
    return layer if layer in ALLOWED else package


def may_import(layer, other, kind):
    """Return True if a module of a layer may import from another layer."""
    allowed = {layer, *ALLOWED[layer]}
    if kind != "top":
        allowed |= WITHIN_FUNCTIONS.get(layer, set())
    package = other.partition(".")[0]
    is_other_package = package != layer.partition(".")[0]
    return other in allowed or (is_other_package and package in allowed)
