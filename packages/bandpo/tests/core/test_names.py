"""The names that `import bandpo` offers, against what the modules of `bandpo.core` define."""

import ast
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import bandpo
from bandpo.core import divergences, methods
from bandpo.core.objectives import Objective
from helpers.missing import require

ROOT_MODULE = "packages/bandpo/src/bandpo/__init__.py"
CORE = Path(bandpo.__file__).parent / "core"
PUBLIC = sorted(
    ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__")
    for path in CORE.rglob("*.py")
    if path != CORE / "__init__.py"
    and (path.stem == "__init__" or not path.stem.startswith("_"))
    # Kernels are behind keywords of public functions, and need Triton.
    and path.parent != CORE / "kernels"
)
"""The modules of `bandpo.core` without a leading underscore, and not those of kernels."""


def order(name):
    """Return the key by which ruff sorts names: constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_the_root_offers_what_a_reader_of_the_readme_needs_sorted():
    # Every method and divergence is offered, and contributors add some. Of the rest there are few.
    contributed = {*methods.METHODS, *divergences.__all__}
    others = [name for name in bandpo.__all__ if name not in contributed]
    assert len(others) <= 25, f"import {others} from their modules, not from the root"
    assert bandpo.__all__ == sorted(set(bandpo.__all__), key=order), f"run `ruff check --fix {ROOT_MODULE}`"


@pytest.mark.parametrize("name", bandpo.__all__)
def test_every_name_of_the_root_is_its_module_s_own_public_object(name):
    value = getattr(bandpo, name)
    module = sys.modules[value.__module__]
    assert module.__name__.startswith(("bandpo.core.", "bandpo.certificate."))
    assert getattr(module, name) is value
    assert name in module.__all__


IMPORTED = {
    alias.name: node.module
    for node in ast.walk(ast.parse(Path(bandpo.__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and node.module.startswith("bandpo.")
    for alias in node.names
}
"""The module of each name that the root imports for type checkers."""


def test_what_the_root_imports_is_in_its_list():
    require(
        [name for name in IMPORTED if name not in bandpo.__all__],
        ROOT_MODULE,
        lambda name: f'    "{name}",',
        "__all__",
    )


@pytest.mark.parametrize("name", bandpo.__all__)
def test_a_type_checker_finds_the_object_that_python_finds(name):
    assert name in IMPORTED, f"import {name} in {ROOT_MODULE}"
    assert getattr(importlib.import_module(IMPORTED[name]), name) is getattr(bandpo, name)


def test_the_root_looks_in_the_modules_that_it_names():
    assert {*bandpo._MODULES} == {*IMPORTED.values()}


def test_names_that_were_not_used_yet_are_listed():
    assert {*bandpo.__all__, "__version__"} <= {*dir(bandpo)}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_list_of_a_module_names_what_the_module_has(module):
    imported = importlib.import_module(f"bandpo.core.{module}")
    assert len({*imported.__all__}) == len(imported.__all__)
    for name in imported.__all__:
        assert hasattr(imported, name)


def is_public(value, module):
    """Return True if a module defines a class or function that users name: a component, a method or its parts."""
    components = (bandpo.Divergence, Objective, bandpo.ClipRule)
    return inspect.isclass(value) and issubclass(value, components) and value.__module__ == module.__name__


COMPONENTS = [
    (module, name)
    for module in PUBLIC
    for imported in [importlib.import_module(f"bandpo.core.{module}")]
    for name, value in vars(imported).items()
    if is_public(value, imported) and not name.startswith("_")
]


@pytest.mark.parametrize(("module", "name"), COMPONENTS)
def test_each_component_is_in_the_list_of_its_module(module, name):
    require(
        [name] if name not in importlib.import_module(f"bandpo.core.{module}").__all__ else [],
        f"packages/bandpo/src/bandpo/core/{module.replace('.', '/')}.py",
        lambda name: f'    "{name}",',
        "__all__",
    )


DIVERGENCES = [name for module, name in COMPONENTS if module.startswith("divergences.")]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_divergence_can_be_imported(name):
    require(
        [name] if name not in bandpo.__all__ else [],
        ROOT_MODULE,
        lambda name: f'        {name},\n\nand\n\n    "{name}",',
        "the import from bandpo.core.divergences, and to __all__",
    )


FUNCTIONS = [
    name
    for name, function in inspect.getmembers(methods, inspect.isfunction)
    if not name.startswith("_")
    and function.__module__ == methods.__name__
    and inspect.signature(function).return_annotation == "Method"
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_that_makes_a_method_is_published(name):
    require(
        [name] if name not in methods.METHODS else [],
        "packages/bandpo/src/bandpo/core/methods.py",
        lambda name: f'@_published("ARXIV NUMBER")\ndef {name}(',
        "the function, as its decorator",
    )


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_can_be_imported(name):
    require(
        [name] if name not in methods.__all__ else [],
        "packages/bandpo/src/bandpo/core/methods.py",
        lambda name: f'    "{name}",',
        "__all__",
    )
    require(
        [name] if name not in bandpo.__all__ else [],
        ROOT_MODULE,
        lambda name: f'        {name},\n\nand\n\n    "{name}",',
        "the import from bandpo.core.methods, and to __all__",
    )
    assert getattr(bandpo, name) is methods.METHODS[name].method


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'bandpo' has no attribute 'Bnad'"):
        _ = bandpo.Bnad


def loaded_by(code):
    """Return the modules that a process loads for some code."""
    script = f"import sys; before = {{*sys.modules}}; {code}; print(*sys.modules.keys() - before)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {*run.stdout.split()}


def ours(modules):
    """Return the modules of the three packages."""
    return {name for name in modules if name.split(".")[0] in ("bandpo", "bandpo_lab", "rlvet")}


def test_the_import_loads_nothing_but_the_standard_library():
    loaded = loaded_by("import bandpo")
    assert ours(loaded) == {"bandpo", "bandpo._current_folder"}
    assert {name.split(".")[0] for name in loaded - ours(loaded)} <= {*sys.stdlib_module_names}


@pytest.mark.slow  # a process imports torch
def test_all_names_load_torch_the_core_and_the_certificate_alone():
    """Torch loads numpy, if it is installed."""
    loaded = loaded_by("import torch; before = {*sys.modules}; from bandpo import *")
    assert {"bandpo.core.loss", "bandpo.certificate.plain"} <= ours(loaded)
    assert "bandpo.core.kernels" not in loaded
    others = {name for name in ours(loaded) if name.split(".")[1:2] not in (["core"], ["certificate"])}
    assert others == {"bandpo", "bandpo._current_folder"}
    assert {name.split(".")[0] for name in loaded - ours(loaded)} <= {*sys.stdlib_module_names}


@pytest.mark.slow  # a process imports torch
def test_the_first_name_loads_what_it_needs():
    assert "bandpo.core.methods" not in loaded_by("from bandpo import KL")


@pytest.mark.slow  # a process imports torch
def test_a_compiled_function_may_use_a_name_first():
    loaded_by(
        "import bandpo, torch; f = torch.compile(lambda x: bandpo.ratio_bounds(x, bandpo.KL(), 0.05).upper, "
        "backend='eager'); f(torch.tensor([-1.0]))"
    )


def test_an_object_is_pickled_by_the_module_that_defines_it():
    assert b"bandpo.core.divergences.kl" in pickle.dumps(bandpo.KL())
    assert pickle.loads(pickle.dumps(bandpo.Band())) == bandpo.Band()  # noqa: S301
