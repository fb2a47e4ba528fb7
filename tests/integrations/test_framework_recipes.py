"""The recipes of docs/frameworks/, executed as they are printed there, on stand-ins for the classes that they extend.

The stand-ins are written from the frameworks' interfaces: PPO's loss with the attributes that each clamps with.
"""

import functools
import sys
from types import SimpleNamespace

import pytest
import torch

import bandpo
from contract import Contract, make_batch
from pages import PAGES, ROOT, blocks
from stand_ins import stand_in

RECIPES = {
    block.title.removesuffix(".py"): block.text
    for page in PAGES
    for block in blocks(page, "python")
    if page.parent.name == "frameworks"
}


def surrogate(logp, old, advantages, mask, low, high):
    """PPO's loss over padded tokens, masked by a product as these frameworks do it."""
    ratio = (logp - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return (loss * mask).sum() / mask.sum()


class OpenRLHFPolicyLoss(torch.nn.Module):
    def __init__(self, clip_eps_low=0.2, clip_eps_high=0.2, policy_loss_type="ppo"):
        super().__init__()
        self.clip_eps_low, self.clip_eps_high = clip_eps_low, clip_eps_high
        self.policy_loss_type = policy_loss_type

    def forward(self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None):
        pair = self.clip_eps_low, self.clip_eps_high
        return surrogate(log_probs, old_log_probs, advantages, action_mask, *pair), 0


class NeMoClippedPGLossFn:
    def __init__(self, cfg, use_fused_linear_logprobs=False):
        self.ratio_clip_min, self.ratio_clip_max = (cfg.get(f"ratio_clip_{x}", 0.2) for x in ("min", "max"))
        self.sequence_level_importance_ratios = cfg.get("sequence_level_importance_ratios", False)
        self.disable_ppo_ratio = False

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        old, mask = data["prev_logprobs"][:, 1:], data["token_mask"][:, 1:]
        advantages = data["advantages"][:, 1:]
        pair = self.ratio_clip_min, self.ratio_clip_max
        return surrogate(next_token_logprobs, old, advantages, mask, *pair), {}


class ROLLActorWorker:
    def __init__(self, low=0.2, high=0.2, importance_sampling="token"):
        settings = {"pg_clip_low": low, "pg_clip_high": high, "importance_sampling": importance_sampling}
        self.pipeline_config = SimpleNamespace(**settings)

    def get_old_log_probs_with_cache(self, data, log_probs):
        return data.batch["old_log_probs"]

    def loss_func(self, data, log_probs, advantages):
        old = self.get_old_log_probs_with_cache(data, log_probs)
        config, mask = self.pipeline_config, data.batch["response_mask"][:, 1:].long()
        return surrogate(log_probs, old, advantages, mask, config.pg_clip_low, config.pg_clip_high)


def areal_grpo_loss_fn(logprobs, entropy, input_data, eps_clip, eps_clip_higher):
    tensors = (input_data[name] for name in ("prox_logp", "advantages", "loss_mask"))
    return surrogate(logprobs, *tensors, eps_clip, eps_clip_higher)


STAND_INS = {
    "openrlhf.models": {"PolicyLoss": OpenRLHFPolicyLoss},
    "openrlhf.trainer.ray.ppo_actor": {"PolicyLoss": OpenRLHFPolicyLoss},
    "nemo_rl.algorithms.loss.loss_functions": {"ClippedPGLossFn": NeMoClippedPGLossFn},
    "roll.pipeline.rlvr.actor_worker": {"ActorWorker": ROLLActorWorker},
}


@pytest.fixture(autouse=True)
def _frameworks(monkeypatch):
    for path, names in STAND_INS.items():
        stand_in(monkeypatch, path, **names)


def recipe(name, monkeypatch=None, clip=None):
    """The names that a recipe defines, with the rule in the environment variable that some of them read."""
    if clip is not None:
        monkeypatch.setenv("BANDPO_METHOD", clip)
    namespace = {"__name__": name}
    exec(compile(RECIPES[name], f"{name}.py", "exec"), namespace)
    return SimpleNamespace(**namespace)


def padded(tensor):
    """With a first column that the framework cuts off."""
    return torch.nn.functional.pad(tensor, (1, 0))


def tokens(batch):
    return batch.advantages[:, None].expand_as(batch.mask)


class OfARule(Contract):
    test_a_method_is_the_cores_or_more_than_bounds = test_a_method_that_is_bounds_is_its_bounds = (
        None  # the page takes a rule
    )

    @pytest.fixture(autouse=True)
    def _monkeypatch_for_methods(self, monkeypatch):
        self.monkeypatch = monkeypatch


class TestOpenRLHF(OfARule):
    def call(self, loss_fn, batch):
        return loss_fn(batch.logp, batch.logp_old, tokens(batch), action_mask=batch.mask)[0]

    def ours(self, batch, clip):
        return self.call(recipe("band_openrlhf", self.monkeypatch, clip).BandPolicyLoss(), batch)

    def stock(self, batch, low, high):
        return self.call(OpenRLHFPolicyLoss(low, high), batch)

    def sequence_level(self, batch):
        self.call(recipe("band_openrlhf").BandPolicyLoss(policy_loss_type="gspo"), batch)

    def test_the_patch_replaces_the_name_that_workers_build_it_by(self):
        recipe("band_openrlhf").patch()
        assert sys.modules["openrlhf.trainer.ray.ppo_actor"].PolicyLoss.__name__ == "BandPolicyLoss"


class TestNeMoRL(OfARule):
    def call(self, loss_fn, batch):
        data = {"prev_logprobs": batch.logp_old, "token_mask": batch.mask, "advantages": tokens(batch)}
        data = {name: padded(tensor) for name, tensor in data.items()}
        return loss_fn(batch.logp, data, None, None)[0]

    def ours(self, batch, clip):
        return self.call(recipe("band_nemo_rl").BandPGLossFn({}, clip), batch)

    def stock(self, batch, low, high):
        return self.call(NeMoClippedPGLossFn({"ratio_clip_min": low, "ratio_clip_max": high}), batch)

    def sequence_level(self, batch):
        recipe("band_nemo_rl").BandPGLossFn({"sequence_level_importance_ratios": True})


class TestROLL(OfARule):
    def call(self, worker, batch):
        data = SimpleNamespace(batch={"old_log_probs": batch.logp_old, "response_mask": padded(batch.mask)})
        return worker.loss_func(data, batch.logp, tokens(batch))

    def ours(self, batch, clip):
        return self.call(recipe("band_roll", self.monkeypatch, clip).BandActorWorker(), batch)

    def stock(self, batch, low, high):
        return self.call(ROLLActorWorker(low, high), batch)

    def sequence_level(self, batch):
        self.call(recipe("band_roll").BandActorWorker(importance_sampling="seq"), batch)


class TestAReaL(OfARule):
    # AReaL has no sequence-level switch in this loss.
    test_sequence_level_ratios_are_refused = None

    def call(self, engine, batch, low=0.2, high=0.2):
        data = {"prox_logp": batch.logp_old, "advantages": tokens(batch), "loss_mask": batch.mask}
        loss_fn = functools.partial(areal_grpo_loss_fn, eps_clip=low, eps_clip_higher=high)
        return engine.train_batch(data, loss_fn=loss_fn)

    def engine(self, batch):
        return SimpleNamespace(train_batch=lambda data, loss_fn: loss_fn(batch.logp, None, data), version=3)

    def ours(self, batch, clip):
        engine = recipe("band_areal").band(self.engine(batch), clip)
        assert engine.version == 3
        return self.call(engine, batch)

    def stock(self, batch, low, high):
        return self.call(self.engine(batch), batch, low, high)


def test_cleanrls_two_lines():
    [block] = blocks(ROOT / "docs/own-loop.md", "diff")
    added, _, old, new = (line[1:].strip() for line in block.text.splitlines())
    batch = make_batch(15)
    ratio = (batch.logp - batch.logp_old).exp()
    names = {"torch": torch, "bandpo": bandpo, "ratio": ratio, "mb_advantages": tokens(batch)}
    names |= {"b_logprobs": batch.logp_old, "mb_inds": slice(None), "args": SimpleNamespace(clip_coef=0.2)}
    exec(f"{added}\n{new}\nours = pg_loss2\n{old}\nstock = pg_loss2", names)
    bounds = bandpo.Band(bandpo.KL(), 0.05).bounds(batch.logp_old)
    torch.testing.assert_close(names["ours"], -tokens(batch) * ratio.clamp(bounds.lower, bounds.upper))
    torch.testing.assert_close(names["stock"], -tokens(batch) * ratio.clamp(0.8, 1.2))
