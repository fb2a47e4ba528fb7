"""The patches that upstream/trl.md offers to TRL apply. The first changes no stock trainer, and calls its hook."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.frameworks import needs

needs("trl")

from test_trl import make
from test_trl_gradients import batch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from bandpo import BandPO, parse
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from helpers.frameworks import CLONES
from pages import ROOT
from rlvet.runs.configs import TRL_CLIPS

PAGE = ROOT / "upstream/trl.md"
PATCH = PAGE.with_name("trl-per-token-loss.patch")
PAPER_INDEX = PAGE.with_name("trl-paper-index.patch")

pytestmark = [
    pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning"),
    pytest.mark.skipif(
        not importlib.metadata.version("trl").startswith("1.16."), reason="the patch is of TRL 1.16"
    ),
]


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """TRL's module of the trainer with the patch."""
    folder = tmp_path_factory.mktemp("trl")
    copy = folder / "trl/trainer/grpo_trainer.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(grpo_trainer.__file__, copy)
    subprocess.run(["git", "apply", PATCH], cwd=folder, check=True)
    name = "trl.trainer.grpo_trainer_with_hook"
    spec = importlib.util.spec_from_file_location(name, copy)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(params=TRL_CLIPS)
def trainer(request, tmp_path):
    """Return a trainer with each loss aggregation, whose class the tests replace."""
    trainer = make(
        BandGRPOTrainer,
        BandGRPOConfig,
        tmp_path,
        lambda prompts, trainer: None,
        method="FixedClip(0.2, 0.28)",
        loss_type=request.param,
        max_completion_length=9,
        certify="off",
        watched="off",
        audit_steps=0,
    )
    trainer.beta = 0.05
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def losses_and_gradients(trainer, trainer_class, monkeypatch):
    """Return the losses of a trainer of a class, and their gradients, on a batch of each kind."""
    trainer.__class__ = trainer_class
    trainer.model.train()
    batches = [batch(0), batch(1, weights=True), batch(3, tools=True), batch(5, token_advantages=True)]
    results = []
    for logp, entropy, inputs in batches:
        leaf = logp.clone().requires_grad_()
        passes = (leaf, entropy, None)
        monkeypatch.setattr(
            trainer_class, "_get_per_token_logps_and_entropies", lambda *_, passes=passes, **__: passes
        )
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = "importance_sampling_ratio" in inputs
        loss = trainer._compute_loss(trainer.model, inputs)
        results += [loss.detach(), *torch.autograd.grad(loss, leaf)]
    return results


def test_a_stock_trainer_computes_the_same_bits(patched, trainer, monkeypatch):
    expected = losses_and_gradients(trainer, GRPOTrainer, monkeypatch)
    results = losses_and_gradients(trainer, patched.GRPOTrainer, monkeypatch)
    assert all(map(torch.equal, expected, results))
    assert any(x.any() for x in results)


def test_the_override_of_the_page_is_that_loss_under_each_average(patched, trainer, monkeypatch):
    """The example is TRL's own clip, so TRL's own loss is what it must equal."""
    text = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    names = {"GRPOTrainer": patched.GRPOTrainer, "torch": torch}
    exec(text, names)
    expected = losses_and_gradients(trainer, GRPOTrainer, monkeypatch)
    # Without the override TRL's own loss would be far from it.
    trainer.epsilon_high = 0.0
    results = losses_and_gradients(trainer, names["MyTrainer"], monkeypatch)
    for one, other in zip(expected, results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-16)


def test_the_page_shows_the_patch():
    assert PATCH.read_text() in PAGE.read_text()


def paper_index():
    """Return the text that the second patch adds to TRL's paper index."""
    lines = PAPER_INDEX.read_text().splitlines()
    return "\n".join(line[1:] for line in lines if line.startswith("+") and not line.startswith("+++"))


def test_the_code_of_the_paper_index_trains_with_the_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", paper_index(), re.DOTALL)
    code = code.replace("trainer = BandGRPOTrainer(..., args=training_args)\n", "")
    code = code.replace("BandGRPOConfig(\n", "BandGRPOConfig(\n    use_cpu=True, bf16=False,\n")
    names = {}
    exec(code, names)
    assert names["BandGRPOTrainer"] is BandGRPOTrainer
    assert names["training_args"].num_iterations == 2
    assert parse(names["training_args"].method) == BandPO()


def test_the_numbers_of_the_paper_index_are_the_methods():
    intervals = re.findall(r"\[([\d.]+), ([\d.]+)\] \\\\\) at \\\\\( p = ([\d.]+)", paper_index())
    assert len(intervals) == 2
    for low, high, p in intervals:
        bounds = BandPO().clip.bounds(torch.tensor(float(p), dtype=torch.float64).log())
        assert (f"{bounds.lower:.2f}", f"{bounds.upper:.2f}") == (low, high)


def test_the_paper_index_of_a_clone_takes_the_patch():
    clone = Path(os.environ.get(CLONES, "unset")) / "trl"
    if not clone.is_dir():
        pytest.skip(f"needs a clone called trl in ${CLONES}")
    subprocess.run(["git", "apply", "--check", PAPER_INDEX], cwd=clone, check=True)
