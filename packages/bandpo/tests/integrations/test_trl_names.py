"""A name of TRL that is gone, of those that the integration depends on, stops a run before its first batch."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from helpers.frameworks import needs

needs("trl")

import trl
from test_trl import make
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer

from bandpo.core.errors import RunProblem
from bandpo.integrations.trl import AuditedGRPOTrainer, BandGRPOConfig, BandGRPOTrainer, trl_names

BASE = GRPOTrainer.__mro__[1]
CLASSES = {BandGRPOTrainer: BandGRPOConfig, AuditedGRPOTrainer: GRPOConfig}


def remove_from_class(name, monkeypatch):
    """Remove a name from GRPOTrainer and its bases, as a version of TRL that renames it does."""
    owners = [cls for cls in GRPOTrainer.__mro__ if name in vars(cls)]
    assert owners
    for cls in owners:
        monkeypatch.delattr(cls, name)


def remove_from_trainers(name, monkeypatch):
    """Remove an attribute of each trainer, when TRL has constructed it."""
    construct = GRPOTrainer.__init__

    def construct_without(self, *arguments, **named):
        construct(self, *arguments, **named)
        delattr(self, name)

    monkeypatch.setattr(GRPOTrainer, "__init__", construct_without)


@pytest.mark.parametrize(("cls", "config"), CLASSES.items(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    ("name", "owner"),
    [
        *((name, "class") for name in trl_names.OF_CLASS),
        *((name, "trainer") for name in trl_names.OF_TRAINER),
        *((name, "config") for name in trl_names.OF_CONFIG),
    ],
)
def test_a_name_that_is_gone_is_said_at_construction(name, owner, cls, config, tmp_path, monkeypatch):
    if owner == "class":
        remove_from_class(name, monkeypatch)
    elif owner == "trainer":
        remove_from_trainers(name, monkeypatch)
    else:
        monkeypatch.delitem(GRPOConfig.__dataclass_fields__, name)
    version = re.escape(trl.__version__)
    sentence = rf"trl {version} has no .*\b{name}\b.*, which in trl 1\.\d+ to 1\.\d+ \w+ .*; install"
    with pytest.raises(RunProblem, match=sentence) as caught:
        make(cls, config, tmp_path)
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


def test_every_attribute_of_trl_that_is_used_is_listed():
    """Those that TRL adds to the trainer of Transformers, which is no part of TRL."""
    folder = Path(trl_names.__file__).parent
    used = set().union(*(attributes(path.read_text()) for path in folder.glob("*.py")))
    of_trl = set().union(
        *(attributes(Path(inspect.getfile(cls)).read_text(encoding="utf-8")) for cls in (GRPOTrainer, BASE))
    )
    of_transformers = attributes(Path(inspect.getfile(Trainer)).read_text(encoding="utf-8"))
    unlisted = (used & of_trl) - of_transformers - trl_names.OF_CLASS.keys() - trl_names.OF_TRAINER.keys()
    assert unlisted == set()


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
    assert imports == {"trl.GRPOConfig", "trl.GRPOTrainer"}
