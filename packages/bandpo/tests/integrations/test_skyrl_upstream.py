"""The patches that docs/upstream/skyrl.md offers to SkyRL apply, and the loss of the example is that of `BandPO`.

With the package skyrl the example imports SkyRL's own registry and corrections, otherwise replacements of them.
"""

import importlib.util
import os
import subprocess
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bandpo import BandPO, policy_loss
from helpers.frameworks import CLONES
from helpers.patch_batches import batch
from pages import ROOT
from stand_ins import stand_in

PAGE = ROOT / "docs/upstream/skyrl.md"
PATCH = PAGE.with_name("skyrl-band-example.patch")
FIX = PAGE.with_name("skyrl-reinforce-example.patch")
EXAMPLE = "examples/train/algorithms/band"
HAS_SKYRL = importlib.util.find_spec("skyrl") is not None


def replace_skyrl(monkeypatch):
    """Put modules in the place of SkyRL's that the example imports, with what its loss calls."""
    registry = {}

    def register(name, function):
        assert name not in registry
        registry[name] = function

    def correct(loss, old_log_probs, rollout_logprobs, loss_mask, settings):
        if rollout_logprobs is None or settings.tis_ratio_type is None:
            return loss, loss_mask, {}
        ratio = torch.exp(old_log_probs - rollout_logprobs)
        return loss * ratio.clamp(max=settings.token_tis_ratio_clip_high), loss_mask, {}

    @dataclass
    class AlgorithmConfig:
        """The settings that the loss reads."""

        policy_loss_type: str = "regular"
        clip_ratio_c: float = 3.0
        off_policy_correction: SimpleNamespace = field(
            default_factory=lambda: SimpleNamespace(tis_ratio_type=None, token_tis_ratio_clip_high=2.0)
        )

    utils = "skyrl.backends.skyrl_train.utils"
    stand_in(monkeypatch, f"{utils}.off_policy_correction_utils", apply_off_policy_correction=correct)
    stand_in(
        monkeypatch,
        f"{utils}.ppo_utils",
        PolicyLossRegistry=SimpleNamespace(register=register, get=registry.__getitem__),
        reduce_loss=lambda loss, mask: loss.sum() if mask is None else (loss * mask).sum(),
    )
    stand_in(
        monkeypatch,
        f"{utils}.torch_utils",
        masked_mean=lambda x, mask: x.mean() if mask is None else (x * mask).sum() / mask.sum().clamp(min=1),
    )
    stand_in(
        monkeypatch,
        "skyrl.train.config",
        AlgorithmConfig=AlgorithmConfig,
        make_config=lambda **classes: classes,
    )
    stand_in(monkeypatch, "skyrl.train.entrypoints.main_base", BasePPOExp=None)
    stand_in(monkeypatch, "skyrl.train.utils", initialize_ray=None, validate_cfg=None)
    stand_in(monkeypatch, "ray", remote=lambda **options: lambda function: function)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The patched example as a module, with a registry that has its loss."""
    folder = tmp_path_factory.mktemp("skyrl")
    subprocess.run(["git", "apply", PATCH], cwd=folder, check=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not HAS_SKYRL:
            replace_skyrl(monkeypatch)
        elif sys.version_info < (3, 12):
            # pydantic refuses typing.TypedDict below 3.12, which SkyRL requires; the rest of it runs on 3.11.
            import typing_extensions

            monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
        if HAS_SKYRL:
            from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

            # The adapter registers a loss with this name, too, and a second one raises an error.
            if "band" in PolicyLossRegistry.list_available():
                PolicyLossRegistry.unregister("band")
        spec = importlib.util.spec_from_file_location("main_band", folder / EXAMPLE / "main_band.py")
        module = importlib.util.module_from_spec(spec)
        # A dataclass looks its module up.
        monkeypatch.setitem(sys.modules, "main_band", module)
        spec.loader.exec_module(module)
        yield module
        if HAS_SKYRL:
            PolicyLossRegistry.unregister("band")


def call(example, tensors, config, rollout=None):
    """Return the loss, its gradient and metrics; called as SkyRL's worker does: three by position, the rest by name."""
    logp, logp_old, advantages, mask = tensors
    leaf = logp.clone().requires_grad_()
    loss_fn = example.PolicyLossRegistry.get("band")
    loss, metrics = loss_fn(
        leaf, logp_old, advantages, config=config, loss_mask=mask, rollout_logprobs=rollout
    )
    return loss, torch.autograd.grad(loss, leaf)[0], metrics


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("corrected", [False, True], ids=["", "corrected"])
def test_its_gradient_is_that_of_the_method(example, seed, corrected):
    tensors = batch(seed)
    logp, logp_old, advantages, mask = tensors
    config = example.BandAlgorithmConfig(policy_loss_type="band", clip_ratio_c=10.0)
    weights, rollout = None, None
    if corrected:
        config.off_policy_correction.tis_ratio_type = "token"
        rollout = logp_old - 0.5 * torch.randn_like(logp_old)
        weights = torch.exp(logp_old - rollout).clamp(max=2.0)
    _, gradient, metrics = call(example, tensors, config, rollout)

    leaf = logp.clone().requires_grad_()
    expected = policy_loss(
        leaf, logp_old, advantages, mask, method=BandPO(), weights=weights, aggregation="sum"
    )
    expected_gradient = torch.autograd.grad(expected.loss, leaf)[0]

    # SkyRL computes the correction in float32.
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5 if corrected else 1e-9, atol=1e-16)
    clip_rate = (expected_gradient == 0)[mask == 1].double().mean().item()
    assert 0.02 < clip_rate < 0.95
    assert metrics["clip_ratio"] == pytest.approx(clip_rate, abs=1e-6)


