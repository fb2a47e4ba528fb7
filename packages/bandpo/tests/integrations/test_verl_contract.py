"""A method keeps its meaning under verl's other settings, or is refused; and its gradient is that of the core."""

import pytest
import torch

from helpers.frameworks import needs

needs("verl")

from integrations.test_verl import AGGREGATIONS, actor_config, batch, begin, evaluate, whole_config
from verl.workers.config import PolicyLossConfig

from bandpo.certificate.gradient import PolicyTerm, slope
from bandpo.certificate.subject import compare
from bandpo.core.batch import Batch
from bandpo.core.errors import BandWarning
from bandpo.core.layout import Rows
from bandpo.core.methods import METHODS
from bandpo.integrations.verl import AuditedPolicyLossConfig, BandPolicyLossConfig
from bandpo.integrations.verl import loss as verl
from bandpo.integrations.verl.audit import SUMS, pop_audit
from bandpo.integrations.verl.average import token_shares
from processes import run_on_processes

WHOLE = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32", "trainer.n_gpus_per_node=8"]
WHOLE += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8"]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_can_act(name):
    """A mini-batch of 256 sequences on 8 GPUs."""
    method = METHODS[name].method()
    if method.old_policy == "trainer":
        config = whole_config(f"+actor_rollout_ref.actor.policy_loss.method='{name}()'", *WHOLE)
        begin(config)


def test_a_part_of_a_mini_batch_is_refused_where_the_driver_could_not_know():
    info = {"dp_size": 2, "batch_num_tokens": 60, "global_batch_size": 24}
    config = actor_config(BandPolicyLossConfig(method="BAPO()"), global_batch_info=info)
    with pytest.raises(ValueError, match="has sums over a whole mini-batch"):
        evaluate(config, batch(1))


TWO = """
import sys, torch, torch.distributed as dist
from integrations.test_verl import BandPolicyLossConfig, actor_config, batch, evaluate
dist.init_process_group("gloo")
whole = batch(9, spread=1.2)
mine = {name: x[dist.get_rank()::2] for name, x in whole.items()}
info = {"dp_size": 2, "batch_num_tokens": int(whole["response_mask"].sum()), "global_batch_size": 6}
gradients = {}
for method in METHODS:
    config = actor_config(BandPolicyLossConfig(method=method), global_batch_info=info)
    gradients[method] = evaluate(config, mine)[1]
torch.save(gradients, f"{sys.argv[1]}/{dist.get_rank()}.pt")
"""
WHOLE_BATCH = ["BAPO()", "M2PO(0.01)", "KLCov(share=0.1)", "ClipCov(share=0.1, min_covariance=0.01)"]


def test_a_method_of_a_whole_batch_includes_all_processes(tmp_path):
    script = TWO.replace("METHODS", repr(WHOLE_BATCH))
    run_on_processes(script, tmp_path, preload=("verl.workers.config", "bandpo.integrations.verl"))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for method in WHOLE_BATCH:
        _, expected, _ = evaluate(actor_config(BandPolicyLossConfig(method=method)), batch(9, spread=1.2))
        for rank in (0, 1):  # verl takes the mean over ranks
            torch.testing.assert_close(ranks[rank][method] / 2, expected[rank::2])


