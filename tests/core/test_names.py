"""The names that `import bandpo` offers: the table in src/bandpo/__init__.py against what the modules define."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bandpo
from bandpo import divergences, methods, objectives, rules, schedules
from helpers.missing import require
from public_names import SNAPSHOT, public_names

SOURCE = Path(bandpo.__file__)


def checked_imports():
    """Return the module of each name that type checkers see, from the block ``if TYPE_CHECKING``."""
    body = ast.parse(SOURCE.read_text()).body
    block = next(node for node in body if isinstance(node, ast.If))
    return {alias.name: node.module for node in block.body for alias in node.names if node.module != "bandpo"}


@pytest.mark.parametrize("module", [methods, rules, divergences, objectives, schedules])
def test_the_table_has_every_name_that_a_module_defines(module):
    defined = dict.fromkeys(module.__all__, module.__name__)
    missing = [name for name in defined if bandpo._MODULES.get(name) != module.__name__]
    table = "\n".join(f'    "{name}": "{module.__name__}",' for name in missing)
    exports = "\n".join(f'    "{name}",' for name in missing)
    assert not missing, (
        f"{SOURCE.name} lacks {', '.join(missing)}. Add to _MODULES:\n\n{table}\n\n"
        f"to __all__:\n\n{exports}\n\nand under TYPE_CHECKING:\n\n"
        f"    from {module.__name__} import {', '.join(missing)}\n"
    )


def test_the_three_lists_of_names_are_equal():
    modules = bandpo._MODULES
    imports = checked_imports()
    require(
        [name for name in modules if imports.get(name) != modules[name]],
        "src/bandpo/__init__.py",
        lambda name: f"    from {modules[name]} import {name}",
        "the imports under TYPE_CHECKING",
    )
    require(
        [name for name in modules if name not in bandpo.__all__],
        "src/bandpo/__init__.py",
        lambda name: f'    "{name}",',
        "__all__",
    )
    require(
        [name for name in (*bandpo.__all__, *imports) if name not in modules],
        "src/bandpo/__init__.py",
        lambda name: f'    "{name}": "{imports.get(name, "bandpo.MODULE")}",',
        "_MODULES",
    )


def test_every_name_is_the_module_s_own_object():
    for name, module in bandpo._MODULES.items():
        assert getattr(bandpo, name) is getattr(sys.modules[module], name)


def test_every_method_can_be_imported():
    require(
        [name for name in methods.METHODS if name not in methods.__all__],
        "src/bandpo/methods.py",
        lambda name: f'    "{name}",',
        "__all__",
    )
    for name, paper in methods.METHODS.items():
        assert getattr(bandpo, name) is paper.method


def test_submodules_are_attributes():
    folder = SOURCE.parent
    files = {path.stem for path in folder.glob("*.py")}
    packages = {path.parent.name for path in folder.glob("*/*.py")}
    public = {name for name in files | packages if not name.startswith("_")}
    assert {*bandpo._SUBMODULES} == public
    for name in public - {"cli"}:  # its packages are an extra
        assert getattr(bandpo, name).__name__ == f"bandpo.{name}"
    assert {*dir(bandpo)} >= {*bandpo.__all__, *public, "__version__"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'bandpo' has no attribute 'Bnad'"):
        _ = bandpo.Bnad


def test_the_import_alone_loads_no_torch():
    code = (
        "import bandpo, sys; assert 'torch' not in sys.modules; bandpo.CISPO; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_names_are_those_of_the_snapshot():
    snapshot = SNAPSHOT.read_text().splitlines()
    names = public_names()
    added = [f"+ {line}" for line in names if line not in snapshot]
    removed = [f"- {line}" for line in snapshot if line not in names]
    assert names == snapshot, (
        "the public names have changed:\n\n"
        + "\n".join(added + removed)
        + "\n\nIf that is intended, run: python tests/public_names.py\n"
    )
