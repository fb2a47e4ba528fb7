"""A name of verl that is gone, of those that the integration calls or wraps, is said in one sentence."""

import ast
import os
import re
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from helpers.frameworks import needs

needs("verl")

import verl

from bandpo.core.errors import MissingPackage
from bandpo.integrations.verl import verl_names
from bandpo.integrations.verl.verl_names import CALLED, WRAPPED

FOLDER = Path(verl_names.__file__).parent
LATER = {
    "verl.workers.utils.losses.ppo_loss",
    "verl.utils.tensordict_utils.assign_non_tensor",
    "verl.trainer.ppo.rollout_corr_helper.compute_rollout_correction_and_rejection_mask",
}
"""Names that are imported where they are called: their absence is an error of the probe or of the check of settings."""


def remove(name, monkeypatch):
    path, _, attribute = name.rpartition(".")
    module, _, last = path.rpartition(".")
    owner = getattr(import_module(module), last) if last[0].isupper() else import_module(path)
    monkeypatch.delattr(owner, attribute)


@pytest.mark.filterwarnings("ignore")  # of the imports of verl's trainer
@pytest.mark.parametrize("name", [*CALLED, *WRAPPED])
def test_a_name_that_is_gone_is_said(name, monkeypatch):
    if name.endswith("__init__"):
        return  # which each class has
    remove(name, monkeypatch)
    sentence = rf"^verl {verl.__version__} has no {re.escape(name)}, which in verl 0\.9\.0 and 0\.9\.1 \w+ .*; install"
    look = verl_names.check_names if name in CALLED else partial(verl_names.wrap, name)
    with pytest.raises(MissingPackage, match=sentence) as caught:
        look()
    assert "\n" not in str(caught.value)


def imports():
    """Return the names that the modules of the integration import from verl, without those for types alone."""
    for path in FOLDER.glob("*.py"):
        tree = ast.parse(path.read_text())
        for_types = {
            node
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            is_import = isinstance(node, ast.ImportFrom) and node not in for_types
            if is_import and (node.module or "").split(".")[0] == "verl":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_name_that_is_imported_is_listed():
    modules = {"verl.utils.config": "omega_conf_to_dataclass", "verl.utils.metric": "Metric"}
    names = {f"{name}.{modules[name]}" if name in modules else name for name in imports()}
    assert names - LATER == CALLED.keys()
    assert names >= LATER


def test_what_is_wrapped_is_what_the_table_says():
    """And nothing else: the whole source has one place that replaces a function of verl."""
    from verl.utils import device, metric
    from verl.utils.tracking import Tracking

    wrapped = [device.auto_set_device, metric.reduce_metrics, Tracking.__init__, Tracking.log]
    assert all(function.__globals__["__name__"].startswith("bandpo.") for function in wrapped)
    text = "".join(path.read_text() for path in FOLDER.glob("*.py"))
    assert set(re.findall(r'wrap\("([\w.]+)"\)', text)) == WRAPPED.keys()
    assert text.count("setattr(owner") == 1


BROKEN = """
import sys
sys.modules["bandpo.integrations.stock_methods"] = None
"""
BAND = "actor_rollout_ref.actor.policy_loss._target_=bandpo.integrations.verl.BandPolicyLossConfig"
RENAMED = """
import sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name != "verl.trainer.ppo.core_algos":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec
        spec = find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module.average_loss = module.__dict__.pop("agg_loss")
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (BROKEN, r"ModuleNotFoundError: import of bandpo\.integrations\.stock_methods halted"),
        (RENAMED, r"MissingPackage: verl [\d.]+ has no verl\.trainer\.ppo\.core_algos\.agg_loss, which in"),
    ],
    ids=["an import of bandpo's", "a name of verl's"],
)
@pytest.mark.parametrize("loss", [BAND, "actor_rollout_ref.actor.policy_loss.loss_mode=band"])
def test_a_plug_in_that_cannot_be_imported_is_seen_in_a_start_of_verl(fault, message, loss, tmp_path):
    """verl logs its error at DEBUG, and hydra does not show the cause of a class that it cannot locate."""
    (tmp_path / "sitecustomize.py").write_text(fault)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    words = [loss, "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    if "loss_mode" in loss:
        # Without one of bandpo's classes nothing in verl's driver looks for the loss, so only its import is tried.
        command = [sys.executable, "-c", "import verl"]
    else:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    found = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    lines = [line for line in found.stderr.splitlines() if line.startswith("bandpo: ")]
    assert lines, found.stderr[-2000:]
    assert re.match(rf"bandpo: its plug-in for verl is not loaded: {message}", lines[0])
    assert (found.returncode != 0) == (command[-1] != "import verl")


def test_another_plug_in_of_verl_may_import_the_integration(tmp_path):
    """verl's import loads it, in the middle of the import of `bandpo.integrations.verl`."""
    (tmp_path / "other_plug_in.py").write_text("from bandpo.integrations.verl.probe import is_probing\n")
    environment = {
        **os.environ,
        "VERL_USE_EXTERNAL_MODULES": "other_plug_in",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    program = "import bandpo.integrations.verl, sys; print('other_plug_in' in sys.modules)"
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert run.stdout.splitlines()[-1:] == ["True"], run.stderr
