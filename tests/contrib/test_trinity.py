import math

import pytest
import torch

from contract import Contract, make_batch

pytest.importorskip("trinity", reason="needs trinity-rft")

from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN
from trinity.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn

from bandpo import DualClip, Method, Surrogate, policy_loss
from bandpo.text import as_method
from pages import framework_blocks

PATH = "bandpo_trinity.BandPolicyLossFn"


def call(loss_fn, batch, old=None):
    """As Trinity's verl trainer does: by the names that the loss function itself asked for."""
    tensors = {
        "old_log_probs": batch.logp_old if old is None else old,
        "response_mask": batch.mask,
        "advantages": batch.advantages[:, None].expand_as(batch.logp).where(batch.mask > 0, 0.0),
    }
    return loss_fn(logprob=batch.logp, **{key: tensors[key] for key in loss_fn.select_keys})


class TestTrinity(Contract):
    any_method = True
    own_average = True
    shows_clipped_value = False

    def ours(self, batch, clip):
        return call(POLICY_LOSS_FN.get(PATH)(clip=clip, clip_ratio_c=math.inf), batch)[0]

    def stock(self, batch, low, high):
        return call(PPOPolicyLossFn(clip_range_low=low, clip_range_high=high, clip_ratio_c=1e9), batch)[0]

    def sequence_level(self, batch):
        call(POLICY_LOSS_FN.get(PATH)(), batch, old=batch.logp_old.mean(1, keepdim=True))


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_aggregation_and_dual_clip_are_trinitys(mode):
    batch = make_batch(7, spread=1.0)
    stock = PPOPolicyLossFn(clip_range=0.2, clip_ratio_c=1.5, loss_agg_mode=mode)
    ours = POLICY_LOSS_FN.get(PATH)(clip="FixedClip()", clip_ratio_c=1.5, loss_agg_mode=mode)
    (expected, theirs), (loss, metrics) = call(stock, batch), call(ours, batch)
    torch.testing.assert_close(loss, expected)
    assert theirs["pg_clipfrac_lower"] > 0
    assert metrics["pg_loss"] == pytest.approx(theirs["pg_loss"], rel=1e-5)
    assert metrics["pg_clipfrac"] == pytest.approx(theirs["pg_clipfrac"])


def test_an_average_that_the_user_names_is_his():
    batch = make_batch(9)
    loss = call(POLICY_LOSS_FN.get(PATH)(method="GRPO()", loss_agg_mode="token-mean"), batch)[0]
    tensors = (batch.logp, batch.logp_old, batch.advantages, batch.mask)
    torch.testing.assert_close(loss, policy_loss(*tensors, method="GRPO()", aggregation="token-mean").loss)


def test_the_default_args_build_the_default_loss():
    cls = POLICY_LOSS_FN.get(PATH)
    assert cls(**cls.default_args()).method == cls().method


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": "Bnd()"}, "clip: .*did you mean Band"),
        ({"method": "SAP0()"}, "method: .*did you mean SAPO"),
        ({"method": "SAPO()", "clip": "FixedClip()"}, "method: .*two names of one setting"),
        ({"clip_ratio_c": 0.5}, "clip_ratio_c: DualClip.s max_ratio must be above 1"),
    ],
)
def test_bad_settings_are_refused_when_the_trainer_is_built(settings, message):
    with pytest.raises(ValueError, match=rf"^algorithm\.policy_loss_fn_args\.{message}"):
        POLICY_LOSS_FN.get(PATH)(**settings)


@pytest.mark.parametrize("name", ["clip", "method"])
def test_trinitys_dual_clip_acts_beside_a_rule_alone(name):
    def objective(text):
        return POLICY_LOSS_FN.get(PATH)(**{name: text}).method.objective

    assert objective("FixedClip()") == DualClip(3.0)
    assert objective("DAPO()") == Surrogate()


@pytest.mark.parametrize("block", framework_blocks("Trinity-RFT"))
def test_the_documented_configuration(block):
    yaml = pytest.importorskip("yaml")
    settings, batch = yaml.safe_load(block)["algorithm"], make_batch(17)
    args = settings["policy_loss_fn_args"]
    found = call(POLICY_LOSS_FN.get(settings["policy_loss_fn"])(**args), batch)[0]
    chosen = as_method(args.get("method"), args.get("clip"))
    if chosen.only_rule:
        chosen = Method(chosen.clip, DualClip(3.0))  # Trinity's own
    tensors = batch.logp, batch.logp_old, batch.advantages, batch.mask
    expected = policy_loss(*tensors, method=chosen, aggregation=args.get("loss_agg_mode"))
    TestTrinity().compare(batch, found, expected.loss)