def test_the_loss_of_tokens_within_the_bounds_is_that_of_the_method(example):
    logp, logp_old, advantages, mask = batch(4)
    inside = BandPO().clip.bounds(logp_old)
    log_ratio = logp - logp_old
    mask = mask * (log_ratio.exp() < inside.upper) * (log_ratio.exp() > inside.lower)
    tensors = (logp, logp_old, advantages, mask)
    loss, _, metrics = call(example, tensors, example.BandAlgorithmConfig(clip_ratio_c=10.0))
    expected = policy_loss(*tensors, method=BandPO(), aggregation="sum").loss
    torch.testing.assert_close(loss, expected)
    assert metrics["clip_ratio"] == metrics["band/clip_high"] == metrics["band/clip_low"] == 0


def test_padding_may_have_any_finite_log_probability(example):
    tensors = batch(5)
    config = example.BandAlgorithmConfig()
    expected, gradient, metrics = call(example, tensors, config)
    logp, logp_old, advantages, mask = tensors
    padded = (logp.where(mask > 0, 0.0), logp_old.where(mask > 0, 0.0), advantages, mask)
    other, other_gradient, other_metrics = call(example, padded, config)
    torch.testing.assert_close(other, expected)
    torch.testing.assert_close(other_gradient, gradient)
    assert other_metrics == metrics


@pytest.mark.parametrize("setting", [{"band_radius": 0.0}, {"band_max_ratio": 1.0}])
def test_settings_out_of_range_are_refused(example, setting):
    with pytest.raises(ValueError, match="need band_radius > 0 and band_max_ratio > 1"):
        example.BandAlgorithmConfig(**setting)


@pytest.mark.skipif(not HAS_SKYRL, reason="needs skyrl")
def test_the_command_line_reaches_the_settings(example):
    arguments = ["trainer.algorithm.policy_loss_type=band", "trainer.algorithm.band_radius=0.1"]
    algorithm = example.BandConfig.from_cli_overrides(arguments).trainer.algorithm
    assert (algorithm.policy_loss_type, algorithm.band_radius, algorithm.band_max_ratio) == (
        "band",
        0.1,
        10.0,
    )


@pytest.mark.skipif(not HAS_SKYRL, reason="needs skyrl")
def test_the_worker_passes_the_parameter_that_the_second_patch_adds():
    # The worker itself imports packages that need a GPU.
    [package] = importlib.util.find_spec("skyrl").submodule_search_locations
    text = (Path(package) / "backends/skyrl_train/workers/worker.py").read_text()
    assert "rollout_logprobs=rollout_action_logprobs" in text
    assert "+    rollout_logprobs: Optional[torch.Tensor] = None," in FIX.read_text()


def test_the_script_sets_the_parameters_of_the_paper(tmp_path):
    subprocess.run(["git", "apply", PATCH], cwd=tmp_path, check=True)
    script = (tmp_path / EXAMPLE / "run_band_gsm8k.sh").read_text()
    subprocess.run(["bash", "-n", tmp_path / EXAMPLE / "run_band_gsm8k.sh"], check=True)
    method = BandPO()
    assert f"BAND_RADIUS={method.clip.divergence.default_radius}\n" in script
    assert f"BAND_MAX_RATIO={method.clip.max_ratio}\n" in script
    assert f"CLIP_RATIO_C={method.objective.max_ratio}\n" in script
    assert method.aggregation == "seq-mean-token-mean"
    assert 'LOSS_REDUCTION="sequence_mean"\n' in script


def test_the_patches_apply_to_a_clone():
    clone = Path(os.environ.get(CLONES, "unset")) / "SkyRL"
    if not clone.is_dir():
        pytest.skip(f"needs a clone called SkyRL in ${CLONES}")
    subprocess.run(["git", "apply", "--check", PATCH, FIX], cwd=clone, check=True)
