"""Any method as a custom loss of the Tinker SDK.

The loss is computed on the client, which costs one more forward pass per step:

    training_client.forward_backward_custom(data, custom_loss("SAPO(1.0, 1.05)"))

The old log-probabilities are the sampler's, which the caller stores in each datum. A whole method such as ``GRPO()``
has its own loss aggregation over the data of the call. A clip rule alone is summed over tokens, as Tinker's built-in
losses are; scale the advantages for a mean.

Written for and tested with tinker 0.38.0, with the SDK's client-side evaluation of custom losses and not its service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from bandpo.core.errors import InvalidValue
from bandpo.core.layout import Rows
from bandpo.core.loss import policy_loss
from bandpo.core.methods import Method
from bandpo.core.rules import ClipRule
from bandpo.integrations import _adapt
from bandpo.integrations._adapt import as_floats, read_method

if TYPE_CHECKING:
    from tinker import Datum
    from torch import Tensor


def custom_loss(
    method: Method | ClipRule | str | None = None,
    *,
    record: str | None = None,
) -> Callable[[list[Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]:
    """Return a loss for ``TrainingClient.forward_backward_custom``.

    It reads from each datum's ``loss_fn_inputs``, per target token: ``logprobs`` (the sampler's), ``advantages`` and
    optionally ``mask`` (1 for tokens that count). Its metrics are those of `bandpo.policy_loss`.

    Args:
        method: A method, a clip rule, or the text form of one; ``Band(KL(), 0.05)`` by default.
        record: Folder to which the tokens of every loss are written, see `bandpo.audit.Recorder`.

    Raises:
        ValueError: ``method`` cannot be read; and at a call of the loss, if an input's shape is not that of the target
            tokens.
    """
    chosen_method = read_method(method=method, whole_batch=True)

    def band(data: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        def pad_input(name: str) -> Tensor:
            """Return an input of all data as a tensor of shape (data, time), padded with 0."""
            pairs = zip(data, logprobs, strict=True)
            return pad_sequence([_input(datum, name, logp) for datum, logp in pairs], batch_first=True)

        logp = pad_sequence(logprobs, batch_first=True)
        logp_old = pad_input("logprobs")
        advantages = pad_input("advantages")
        mask = pad_input("mask")
        tensors = (logp, logp_old, advantages, mask)
        if record is not None:
            _adapt.record(
                record,
                "tinker",
                chosen_method,
                *tensors,
                old_is_rollout=True,
                tokens=pad_input("target_tokens"),
                prompts=_prompts(data, mask),
            )
        aggregation = chosen_method.aggregation or "sum"
        # A row is one datum. Its advantages may vary within the row, which is not a packed one.
        loss, metrics = policy_loss(*tensors, method=chosen_method, aggregation=aggregation, layout=Rows())
        return loss, as_floats(metrics)

    return band


def _prompts(data: list[Datum], mask: Tensor) -> list[Tensor] | None:
    """Return the token ids of each datum's prompt; None if a model input contains more than tokens.

    Args:
        data: The data.
        mask: 1 for target tokens that count; shape (data, time). A prompt ends before the first of them.
    """
    try:
        inputs = [torch.tensor(datum.model_input.to_ints()) for datum in data]
    except (AttributeError, NotImplementedError, ValueError):
        return None
    prompts: list[Tensor] = []
    for ids, counted in zip(inputs, mask, strict=True):
        # The target at a position is the next token of the input, so the prompt includes this position.
        first_target = int(counted.int().argmax())
        prompts.append(ids[: first_target + 1])
    return prompts


def _input(datum: Datum, name: str, logp: Tensor) -> Tensor:
    """Return one input of a datum's loss, in float32 and the shape of its log-probabilities; ones without a mask."""
    if name == "mask" and name not in datum.loss_fn_inputs:
        return torch.ones_like(logp)
    if name not in datum.loss_fn_inputs:
        raise InvalidValue(
            f"a datum has no loss_fn_inputs[{name!r}]; it has {', '.join(sorted(datum.loss_fn_inputs))}"
        )
    tensor = datum.loss_fn_inputs[name].to_torch()
    if tensor.shape != logp.shape:
        raise InvalidValue(
            f"loss_fn_inputs[{name!r}] has shape {tuple(tensor.shape)}, the target tokens {tuple(logp.shape)}; "
            "the bounds are per token, so give one value per token"
        )
    return tensor.to(torch.float32)
