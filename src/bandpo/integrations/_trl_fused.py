"""TRL's log-probabilities without logits: something else stands in the place of the model's head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear
from trl import GRPOTrainer

from bandpo.errors import InvalidValue
from bandpo.linear import linear_logp

if TYPE_CHECKING:
    from torch import Tensor

PROBED = 1024  # entries of the vocabulary whose logits tell a plain head from another


class FusedLogits(GRPOTrainer):
    """`GRPOTrainer` whose passes of the policy and of the reference hold no logits, if ``args.fused_logits``."""

    args: Any
    _known: frozenset[torch.nn.Module] = frozenset()  # models whose head was found plain

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        score = self._fused if self.args.fused_logits else super()._get_per_token_logps_and_entropies
        return score(*arguments, **named)

    def _fused(
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
        if given := [name for name, x in more.items() if x is not None]:
            raise InvalidValue(f"fused_logits=True is for text, not for {', '.join(given)}; leave it out")
        accelerator: Any = self.accelerator
        causal = accelerator.unwrap_model(model)
        causal = causal.get_base_model() if hasattr(causal, "get_base_model") else causal
        head, config = causal.get_output_embeddings(), causal.config.get_text_config()
        softcap = getattr(config, "final_logit_softcapping", None)
        if causal not in self._known:
            _refuse_unless_plain(model, head, softcap, input_ids[:1, :2])
            self._known |= {causal}
        options = {"output_router_logits": True} if compute_aux_loss else {}
        scores: list[Tensor] = []
        losses: list[Tensor] = []
        for part in torch.arange(len(input_ids)).split(batch_size or len(input_ids)):
            tokens, attended = input_ids[part], attention_mask[part]
            ids, counted = tokens[:, -logits_to_keep:], attended[:, -logits_to_keep:] != 0

            def score(hidden: Tensor, ids: Tensor = ids, counted: Tensor = counted) -> Tensor:
                rows = hidden[:, -logits_to_keep - 1 : -1][counted]
                settings = {"temperature": self.temperature, "logit_softcap": softcap, "bias": head.bias}
                outputs = linear_logp(rows, head.weight, ids[counted], entropy=compute_entropy, **settings)
                columns = torch.stack(outputs if compute_entropy else [outputs], dim=-1)
                return columns.new_zeros(*counted.shape, columns.shape[-1]).index_put((counted,), columns)

            # The head is still called as a module, so that what shards a model gathers the head's weight as ever.
            without_cap = _replaced(config, "final_logit_softcapping", None)
            with accelerator.autocast(), _replaced(head, "forward", score), without_cap:
                outputs = model(input_ids=tokens, attention_mask=attended, use_cache=False, **options)
            scores.append(outputs.logits)
            if compute_aux_loss:
                losses.append(outputs.aux_loss)
        logp, *entropy = torch.cat(scores).unbind(-1)
        return logp, entropy[0] if entropy else None, torch.stack(losses).mean() if losses else None


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    before = dict(vars(owner))
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if name in before:
            setattr(owner, name, before[name])


def _refuse_unless_plain(model: Any, head: Any, softcap: float | None, tokens: Tensor) -> None:
    """Compare some of the model's logits with those of a plain head on the same hidden states."""
    needed = "fused_logits=True needs a plain linear head, but"
    if not isinstance(head, torch.nn.Linear):
        raise InvalidValue(f"{needed} the model's is a {type(head).__name__}; leave it out")
    expected: list[Tensor] = []

    def look(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        bias = None if module.bias is None else module.bias[:PROBED].float()
        logits = linear(arguments[0].float(), module.weight[:PROBED].float(), bias)
        expected.append(logits if softcap is None else softcap * (logits / softcap).tanh())

    with torch.no_grad(), head.register_forward_hook(look):
        logits = model(input_ids=tokens, use_cache=False).logits[..., :PROBED].float()
    apart = ((logits - expected[0]).abs().max() / expected[0].abs().max()).item()
    if not apart < 2**-4:  # bfloat16 has 8 binary digits; half of them are left for its rounding
        raise InvalidValue(
            f"{needed} the model's logits differ from weight @ hidden by {apart:.1%} of the largest; leave it out"
        )
