import pytest
import torch

from contract import Contract

pytest.importorskip("torchrl", reason="needs torchrl")

from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical, Normal
from torchrl.objectives import ClipPPOLoss

from bandpo_torchrl import BandPPOLoss
from pages import framework_blocks

NO_CRITIC = {"critic_network": None, "entropy_bonus": False, "critic_coeff": None}


def actor(distribution=Categorical, keys=("logits",), network=None):
    """A policy without parameters: the observation is its logits."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network or torch.nn.Identity(), in_keys=["observation"], out_keys=list(keys)),
        ProbabilisticTensorDictModule(list(keys), ["action"], distribution_class=distribution),
    )


def call(loss_module, batch):
    """Two actions; the first, always taken, has the batch's probability. Counted tokens only: nothing is padded."""
    counted = batch.mask > 0
    logp = batch.logp[counted]
    data = TensorDict(
        {
            "observation": torch.stack([logp, torch.log(-torch.expm1(logp))], dim=-1),
            "action": torch.zeros(logp.shape, dtype=torch.long),
            "action_log_prob": batch.logp_old[counted],
            "advantage": batch.advantages[:, None].expand_as(batch.logp)[counted][:, None],
        },
        batch_size=logp.shape,
    )
    return loss_module(data)["loss_objective"]


class TestTorchRL(Contract):
    tolerance = {"rtol": 1e-3, "atol": 1e-5}  # noqa: RUF012  (the detour over logits costs digits)
    test_padding_may_hold_anything = None  # TorchRL drops padding before the loss

    def ours(self, batch, clip):
        return call(BandPPOLoss(actor(), clip=clip, **NO_CRITIC), batch)

    def stock(self, batch, low, high):
        return call(ClipPPOLoss(actor(), clip_epsilon=(low, high), **NO_CRITIC), batch)

    def sequence_level(self, batch):
        """One log-probability for two actions, which TorchRL would broadcast."""
        data = TensorDict(
            {
                "observation": torch.zeros(6, 2, 2),
                "action": torch.zeros(6, 2, dtype=torch.long),
                "action_log_prob": torch.full((6, 1), -1.0),
                "advantage": torch.ones(6, 2, 1),
            },
            batch_size=6,
        )
        BandPPOLoss(actor(), **NO_CRITIC)(data)


def test_continuous_actions_are_refused():
    class MeanAndScale(torch.nn.Module):
        def forward(self, observation):
            return observation, torch.ones_like(observation)

    loss_module = BandPPOLoss(actor(Normal, ("loc", "scale"), MeanAndScale()), **NO_CRITIC)
    data = TensorDict(
        {
            "observation": torch.zeros(4, 1),
            "action": torch.zeros(4, 1),
            "action_log_prob": torch.zeros(4, 1),
            "advantage": torch.ones(4, 1),
        },
        batch_size=4,
    )
    with pytest.raises(ValueError, match=r"Normal, .* log-probability of a continuous action is a density"):
        loss_module(data)


def test_a_training_step_moves_the_policy():
    network = torch.nn.Linear(3, 2)
    loss_module = BandPPOLoss(actor(network=network), **NO_CRITIC)
    data = TensorDict({"observation": torch.randn(8, 3), "advantage": torch.ones(8, 1)}, batch_size=8)
    with torch.no_grad():
        data = loss_module.actor_network(data)
    data["action_log_prob"] = torch.full((8,), -0.7)
    out = loss_module(data)
    out["loss_objective"].backward()
    assert {"clip_fraction", "kl_approx", "ESS"} <= set(out.keys())
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in loss_module.parameters())


@pytest.mark.parametrize(
    "settings", [{"clip_epsilon": 0.2}, {"clip_value": True}, {"delay_actor": True}], ids=repr
)
def test_refuses_what_cannot_work(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        BandPPOLoss(actor(), **{**NO_CRITIC, **settings})


def test_the_documented_call():
    critic = TensorDictModule(torch.nn.LazyLinear(1), in_keys=["observation"], out_keys=["state_value"])
    names = {"actor": actor(), "critic": critic}
    exec(framework_blocks("Stable-Baselines3 and TorchRL")[1], names)
    assert isinstance(names["loss_module"], ClipPPOLoss)
