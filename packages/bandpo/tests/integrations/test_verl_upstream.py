"""What upstream/ tells verl's developers: the settings with which its own loss is BandPO's, and its faults."""

import importlib.metadata
import inspect

import pytest
import torch

from helpers.frameworks import needs

needs("verl")

from test_verl import actor_config, batch, evaluate
from verl.workers.config import PolicyLossConfig

from bandpo import BandPO, policy_loss
from pages import ROOT, blocks

PAGE = ROOT / "upstream/verl.md"
ACTOR = "actor_rollout_ref.actor."

pytestmark = pytest.mark.skipif(
    importlib.metadata.version("verl") != "0.9.1", reason="the page is about verl 0.9.1"
)


def settings_of_the_page() -> dict[str, str]:
    """Return the settings of the text that is offered, without the prefix of the actor."""
    quoted = PAGE.read_text().partition("```text\n")[2].partition("```")[0]
    lines = [line.removeprefix("> ").strip() for line in quoted.splitlines()]
    return dict(line.removeprefix(ACTOR).split("=") for line in lines if line.startswith(ACTOR))


def test_the_settings_of_the_page_have_bandpos_gradient_up_to_the_largest_weight():
    settings = settings_of_the_page()
    loss = PolicyLossConfig(loss_mode=settings.pop("policy_loss.loss_mode"))
    mode = settings.pop("loss_agg_mode")
    config = actor_config(loss, **{name: float(value) for name, value in settings.items()})
    tensors = {**batch(5, (40, 60), spread=1.5), "rollout_is_weights": None}
    theirs = evaluate(config, tensors, mode)[1]

    logp = tensors["log_prob"].clone().requires_grad_()
    ours = policy_loss(
        logp,
        tensors["old_log_prob"],
        tensors["advantages"],
        tensors["response_mask"],
        method=BandPO(),
    ).loss
    (gradient,) = torch.autograd.grad(ours, logp)
    near = logp - tensors["old_log_prob"] <= torch.tensor(config.clip_ratio_c).log()
    torch.testing.assert_close(theirs[near], gradient[near], check_dtype=False, rtol=1e-6, atol=1e-12)
    assert not torch.allclose(theirs, gradient)
    assert 0.05 < (gradient == 0)[tensors["response_mask"]].double().mean() < 0.95


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
