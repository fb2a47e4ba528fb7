"""TRL's log-probabilities without logits: the model's head is replaced while a batch is scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from trl import GRPOTrainer

from bandpo.errors import InvalidValue
from bandpo.linear import linear_logp

if TYPE_CHECKING:
    from torch import Tensor

PROBED = 1024
"""Entries of the vocabulary whose logits tell a plain head from another: their weights are copied once."""


class FusedLogits(GRPOTrainer):
    """`GRPOTrainer` whose passes of the policy and of the reference hold no logits, if ``args.fused_logits``."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._plain_heads: WeakSet[torch.nn.Module] = WeakSet()
        super().__init__(*arguments, **named)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if not getattr(self.args, "fused_logits", False):
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **more,
            )
        if images := [name for name, x in more.items() if x is not None]:
            raise InvalidValue(
                f"fused_logits=True is for text, but the batch has {', '.join(images)}; leave it out"
            )
        causal = self.accelerator.unwrap_model(model)
        causal = causal.get_base_model() if hasattr(causal, "get_base_model") else causal
        if causal not in self._plain_heads:
            _refuse_unless_plain(model, causal, input_ids[:1, :2])
            self._plain_heads.add(causal)
        head, softcap = causal.get_output_embeddings(), _softcap(causal)
        options = {"output_router_logits": True} if compute_aux_loss else {}
        scores: list[Tensor] = []
        losses: list[Tensor] = []
        size = batch_size or len(input_ids)
        for tokens, attended in zip(input_ids.split(size), attention_mask.split(size), strict=True):
            ids, counted = tokens[:, -logits_to_keep:], attended[:, -logits_to_keep:].bool()

            def score(hidden: Tensor, ids: Tensor = ids, counted: Tensor = counted) -> Tensor:
                found = linear_logp(
                    hidden[:, -logits_to_keep - 1 : -1][counted],
                    head.weight,
                    ids[counted],
                    bias=head.bias,
                    temperature=self.temperature,
                    logit_softcap=softcap,
                    entropy=compute_entropy,
                )
                asked = found if compute_entropy else [found]
                return torch.stack(
                    [x.new_zeros(counted.shape).masked_scatter(counted, x) for x in asked], dim=-1
                )

            with self.accelerator.autocast(), _scoring(causal, score):
                outputs = model(input_ids=tokens, attention_mask=attended, use_cache=False, **options)
            scores.append(outputs.logits)
            if compute_aux_loss:
                losses.append(outputs.aux_loss)
        logp, *entropy = torch.cat(scores).unbind(-1)
        return logp, entropy[0] if entropy else None, torch.stack(losses).mean() if losses else None


def _softcap(causal: Any) -> float | None:
    return getattr(causal.config.get_text_config(), "final_logit_softcapping", None)


@contextmanager
def _scoring(causal: Any, score: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The model's "logits" are what ``score`` makes of the last hidden states.

    The head is still called as a module, so that what shards a model gathers the head's weight as ever.
    """
    head, config, softcap = causal.get_output_embeddings(), causal.config.get_text_config(), _softcap(causal)
    own = vars(head).get("forward")
    head.forward = score
    if softcap is not None:
        config.final_logit_softcapping = None
    try:
        yield
    finally:
        del head.forward
        if own is not None:
            head.forward = own
        if softcap is not None:
            config.final_logit_softcapping = softcap


def _refuse_unless_plain(model: Any, causal: Any, tokens: Tensor) -> None:
    """Compare some of the model's logits with those of a plain head on the same hidden states."""
    head, softcap = causal.get_output_embeddings(), _softcap(causal)
    name = f"{type(causal).__name__}'s head ({type(head).__name__})"
    if not isinstance(head, torch.nn.Linear):
        raise InvalidValue(f"fused_logits=True needs a plain linear head, but {name} is none; leave it out")
    expected: list[Tensor] = []

    def look(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        bias = None if module.bias is None else module.bias[:PROBED].float()
        logits = torch.nn.functional.linear(arguments[0].float(), module.weight[:PROBED].float(), bias)
        expected.append(logits if softcap is None else softcap * (logits / softcap).tanh())

    hook = head.register_forward_hook(look)
    try:
        with torch.no_grad():
            found = model(input_ids=tokens, use_cache=False).logits[..., :PROBED].float()
    finally:
        hook.remove()
    # Half of the digits that rounding leaves: bfloat16 has 8 binary ones.
    apart = (found - expected[0]).abs().max() / expected[0].abs().max().clamp(min=1e-30)
    if not apart < 2**-4:
        raise InvalidValue(
            f"fused_logits=True needs a plain linear head, but the logits of {name} are others than weight @ hidden, "
            f"by {apart:.1%} of the largest; leave it out"
        )
