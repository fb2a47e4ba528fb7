"""The patch that upstream/verl.md offers to verl applies, and its loss has the gradient of `BandPO`."""

import importlib.metadata
import importlib.util
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from helpers.frameworks import needs

needs("verl")

import verl
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from bandpo import BandPO, policy_loss
from helpers.patch_batches import batch
from pages import ROOT, blocks

PAGE = ROOT / "upstream/verl.md"
PATCH = PAGE.with_name("verl-band-loss.patch")
FILES = (
    "verl/trainer/ppo/core_algos.py",
    "verl/workers/config/actor.py",
    "verl/trainer/config/actor/actor.yaml",
)

pytestmark = pytest.mark.skipif(
    importlib.metadata.version("verl") != "0.9.1", reason="the patch is of verl 0.9.1"
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # verl's, on importing its trainers
def test_the_program_of_the_page_of_faults_shows_the_first_one():
    [block] = blocks(PAGE.with_name("verl-faults.md"), "python")
    with pytest.raises(TypeError, match=r"_log\(\) got an unexpected keyword argument 'flush'"):
        exec(block.text, {})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_one_step_off_trainer_has_no_executor_that_writes_responses():
    from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer

    assert "_dump_executor" in inspect.getsource(OneStepOffRayTrainer._dump_generations)
    asynchronous = FullyAsyncTrainer.__ray_metadata__.modified_class
    call = "self._init_dump_executor()"
    constructors = (asynchronous.__init__, OneStepOffRayTrainer.__init__)
    assert [call in inspect.getsource(constructor) for constructor in constructors] == [True, False]
    assert "super().__init__" not in inspect.getsource(OneStepOffRayTrainer.__init__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the patched files of verl."""
    folder = tmp_path_factory.mktemp("verl")
    installed = Path(verl.__file__).parents[1]
    for file in FILES:
        copy = folder / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / file, copy)
    subprocess.run(["git", "apply", PATCH], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def patched(folder):
    """verl's module of losses with the patch."""
    name = "verl.trainer.ppo.core_algos_with_band"
    spec = importlib.util.spec_from_file_location(name, folder / FILES[0])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


class PatchedSettings(ActorConfig):
    """The settings of an actor, whose loss has the two new ones."""

    class policy_loss:
        band_radius = 0.05
        band_max_ratio = 10.0


def settings(average):
    """Return the settings of an actor as a run of the paper has them."""
    config = object.__new__(PatchedSettings)
    for name, value in {"clip_ratio_c": 10.0, "loss_agg_mode": average, "global_batch_info": {}}.items():
        object.__setattr__(config, name, value)
    return config


@pytest.mark.parametrize("average", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_its_gradient_is_that_of_the_method(patched, average, seed, weighted):
    logp, logp_old, advantages, mask = batch(seed)
    generator = torch.Generator().manual_seed(seed)
    weights = 0.5 + torch.rand(mask.shape, generator=generator, dtype=torch.double) if weighted else None

    leaf = logp.clone().requires_grad_()
    loss, metrics = patched.get_policy_loss_fn("band")(
        logp_old, leaf, advantages, mask, average, settings(average), weights
    )
    gradient = torch.autograd.grad(loss, leaf)[0]

    expected_leaf = logp.clone().requires_grad_()
    expected = policy_loss(
        expected_leaf, logp_old, advantages, mask, method=BandPO(), weights=weights, aggregation=average
    )
    expected_gradient = torch.autograd.grad(expected.loss, expected_leaf)[0]

    # verl's averages add 1e-8 to what they divide by.
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-8, atol=1e-16)
    clip_rate = (expected_gradient == 0)[mask == 1].double().mean()
    assert 0.02 < clip_rate < 0.95
    assert metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"] == pytest.approx(
        clip_rate.item()
    )


def test_other_losses_are_as_they_were(patched):
    for name in core_algos.POLICY_LOSS_REGISTRY:
        if core_algos.POLICY_LOSS_REGISTRY[name].__module__ == core_algos.__name__:
            assert inspect.getsource(patched.POLICY_LOSS_REGISTRY[name]) == inspect.getsource(
                core_algos.POLICY_LOSS_REGISTRY[name]
            )


def test_its_settings_are_in_the_configuration(folder):
    defaults = yaml.safe_load((folder / FILES[2]).read_text())["policy_loss"]
    assert (defaults["band_radius"], defaults["band_max_ratio"]) == (0.05, 10.0)
    text = (folder / FILES[1]).read_text()
    assert "band_radius: float = 0.05" in text
    assert "band_max_ratio: float = 10.0" in text
