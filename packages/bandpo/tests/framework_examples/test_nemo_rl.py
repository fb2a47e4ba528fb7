"""NeMo-RL's own loss, without its models and its logger. It is not on the package index."""

from types import SimpleNamespace

import pytest
import torch

from bandpo.testing import check_record
from contract import Contract, make_batch, written
from helpers.frameworks import importing, needs
from pages import framework_blocks

needs("nemo_rl", clone="RL")

PARTS = ("utils", "data", "models", "distributed", "algorithms.x_token", "algorithms.logits_sampling_utils")
with importing("transformers", *(f"nemo_rl.{part}" for part in PARTS), framework="nemo_rl"):
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    from bandpo_nemo_rl import BandPGLossFn


def config_of(**settings):
    """NeMo-RL's own settings, without its KL term."""
    return ClippedPGLossConfig(**{"reference_policy_kl_penalty": 0.0} | settings)


def call(loss_fn, batch, prompts=None, rollout=None):
    """Return the loss of tokens, after the first column that NeMo-RL removes: the last token of the prompt."""
    data = {
        "prev_logprobs": batch.logp_old,
        "generation_logprobs": (batch.logp_old if rollout is None else rollout).masked_fill(
            batch.mask == 0, 0.0
        ),
        "token_mask": batch.mask,
        "advantages": batch.advantages[:, None].expand_as(batch.mask),
    }
    data = {name: torch.nn.functional.pad(x, (1, 0)) for name, x in data.items()}
    data["sample_mask"] = torch.ones(len(batch.mask))
    if prompts is not None:
        ids = torch.arange(batch.mask.numel()).view(batch.mask.shape)
        data["input_ids"] = torch.cat([prompts[:, None], ids], 1)
    return loss_fn(batch.logp, data, torch.tensor(len(batch.mask)), batch.mask.sum())[0]


class TestNeMoRL(Contract):
    takes_dual_clip = True

    def ours(self, batch, clip):
        return call(BandPGLossFn(config_of(), clip), batch)

    def stock(self, batch, low, high):
        return call(ClippedPGLossFn(config_of(ratio_clip_min=low, ratio_clip_max=high)), batch)

    def recorded(self, batch, folder):
        return call(BandPGLossFn(config_of(), record=folder), batch)

    def sequence_level(self, batch):
        BandPGLossFn(config_of(sequence_level_importance_ratios=True, token_level_loss=False))


def test_a_record_has_ids_and_prompts(tmp_path):
    pytest.importorskip("pyarrow")
    batch = make_batch(27)
    prompts = torch.arange(len(batch.mask)) // 2
    call(BandPGLossFn(config_of(), record=str(tmp_path)), batch, prompts)
    loss = written(
        batch,
        logp_rollout=batch.logp_old,
        tokens=torch.arange(batch.mask.numel()).view(batch.mask.shape),
        group=prompts,
    )
    check_record(tmp_path, [loss])


def test_its_own_dual_clip_stands_beside_a_rule_alone():
    batch, config = make_batch(21, spread=1.5), config_of(ratio_clip_c=1.5)
    ours = call(BandPGLossFn(config, "FixedClip(0.2)"), batch)
    TestNeMoRL().compare(batch, ours, call(ClippedPGLossFn(config), batch))
    assert ours != TestNeMoRL().ours(batch, "FixedClip(0.2)")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_cispo": True}, "^loss_fn.use_cispo=True: NeMo-RL would compute CISPO's loss"),
        ({"force_on_policy_ratio": True}, "^loss_fn.force_on_policy_ratio=True: every ratio would be 1"),
        ({"disable_ppo_ratio": True}, "^loss_fn.disable_ppo_ratio=True: "),
        ({"ratio_clip_max": 0.28}, "^loss_fn.ratio_clip_max=0.28: it would have no effect"),
        ({"ratio_clip_c": 3.0}, "^loss_fn.ratio_clip_c=3.0: the method and this setting"),
    ],
)
def test_settings_that_make_its_loss_another_one_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BandPGLossFn(config_of(**settings), "DAPO()")


SAMPLERS = "Method(FixedClip(0.2), old_policy='rollout')"


def test_the_ratio_refers_to_the_sampler_where_the_method_says_so():
    batch = make_batch(22, spread=1.0)
    rollout = batch.logp_old - 0.3
    ours = call(BandPGLossFn(config_of(), SAMPLERS), batch, rollout=rollout)
    batch.logp_old = rollout
    TestNeMoRL().compare(batch, ours, call(BandPGLossFn(config_of(), "FixedClip(0.2)"), batch))


def run_of(size=256, asynchronous=False):
    grpo = SimpleNamespace(
        num_prompts_per_step=32,
        num_generations_per_prompt=8,
        async_grpo=SimpleNamespace(enabled=asynchronous),
    )
    policy = SimpleNamespace(train_global_batch_size=size)
    return SimpleNamespace(loss_fn=config_of(), grpo=grpo, policy=policy)


def test_a_run_in_which_every_ratio_is_one_is_refused(capsys):
    with pytest.raises(ValueError, match=r"every ratio is 1 .*: set policy.train_global_batch_size below"):
        BandPGLossFn(config_of(), "DAPO()", config=run_of())
    with pytest.raises(
        ValueError, match=r"every ratio is 1 .*: training is asynchronous, so write the method"
    ):
        BandPGLossFn(config_of(), "DAPO()", config=run_of(asynchronous=True))
    BandPGLossFn(config_of(), SAMPLERS, config=run_of(asynchronous=True))
    assert "anchor      the sampler's log-probabilities" in capsys.readouterr().out
    BandPGLossFn(config_of(), "DAPO()", config=run_of(64, asynchronous=True))
    assert "Training is asynchronous, and older weights sampled" in capsys.readouterr().out
    BandPGLossFn(config_of(), "DAPO()", config=run_of(), accept_idle_clip=True)


def test_the_documented_lines():
    names = {"config": run_of(64)}
    exec(framework_blocks("NeMo-RL")[0], names)
    batch = make_batch(29)
    assert call(names["loss_fn"], batch) == TestNeMoRL().ours(batch, "BandAbove()")
