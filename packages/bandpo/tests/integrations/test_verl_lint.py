"""What the rules of `rlvet lint` say of verl, against verl's own code."""

from dataclasses import fields
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.frameworks import needs

needs("verl")
import verl
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.tensordict_utils import make_iterator
from verl.workers.config import PolicyLossConfig

from bandpo.integrations.verl import BandPolicyLossConfig
from rlvet.lint.known import FRAMEWORKS


def test_group_of_one_takes_the_reward_as_the_advantage():
    rewards = torch.tensor([[0.0, 3.0], [0.0, -2.0]])
    mask = torch.ones(2, 2)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.array(["a", "b"]))
    torch.testing.assert_close(advantages[:, 0], torch.tensor([3.0, -2.0]))


def test_group_of_two_has_one_advantage_however_little_the_rewards_differ():
    mask = torch.ones(4, 1)
    rewards = torch.tensor([[0.0], [1.0], [0.0], [0.01]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.array(["a", "a", "b", "b"]))
    torch.testing.assert_close(advantages.abs(), torch.full((4, 1), 0.5**0.5), rtol=1e-3, atol=0.0)


def test_rejection_without_threshold_stops():
    log_probs = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="rollout_rs_threshold"):
        compute_rollout_correction_and_rejection_mask(
            old_log_prob=log_probs,
            rollout_log_prob=log_probs,
            response_mask=torch.ones(2, 3),
            rollout_rs="token_k1",
        )


def test_a_batch_that_holds_no_whole_mini_batches_stops():
    data = TensorDict({"x": torch.zeros(100, 1)}, batch_size=100)
    with pytest.raises(AssertionError):
        make_iterator(data, mini_batch_size=64, epochs=1, seed=1, dataloader_kwargs={})


@pytest.mark.parametrize(("scale", "same"), [(None, False), (8, True)])
def test_a_mean_without_scale_depends_on_the_longest_answer_beside(scale, same):
    losses, mask = torch.ones(1, 4), torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    alone = agg_loss(losses[:, :2], mask[:, :2], "seq-mean-token-sum-norm", loss_scale_factor=scale)
    beside = agg_loss(losses, mask, "seq-mean-token-sum-norm", loss_scale_factor=scale)
    assert bool(torch.isclose(alone, beside)) == same


def test_the_default_trainer_neither_chooses_the_loss_of_bypass_nor_corrects_in_it():
    if metadata.version("verl") != FRAMEWORKS["verl"].version:
        pytest.skip("another version of verl is installed")
    folder = Path(verl.__file__).parent / "trainer/ppo"
    assert "apply_bypass_mode(" in (folder / "ray_trainer.py").read_text()
    source = (folder / "v1/trainer_base.py").read_text()
    assert "apply_bypass_mode" not in source
    assert "not bypass_recomputing_logprobs" in source
    # The adapter is turned off for the reference, and without rollout_log_probs nothing is corrected.
    assert '"no_lora_adapter"] = True' in source
    assert '"rollout_log_probs" in data.batch' in source


def test_lint_knows_the_settings_that_the_adapter_adds():
    own = {field.name for field in fields(PolicyLossConfig)}
    added = {field.name for field in fields(BandPolicyLossConfig)} - own
    assert {f"actor_rollout_ref.actor.policy_loss.{name}" for name in added} == FRAMEWORKS["verl"].added
