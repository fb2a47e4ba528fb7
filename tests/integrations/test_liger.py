import pytest
import torch

from contract import Contract, make_batch

pytest.importorskip("liger_kernel", reason="needs the extra bandpo[liger]")

from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

from bandpo.integrations.liger import LOSS_TYPES, BandFusedLinearGRPOLoss
from pages import framework_blocks

SETTINGS = {"beta": 0.0, "use_ref_model": False, "compiled": False, "loss_type": "bnpo"}


def call(loss_fn, batch):
    """A vocabulary of two whose first token has the batch's probability, and an lm_head that is the identity."""
    other = torch.log(-torch.expm1(batch.logp))
    return loss_fn(
        torch.stack([batch.logp, other], dim=-1),
        torch.eye(2),
        torch.zeros(batch.logp.shape, dtype=torch.long),
        batch.mask,
        batch.advantages,
        old_per_token_logps=batch.logp_old,
    )


class TestLiger(Contract):
    tolerance = {"rtol": 1e-3, "atol": 1e-5}  # noqa: RUF012  (the detour over logits costs digits)

    def ours(self, batch, clip):
        return call(BandFusedLinearGRPOLoss(clip, **SETTINGS, chunk_size=2), batch)[0]

    def stock(self, batch, low, high):
        return call(LigerFusedLinearGRPOLoss(epsilon_low=low, epsilon_high=high, **SETTINGS), batch)[0]

    def sequence_level(self, batch):
        BandFusedLinearGRPOLoss(importance_sampling_level="sequence")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_and_its_metric_are_ligers(loss_type):
    batch = make_batch(8)
    settings = SETTINGS | {"loss_type": loss_type, "max_completion_length": 9}
    # CISPO's epsilon_high is the bound itself.
    high = 1.28 if loss_type == "cispo" else 0.28
    stock = LigerFusedLinearGRPOLoss(epsilon_low=0.2, epsilon_high=high, **settings)
    expected, theirs = call(stock, batch)
    loss, metrics = call(BandFusedLinearGRPOLoss("FixedClip(0.2, 0.28)", **settings), batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics, theirs)
    assert theirs[-1] > 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_compiles():
    batch = make_batch(9)
    loss = [call(BandFusedLinearGRPOLoss(**SETTINGS | {"compiled": c}), batch)[0] for c in (False, True)]
    torch.testing.assert_close(*loss)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "sapo"}, "loss_type='sapo' is not one of grpo"),
        ({"epsilon_high": 0.28}, "epsilon_high would have no effect beside clip"),
        ({"clip": "Bnd()"}, "did you mean Band"),
        ({"method": "SAPO()"}, r"^method: 'SAPO\(\)' is SigmoidGate\(.*\) per token, but"),
    ],
)
def test_refuses_what_cannot_work(settings, message):
    with pytest.raises(ValueError, match=message):
        BandFusedLinearGRPOLoss(**settings)


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_the_documented_call():
    batch = make_batch(10)
    other = torch.log(-torch.expm1(batch.logp))
    names = {
        "hidden": torch.stack([batch.logp, other], dim=-1),
        "lm_head": torch.nn.Linear(2, 2, bias=False),
        "ids": torch.zeros(batch.logp.shape, dtype=torch.long),
        "mask": batch.mask,
        "advantages": batch.advantages,
        "logp_old": batch.logp_old,
    }
    exec(framework_blocks("Liger-Kernel")[0], names)
    assert names["loss"].isfinite()
