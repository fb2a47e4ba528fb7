"""The names that `import bandpo` offers: the table in packages/bandpo/src/bandpo/__init__.py against what the modules define."""

import difflib
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import bandpo
from bandpo.core import methods
from bandpo.core.errors import MissingPackage
from helpers.missing import require
from public_names import ROOT_MODULE, SNAPSHOT, public_names, root_source

SOURCE = Path(bandpo.__file__)


def test_the_lists_of_names_have_every_name_that_a_module_defines():
    written = ROOT_MODULE.read_text().splitlines()
    expected = root_source().splitlines()
    changes = [line for line in difflib.unified_diff(written, expected, lineterm="", n=0) if line[0] in "+-"]
    assert not changes, (
        "the lists of names in packages/bandpo/src/bandpo/__init__.py differ from the modules:\n\n"
        + "\n".join(changes[2:])
        + "\n\nRun: python tests/public_names.py\n"
    )


def test_every_name_is_the_module_s_own_object():
    for name, module in bandpo._MODULES.items():
        try:
            value = getattr(bandpo, name)
        except MissingPackage:
            continue  # Watch needs transformers, which only an extra installs
        assert value is getattr(sys.modules[module], name)


def test_each_function_that_makes_a_method_is_published():
    functions = [
        name
        for name, function in inspect.getmembers(methods, inspect.isfunction)
        if not name.startswith("_")
        and function.__module__ == methods.__name__
        and inspect.signature(function).return_annotation == "Method"
    ]
    require(
        [name for name in functions if name not in methods.METHODS],
        "packages/bandpo/src/bandpo/core/methods.py",
        lambda name: f'@_published("ARXIV NUMBER")\ndef {name}(',
        "the function, as its decorator",
    )


OF_COMPONENTS = ["rules", "token_rules"]
OF_COMPONENTS += [
    f"{package}.{path.stem}"
    for package in ("divergences", "objectives")
    for path in sorted((SOURCE.parent / package).glob("[a-z]*.py"))
]
"""The modules of clip rules, divergences and objectives."""


@pytest.mark.parametrize("module", OF_COMPONENTS)
def test_each_component_is_in_the_list_of_its_module(module):
    imported = importlib.import_module(f"bandpo.{module}")
    names = [
        name
        for name, value in inspect.getmembers(imported, inspect.isclass)
        if issubclass(value, (bandpo.Divergence, bandpo.core.objectives.Objective, bandpo.ClipRule))
        and value.__module__ == imported.__name__
        and not name.startswith("_")
    ]
    require(
        [name for name in names if name not in imported.__all__],
        f"packages/bandpo/src/bandpo/{module.replace('.', '/')}.py",
        lambda name: f'    "{name}",',
        "__all__",
    )


def test_every_method_can_be_imported():
    require(
        [name for name in methods.METHODS if name not in methods.__all__],
        "packages/bandpo/src/bandpo/core/methods.py",
        lambda name: f'    "{name}",',
        "__all__",
    )
    absent = [name for name in methods.METHODS if name not in bandpo.__all__]
    assert not absent, f"bandpo has no {', '.join(absent)}. Run: python tests/public_names.py"
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