INFO = {"dp_size": 2, "batch_num_tokens": 100, "global_batch_size": 32, "loss_scale_factor": 7}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("info", [{"loss_scale_factor": 7}, INFO], ids=["own", "global"])
@pytest.mark.parametrize("method", ["BandPO()", "FixedClip()", "VESPO()", "BAPO()"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_of_the_loss_is_the_methods(dtype, method, info, mode):
    """In each type of floating-point numbers, with verl's KL term beside it."""
    tensors = {
        name: x if name == "response_mask" else x.to(dtype) for name, x in batch(4, (16, 9), 1.2).items()
    }
    policy_loss = BandPolicyLossConfig(method=method, average="framework")
    config = actor_config(policy_loss, global_batch_info=info, use_kl_loss=True)
    gradient = evaluate(config, tensors, mode)[1]
    read = Batch.read(
        *(tensors[name] for name in ("log_prob", "old_log_prob", "advantages", "response_mask")),
        layout=Rows(),
        weights=tensors["rollout_is_weights"],
    )
    share = token_shares(read.mask, mode, info)
    assert (
        compare(PolicyTerm(gradient, verl.loss_method(config), read, share)).equal or dtype == torch.bfloat16
    )
    expected = slope(verl.loss_method(config), read) * share
    torch.testing.assert_close(
        gradient, expected.to(dtype), **({"rtol": 0.02, "atol": 1e-4} if dtype == torch.bfloat16 else {})
    )


NORM = "seq-mean-token-sum-norm"


def split(tensors, rows):
    """Micro-batches of so many rows, each cut to its longest response, as verl pads them."""
    for start in range(0, len(tensors["log_prob"]), rows):
        part = {name: x[start : start + rows] for name, x in tensors.items()}
        longest = int(part["response_mask"].sum(-1).max())
        yield start, {name: x[:, :longest] for name, x in part.items()}


@pytest.mark.parametrize("length", [None, 9])
def test_an_average_by_a_length_is_the_same_however_a_mini_batch_is_split(length):
    tensors = batch(4, (16, 9), 1.2)
    info = {"dp_size": 1, "global_batch_size": 16, "loss_scale_factor": length}
    config = actor_config(
        BandPolicyLossConfig(method="FixedClip()"), global_batch_info=info, loss_agg_mode=NORM
    )
    if length is None:
        with pytest.raises(ValueError, match="loss_scale_factor"):
            evaluate(config, tensors, NORM)
        return
    gradients = []
    for rows in (16, 4, 1):
        gradient = torch.zeros_like(tensors["log_prob"])
        for start, part in split(tensors, rows):
            found = evaluate(config, part, NORM)[1]
            gradient[start : start + rows, : found.shape[1]] = found
        gradients.append(gradient)
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


WRONG = {
    "old_log_prob": (0.25, float("-inf"), float("nan")),
    "log_prob": (0.25, float("-inf"), float("nan")),
    "advantages": (float("nan"), float("inf")),
    "rollout_is_weights": (-1.0, float("nan")),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
@pytest.mark.parametrize("readable", [True, False], ids=["CPU", "accelerator"])
def test_a_wrong_token_is_named_before_anything_blames_the_loss(name, value, readable, monkeypatch):
    if not readable:  # as of tensors on an accelerator, whose values the core does not read
        monkeypatch.setattr("bandpo.core._checks.values_can_be_read", lambda x: False)
    tensors = batch(4, (16, 9), 1.2)
    tensors[name] = tensors[name].clone()
    tensors[name][3, 0] = value
    message = rf"^{name}\[3, 0\] is {value:g}, which is no"
    with pytest.raises(ValueError, match=f"{message}.*certify=warn"):
        evaluate(actor_config(BandPolicyLossConfig(method="BandPO()")), tensors)
    for certify in ("warn", "off"):
        config = actor_config(BandPolicyLossConfig(method="BandPO()", certify=certify))
        with pytest.warns(BandWarning, match=message):
            loss, gradient, metrics = evaluate(config, tensors)
        assert loss.isnan()
        assert gradient.isnan().any()  # verl leaves out an update whose norm is not finite
        assert metrics[f"{SUMS}poisoned_tokens"] == 1
        assert 0 < metrics["actor/pg_clipfrac"] < 1


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_an_audited_run_of_verls_own_loss_goes_on_with_a_wrong_token(name, value):
    tensors = batch(4, (16, 9), 1.2)
    tensors[name] = tensors[name].clone()
    tensors[name][3, 0] = value
    stock = evaluate(actor_config(PolicyLossConfig()), tensors)
    with pytest.warns(BandWarning, match=rf"^{name}\[3, 0\] is {value:g}"):
        found = evaluate(actor_config(AuditedPolicyLossConfig()), tensors)
    assert torch.equal(found[0].nan_to_num(7.0), stock[0].nan_to_num(7.0))
    assert torch.equal(found[1].nan_to_num(7.0), stock[1].nan_to_num(7.0))
    metrics, _ = pop_audit({key: [x] for key, x in found[2].items() if key.startswith(SUMS)})
    assert metrics["audit/poisoned_tokens"] == 1
    assert metrics["audit/tokens"] == tensors["response_mask"].sum() - 1


def test_one_metric_of_tokens_blocked_below_has_one_meaning():
    for method in ("Method(FixedClip(0.2), DualClip(1.5))", "BandPO(dual_clip=1.5)"):
        metrics = evaluate(actor_config(BandPolicyLossConfig(method=method)), batch(4, (16, 9), 1.2))[2]
        audit, _ = pop_audit({key: [x] for key, x in metrics.items() if key.startswith(SUMS)})
        assert metrics["actor/dual_clip"] > 0.01
        assert metrics["actor/clip_low"] == pytest.approx(audit["audit/clip_low"])
        assert metrics["actor/clip_high"] == pytest.approx(audit["audit/clip_high"])
