"""slime and miles need Megatron: the function that the adapter delegates to is stood in for by one with its interface,
written from its documentation: PPO's clamp with ``args.eps_clip`` and ``args.eps_clip_high``. Where slime's CPU-only
``slime.utils.ppo_utils`` is importable, its ``compute_policy_loss`` does the clamping."""

import sys
from argparse import Namespace

import pytest
import torch

from bandpo import Band
from bandpo_slime import miles_policy_loss, policy_loss
from contract import Batch, Contract, dense_loss, make_batch
from stand_ins import stand_in

try:
    from slime.utils.ppo_utils import compute_policy_loss
except ImportError:

    def compute_policy_loss(ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c=None):
        ratio = (-ppo_kl).exp()
        unclipped, clipped = -ratio * advantages, -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
        return torch.maximum(unclipped, clipped), (clipped > unclipped).float()


def log_probs(logits, batch):
    return {"log_probs": list(logits.split([len(ids) for ids in batch["unconcat_tokens"]]))}


def policy_loss_function(args, batch, logits, sum_of_sample_mean, compute=log_probs):
    old = torch.cat(batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"])
    found = compute(logits, batch)
    found = found[1] if isinstance(found, tuple) else found
    loss, clipped = compute_policy_loss(
        old - torch.cat(found["log_probs"]), torch.cat(batch["advantages"]), args.eps_clip, args.eps_clip_high
    )
    return sum_of_sample_mean(loss), {"pg_clipfrac": sum_of_sample_mean(clipped).detach()}


@pytest.fixture(autouse=True)
def _frameworks(monkeypatch):
    """slime's function gives a pair, miles' what is second in it."""
    homes = {"slime.backends.megatron_utils.loss": lambda *given: (None, log_probs(*given))}
    homes |= {"miles.backends.training_utils.loss_hub.losses": log_probs}
    for path, compute in homes.items():
        module = stand_in(monkeypatch, path, get_log_probs_and_entropy=compute)
        module.policy_loss_function = lambda *given, module=module: policy_loss_function(
            *given, compute=module.get_log_probs_and_entropy
        )
        parent, _, name = path.rpartition(".")
        setattr(sys.modules[parent], name, module)


def call(loss_fn, batch, **settings):
    """Samples one after another; ``logits`` are already the log-probabilities that slime would compute from them."""
    defaults = {"use_rollout_logprobs": False, "advantage_estimator": "grpo"}
    defaults |= {"eps_clip": 0.2, "eps_clip_high": 0.28}
    args = Namespace(**defaults | settings)
    mask = batch.mask.flatten()
    micro_batch = {
        "log_probs": list(batch.logp_old),
        "rollout_log_probs": list(batch.logp_old - 0.1),
        "advantages": [a.expand(batch.mask.shape[1]) for a in batch.advantages],
        "loss_masks": list(batch.mask),
        "unconcat_tokens": list(batch.mask.int()),
    }
    result = loss_fn(args, micro_batch, batch.logp.flatten(), lambda x: (x * mask).sum() / mask.sum())
    assert vars(args) == defaults | settings
    return result


class TestSlime(Contract):
    loss = staticmethod(policy_loss)

    def ours(self, batch, clip):
        return call(self.loss, batch, method=clip)[0]

    def stock(self, batch, low, high):
        return call(policy_loss_function, batch, eps_clip=low, eps_clip_high=high)[0]

    def recorded(self, batch, folder):
        return call(self.loss, batch, record=folder)

    def sequence_level(self, batch):
        call(self.loss, batch, advantage_estimator="gspo")


class TestMiles(TestSlime):
    loss = staticmethod(miles_policy_loss)


def test_the_anchor_follows_slimes_own_switch():
    batch = make_batch(12)
    trainer, sampler = (call(policy_loss, batch, use_rollout_logprobs=flag)[1] for flag in (False, True))
    assert trainer["pg_clipfrac"] != sampler["pg_clipfrac"]


def test_without_old_log_probabilities_slime_is_left_alone(monkeypatch):
    seen = []
    module = sys.modules["slime.backends.megatron_utils.loss"]
    monkeypatch.setattr(module, "policy_loss_function", lambda args, *_: seen.append(args) or (0, {}))
    args = Namespace(use_rollout_logprobs=False, advantage_estimator="grpo", eps_clip=0.2)
    policy_loss(args, {"log_probs": None}, None, None)
    assert seen == [args]


def test_part_of_a_sequence_under_context_parallelism():
    batch = make_batch(13)
    half = slice(0, 4)
    args = Namespace(use_rollout_logprobs=False, advantage_estimator="grpo", method="Band(KL(), 0.05)")
    micro_batch = {
        "log_probs": list(batch.logp_old[:, half]),
        "advantages": [a.expand(4) for a in batch.advantages],
        "loss_masks": list(batch.mask),
        "unconcat_tokens": list(batch.mask[:, half]),
    }
    with pytest.raises(ValueError, match="record=here: under context parallelism"):
        policy_loss(
            Namespace(**vars(args), record="here"), micro_batch, batch.logp[:, half].flatten(), torch.sum
        )
    loss, _ = policy_loss(args, micro_batch, batch.logp[:, half].flatten(), torch.sum)
    part = Batch(batch.logp[:, half], batch.logp_old[:, half], batch.advantages, torch.ones(6, 4))
    bounds = Band().bounds(part.logp_old)
    torch.testing.assert_close(loss, dense_loss(part, bounds.lower, bounds.upper, "sum"))
