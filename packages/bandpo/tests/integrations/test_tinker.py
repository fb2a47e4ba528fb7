"""Through the SDK's own evaluation of a custom loss, which sends back −∂loss/∂logp as weights; no service."""

from types import SimpleNamespace

import pytest
import torch

from helpers.frameworks import needs

needs("tinker")

from tinker import Datum, ModelInput, TensorData
from tinker.lib.public_interfaces.training_client import TrainingClient
from tinker.types import ForwardBackwardOutput

from bandpo.integrations.tinker import custom_loss
from bandpo.testing import check_record
from contract import Contract, dense_loss, make_batch, written
from pages import framework_blocks


def data_of(batch, old="logprobs"):
    """One datum per sequence, padding included, as a caller with masked (say, tool) tokens sends it.

    The prompt is one token, the same of two sequences.
    """
    targets = torch.arange(batch.mask.numel()).view(batch.mask.shape)
    return [
        Datum(
            model_input=ModelInput.from_ints([row // 2, *targets[row, :-1].tolist()]),
            loss_fn_inputs={
                "target_tokens": TensorData.from_torch(targets[row]),
                old: TensorData.from_torch(logp_old),
                "advantages": TensorData.from_torch(advantage.expand_as(mask).clone()),
                "mask": TensorData.from_torch(mask),
            },
        )
        for row, (logp_old, advantage, mask) in enumerate(
            zip(batch.logp_old, batch.advantages, batch.mask, strict=True)
        )
    ]


class _Evaluated(torch.autograd.Function):
    """What the SDK makes of a loss: its value, and the weights it would send to the server."""

    @staticmethod
    def forward(ctx, logp, data, loss_fn):
        output = ForwardBackwardOutput(
            loss_fn_output_type="",
            loss_fn_outputs=[{"logprobs": TensorData.from_torch(row)} for row in logp.detach()],
            metrics={},
        )
        with torch.enable_grad():
            result = TrainingClient._compute_custom_loss(data, loss_fn, output)
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in result.data]
        ctx.save_for_backward(-torch.stack(weights))
        return torch.tensor(result.loss_sum)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None


class TestClient(Contract):
    any_method = True
    own_average = True
    whole_batch = True
    aggregation = "sum"

    def ours(self, batch, clip):
        return _Evaluated.apply(
            batch.logp.float(), data_of(batch), custom_loss(clip)
        )  # a datum holds float32

    def stock(self, batch, low, high):
        """Tinker's built-in ``ppo`` runs on the service: its documented formula."""
        return dense_loss(batch, torch.tensor(1 - low), torch.tensor(1 + high), "sum")

    def recorded(self, batch, folder):
        return custom_loss(record=folder)(data_of(batch), list(batch.logp))

    def sequence_level(self, batch):
        data = data_of(batch)
        for datum in data:
            datum.loss_fn_inputs["logprobs"] = TensorData(data=[-1.0], dtype="float32", shape=[1])
        custom_loss()(data, list(batch.logp))


def test_a_record_has_ids_and_prompts(tmp_path):
    pytest.importorskip("pyarrow")
    batch = make_batch(27)
    custom_loss("DAPO()", record=str(tmp_path))(data_of(batch), list(batch.logp))
    loss = written(
        batch,
        logp_rollout=batch.logp_old,
        tokens=torch.arange(batch.mask.numel()).view(batch.mask.shape),
        group=torch.arange(len(batch.mask)) // 2,
    )
    check_record(tmp_path, [loss], anchor="rollout")


def test_missing_inputs_are_refused():
    batch = make_batch()
    with pytest.raises(ValueError, match=r"no loss_fn_inputs\['logprobs'\]; it has advantages, mask"):
        custom_loss()(data_of(batch, "old_logprobs"), list(batch.logp))


def test_metrics_are_the_cores():
    batch = make_batch()
    _, metrics = custom_loss()(data_of(batch), list(batch.logp))
    assert set(metrics) >= {"clip_high", "clip_low", "approx_kl"}
    assert all(isinstance(value, float) for value in metrics.values())


def test_the_documented_calls():
    """On the SDK's own evaluation, in the place of a service."""
    batch, results = make_batch(11), []

    def evaluate(data, loss_fn):
        results.append(_Evaluated.apply(batch.logp, data, loss_fn))

    client = SimpleNamespace(forward_backward_custom=evaluate)
    exec(framework_blocks("Tinker")[0], {"data": data_of(batch), "training_client": client})
    rule, method = results
    assert method != rule
