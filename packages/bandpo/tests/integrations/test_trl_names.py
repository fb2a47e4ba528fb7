"""A name of TRL that is gone, of those that the integration depends on, stops a run before its first batch."""

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest

from helpers.frameworks import needs

needs("trl", oldest="1.16.0")

import trl
from test_trl import make
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl_async import make_async

from bandpo.core.errors import RunProblem
from bandpo.integrations.trl import (
    AuditedGRPOTrainer,
    BandAsyncGRPOConfig,
    BandAsyncGRPOTrainer,
    BandGRPOConfig,
    BandGRPOTrainer,
    trl_names,
)
from bandpo_lab.training.async_on_cpu import trl_on_a_cpu

BASE = GRPOTrainer.__mro__[1]
TRAINERS = [
    (BandGRPOTrainer, BandGRPOConfig, trl_names.GRPO),
    (AuditedGRPOTrainer, GRPOConfig, trl_names.GRPO),
    (BandAsyncGRPOTrainer, BandAsyncGRPOConfig, trl_names.ASYNC_GRPO),
]
OF_TRL = {
    trl_names.GRPO: (GRPOTrainer, GRPOConfig),
    trl_names.ASYNC_GRPO: (AsyncGRPOTrainer, AsyncGRPOConfig),
}
CASES = [
    pytest.param(cls, config, names, owner, name, id=f"{cls.__name__}-{owner}-{name}")
    for cls, config, names in TRAINERS
    for owner in ("of_class", "of_trainer", "of_config")
    for name in getattr(names, owner)
]


def remove_from_class(cls, name, monkeypatch):
    """Remove a name from a trainer of TRL and its bases, as a version of TRL that renames it does."""
    owners = [base for base in cls.__mro__ if name in vars(base)]
    assert owners
    for base in owners:
        monkeypatch.delattr(base, name)


def remove_from_trainers(cls, name, monkeypatch):
    """Remove an attribute of each trainer, when TRL has constructed it."""
    construct = cls.__init__

    def construct_without(self, *arguments, **named):
        construct(self, *arguments, **named)
        delattr(self, name)

    monkeypatch.setattr(cls, "__init__", construct_without)


@pytest.mark.parametrize(("cls", "config", "names", "owner", "name"), CASES)
def test_a_name_that_is_gone_is_said_at_construction(cls, config, names, owner, name, tmp_path, monkeypatch):
    trainer_of_trl, config_of_trl = OF_TRL[names]
    if owner == "of_class":
        remove_from_class(trainer_of_trl, name, monkeypatch)
    elif owner == "of_trainer":
        remove_from_trainers(trainer_of_trl, name, monkeypatch)
    else:
        monkeypatch.delitem(config_of_trl.__dataclass_fields__, name)
    version = re.escape(trl.__version__)
    sentence = rf"trl {version} has no .*\b{name}\b.*, which in trl 1\.\d+( to 1\.\d+)? \w+ .*; install"
    construct = make_async if names is trl_names.ASYNC_GRPO else functools.partial(make, cls, config)
    with trl_on_a_cpu(), pytest.raises(RunProblem, match=sentence) as caught:
        construct(tmp_path)
    assert "\n" not in str(caught.value)


def attributes(source):
    """Return the names of the attributes of ``self``, ``trainer`` and ``super()`` in a source text."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            is_name = isinstance(owner, ast.Name) and owner.id in ("self", "trainer")
            is_super = isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super"
            if is_name or is_super:
                names.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize("names", OF_TRL, ids=lambda names: names.trainer)
def test_every_attribute_of_trl_that_is_used_is_listed(names):
    """Those that TRL adds to the trainer of Transformers, which is no part of TRL."""
    folder = Path(trl_names.__file__).parent
    is_async = names is trl_names.ASYNC_GRPO
    shared = {folder / "run_audit.py", folder / "method_trainer.py"}
    of_async = set(folder.glob("async_*.py"))
    paths = of_async | shared if is_async else set(folder.glob("*.py")) - of_async
    used = set().union(*(attributes(path.read_text()) for path in paths))
    cls, _ = OF_TRL[names]
    of_trl = set().union(
        *(attributes(Path(inspect.getfile(owner)).read_text(encoding="utf-8")) for owner in (cls, BASE))
    )
    of_transformers = attributes(Path(inspect.getfile(Trainer)).read_text(encoding="utf-8"))
    listed = names.of_class.keys() | names.of_trainer.keys() | names.of_config.keys()
    assert (used & of_trl) - of_transformers - set(dir(TrainerCallback)) - listed == set()


def test_only_public_classes_of_trl_are_imported():
    """So no helper function of TRL can be missing."""
    folder = Path(trl_names.__file__).parent
    imports = {
        name
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl"
        for name in (f"{node.module}.{alias.name}" for alias in node.names)
    }
    of_async = {f"trl.experimental.async_grpo.{name}" for name in ("AsyncGRPOConfig", "AsyncGRPOTrainer")}
    assert imports == {"trl.GRPOConfig", "trl.GRPOTrainer", *of_async}
