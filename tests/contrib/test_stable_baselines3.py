from types import SimpleNamespace

import pytest
import torch

from contract import Contract, make_batch

pytest.importorskip("stable_baselines3", reason="needs stable-baselines3")

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from bandpo import FixedClip, policy_loss
from bandpo_stable_baselines3 import BandPPO
from pages import framework_blocks

SMALL = {"n_steps": 64, "batch_size": 32, "n_epochs": 3, "device": "cpu", "seed": 0}
ONE_TERM = {"normalize_advantage": False, "vf_coef": 0.0, "ent_coef": 0.0}


class TestStableBaselines3(Contract):
    def rollout(self, batch):
        counted = batch.mask > 0
        logp = batch.logp[counted]
        zeros = torch.zeros_like(logp)
        fields = {
            "observations": None,
            "actions": zeros,
            "old_values": zeros,
            "returns": zeros,
            "old_log_prob": batch.logp_old[counted],
            "advantages": batch.advantages[:, None].expand_as(batch.logp)[counted],
        }
        return SimpleNamespace(**fields), lambda *_: (zeros, logp, zeros)

    shows_clipped_value = False

    def ours(self, batch, clip):
        model = BandPPO("MlpPolicy", "CartPole-v1", clip=clip, **SMALL, **ONE_TERM)
        minibatch, model.policy.evaluate_actions = self.rollout(batch)
        return model._loss(minibatch)[0]

    # There is no padding in a rollout buffer, and PPO's own loss stands inside `train`: compared whole, below.
    test_padding_may_hold_anything = None
    test_a_method_is_the_cores_or_more_than_bounds = None  # an action is a sequence: below
    test_constant_bounds_are_the_stock_clip = None

    def sequence_level(self, batch):
        model = BandPPO("MlpPolicy", "CartPole-v1", **SMALL, **ONE_TERM)
        minibatch, model.policy.evaluate_actions = self.rollout(batch)
        minibatch.old_log_prob = minibatch.old_log_prob[:1]
        model._loss(minibatch)


@pytest.mark.parametrize(
    "settings", [{}, {"clip_range_vf": 0.1, "ent_coef": 0.01}, {"target_kl": 1e-3}], ids=repr
)
def test_a_constant_clip_trains_to_ppos_own_parameters(settings):
    stock = PPO("MlpPolicy", "CartPole-v1", clip_range=0.005, **SMALL | settings).learn(256)
    ours = BandPPO("MlpPolicy", "CartPole-v1", clip=FixedClip(0.005, 0.005), **SMALL | settings).learn(256)
    for actual, expected in zip(ours.policy.parameters(), stock.policy.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
    assert ours._n_updates == stock._n_updates
    logged, theirs = ours.logger.name_to_value, stock.logger.name_to_value
    lacking = {name for name in theirs if name.startswith("train/")} - set(logged)
    assert lacking <= {"train/clip_range", "train/clip_range_vf"}
    if not settings:
        assert logged["train/clip_high"] > 0


def test_saves_and_loads_with_its_rule(tmp_path):
    BandPPO("MlpPolicy", "CartPole-v1", clip="Band(KL(), 0.02)", **SMALL).save(tmp_path / "model")
    model = BandPPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1"))
    assert model.method.clip.radius == 0.02
    model.learn(64)


def test_continuous_actions_and_clip_range_are_refused():
    with pytest.raises(ValueError, match=r"the actions are Box.* is a density"):
        BandPPO("MlpPolicy", "Pendulum-v1", **SMALL)
    with pytest.raises(ValueError, match=r"clip_range=0.1 has no effect beside clip"):
        BandPPO("MlpPolicy", "CartPole-v1", clip_range=0.1)


@pytest.mark.parametrize("method", ["SAPO()", "GSPO(0.1, 0.2)", "GMPO()"])
def test_a_method_sees_each_action_alone(method):
    """As a sequence of one token; of a minibatch as one sequence all ratios would be one."""
    batch = make_batch(18, spread=1.5)
    model = BandPPO("MlpPolicy", "CartPole-v1", method=method, **SMALL, **ONE_TERM)
    minibatch, model.policy.evaluate_actions = TestStableBaselines3().rollout(batch)
    _, logp, _ = model.policy.evaluate_actions()
    tensors = (x[:, None] for x in (logp, minibatch.old_log_prob, minibatch.advantages))
    expected = policy_loss(*tensors, method=method).loss
    TestStableBaselines3().compare(batch, model._loss(minibatch)[0], expected)


def test_the_documented_call():
    names = {}
    exec(framework_blocks("Stable-Baselines3")[0].replace("100_000", "64"), names)
    assert names["model"].num_timesteps >= 64
