"""Band, and every other method, as a custom loss of the Tinker SDK.

On the client, with any method, at the cost of one more forward pass per step:

    training_client.forward_backward_custom(data, custom_loss("SAPO(1.0, 1.05)"))

Anchor: the sampler's log-probabilities, which the caller stores in each datum. A whole method such as ``GRPO()`` brings
its own average over the data of the call. A clip rule alone is summed over tokens, as Tinker's built-in losses are;
scale the advantages for a mean.

Written for and tested with tinker 0.38.0, without its service: with the SDK's own client-side evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from bandpo.errors import InvalidValue
from bandpo.integrations import _adapt
from bandpo.integrations._adapt import as_floats, read_method
from bandpo.loss import policy_loss
from bandpo.methods import Method
from bandpo.rules import ClipRule

if TYPE_CHECKING:
    from tinker import Datum
    from torch import Tensor


def custom_loss(
    method: Method | ClipRule | str | None = None,
    *,
    record: str | None = None,
) -> Callable[[list[Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]:
    """A loss for ``TrainingClient.forward_backward_custom``.

    It reads from each datum's ``loss_fn_inputs``, per target token: ``logprobs`` (the sampler's), ``advantages`` and,
    where present, ``mask`` (1 for tokens that count). Its metrics are those of `bandpo.policy_loss`.

    Args:
        method: A method, a clip rule, or the text form of one; ``Band(KL(), 0.05)`` by default.
        record: Folder to which the tokens of every loss are written, see `bandpo.Recorder`.

    Raises:
        ValueError: ``method`` cannot be read; when called, if an input's shape is not that of
            the target tokens.
    """
    chosen = read_method(method=method, whole_batch=True)

    def band(data: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        def padded(name: str) -> Tensor:  # one row a datum, for methods that look at its whole sequence
            pairs = zip(data, logprobs, strict=True)
            return pad_sequence([_input(datum, name, logp) for datum, logp in pairs], batch_first=True)

        tensors = pad_sequence(logprobs, batch_first=True), *map(padded, ("logprobs", "advantages", "mask"))
        if record is not None:
            columns = {"tokens": padded("target_tokens"), "prompts": _prompts(data, tensors[-1])}
            _adapt.record(record, "tinker", chosen, *tensors, old_is_rollout=True, **columns)
        average = chosen.aggregation or "sum"
        # A row is a datum, whose advantages may change from token to token.
        total, metrics = policy_loss(*tensors, method=chosen, aggregation=average, packed=False)
        return total, as_floats(metrics)

    return band


def _prompts(data: list[Datum], mask: Tensor) -> list[Tensor] | None:
    """Return the ids before the first token that counts of each datum; None where inputs are not tokens alone."""
    try:
        ids = [torch.tensor(datum.model_input.to_ints()) for datum in data]
    except (AttributeError, NotImplementedError, ValueError):
        return None
    # A target is the token after its place in the input.
    return [x[: int(counts.int().argmax()) + 1] for x, counts in zip(ids, mask, strict=True)]


def _input(datum: Datum, name: str, logp: Tensor) -> Tensor:
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
