"""Band, and every other method, as a custom loss of the Tinker SDK.

On the client, with any method, at the cost of one more forward pass per step:

    training_client.forward_backward_custom(data, custom_loss("SAPO(1.0, 1.05)"))

On the server (Tinker's ``create_custom_loss``, alpha), for `Band`, in one pass:

    loss = service_client.create_custom_loss(traceable_loss("Band(KL(), 0.05)"), INPUT_RANKS).result()
    training_client.forward_backward_custom(data, loss)

Anchor: the sampler's log-probabilities, which the caller stores in each datum. A whole method such as ``GRPO()`` brings
its own average over the data of the call. A clip rule alone is summed over tokens, as Tinker's built-in losses are;
scale the advantages for a mean.

Written for and tested with tinker 0.38.0, without its service: with the SDK's own client-side evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch.nn.utils.rnn import pad_sequence

from bandpo.errors import InvalidValue
from bandpo.integrations._adapt import numbers, read_method, read_rule
from bandpo.loss import policy_loss
from bandpo.methods import Method
from bandpo.rules import Band, ClipRule

if TYPE_CHECKING:
    from jaxtyping import Float
    from tinker import Datum
    from torch import Tensor

INPUT_RANKS = {"logprobs": 1, "old_logprobs": 1, "advantages": 1, "mask": 1}
"""``input_ranks`` of `traceable_loss`, for ``create_custom_loss``."""


def custom_loss(
    method: Method | ClipRule | str | None = None, *, clip: Method | ClipRule | str | None = None
) -> Callable[[list[Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]:
    """A loss for ``TrainingClient.forward_backward_custom``.

    It reads from each datum's ``loss_fn_inputs``, per target token: ``logprobs`` (the sampler's), ``advantages`` and,
    where present, ``mask`` (1 for tokens that count). Its metrics are those of `bandpo.policy_loss`.

    Args:
        method: A method, a clip rule, or the text form of one; ``Band(KL(), 0.05)`` by default.
        clip: Another name of ``method``.

    Raises:
        ValueError: a setting cannot be read, or both names are given; when called, if an input's shape is not that of
            the target tokens.
    """
    chosen = read_method(method=method, clip=clip, whole=True)

    def band(data: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        def padded(name: str) -> Tensor:  # one row a datum, for methods that look at its whole sequence
            pairs = zip(data, logprobs, strict=True)
            return pad_sequence([_input(datum, name, logp) for datum, logp in pairs], batch_first=True)

        total, metrics = policy_loss(
            pad_sequence(logprobs, batch_first=True),
            padded("logprobs"),
            padded("advantages"),
            padded("mask"),
            method=chosen,
            aggregation=chosen.aggregation or "sum",
        )
        return total, numbers(metrics)

    return band


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


class _TypedProxy(torch.fx.Proxy):
    """A traced tensor whose dtype is known, which `Divergence.spent` asks for."""

    dtype = torch.float32


class _TypedTracer(torch.fx.Tracer):
    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        return _TypedProxy(node, self)


def traceable_loss(clip: Band | str = "Band(KL(), 0.05)") -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """A per-datum loss that ``ServiceClient.create_custom_loss`` can trace and send to the server.

    `Band` alone, because whether it clips a token is one elementwise formula without a solver. Each datum needs in its
    ``loss_fn_inputs`` ``old_logprobs`` (the sampler's), ``advantages`` and ``mask``, all float of shape (tokens,).

    Args:
        clip: A `Band`, its radius a number, or its text form.

    Raises:
        ValueError: ``clip`` is another rule.
    """
    rule = read_rule(clip=clip)
    if not isinstance(rule, Band) or not isinstance(radius := rule.radius, int | float):
        raise InvalidValue(
            f"the server-side loss knows Band with a number as its radius alone, got {rule!r}; use custom_loss for "
            "other rules"
        )

    def surrogate(logprobs: Any, old_logprobs: Any, advantages: Any, mask: Any) -> Any:
        counted = mask > 0
        logp_old = torch.where(counted, old_logprobs, 0.0)
        log_ratio = torch.where(counted, logprobs - logp_old, 0.0)
        beyond = rule.divergence.spent(log_ratio, logp_old) > radius
        high = (beyond & (log_ratio > 0)) | (log_ratio > math.log(rule.max_ratio))
        low = beyond & (log_ratio < 0)
        high, low = high & (advantages > 0) & counted, low & (advantages < 0) & counted
        ratio = torch.exp(log_ratio)
        ratio = torch.where(high | low, ratio.detach(), ratio)
        loss = -torch.where(counted, ratio * advantages, 0.0).sum()
        tokens = torch.clamp(counted.sum(), min=1)
        return loss, {
            "custom/clip_high:mean": high.sum() / tokens,
            "custom/clip_low:mean": low.sum() / tokens,
        }

    graph = torch.fx.GraphModule({}, _TypedTracer().trace(surrogate))

    def band(
        logprobs: Float[Tensor, " tokens"],
        old_logprobs: Float[Tensor, " tokens"],
        advantages: Float[Tensor, " tokens"],
        mask: Float[Tensor, " tokens"],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return graph.forward(logprobs, old_logprobs, advantages, mask)

    return band
