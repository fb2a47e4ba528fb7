"""TRL's log-probabilities without logits: the forward method of the model's LM head is replaced during the pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear
from trl import GRPOTrainer

from bandpo.core.errors import InvalidValue
from bandpo.core.linear import linear_logp

if TYPE_CHECKING:
    from torch import Tensor

TESTED_ENTRIES = 1024
"""The number of vocabulary entries whose logits are compared with those of a plain head."""


class FusedLogits(GRPOTrainer):
    """A `GRPOTrainer` that computes no logits for policy and reference, if ``args.fused_logits`` is set."""

    args: Any
    _probing: bool = False
    """True while a loss gets synthetic log-probabilities."""
    _tested_models: frozenset[torch.nn.Module] = frozenset()
    """The models whose LM head was tested and is a plain linear layer."""

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **kwargs: Any) -> Any:
        if self.args.fused_logits and not self._probing:
            return self._fused_forward(*arguments, **kwargs)
        return super()._get_per_token_logps_and_entropies(*arguments, **kwargs)

    def _fused_forward(
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
        """Compute log-probabilities, entropies and the auxiliary loss, as TRL's function of the same arguments does.

        Args:
            model: The policy or the reference model.
            input_ids: Prompts and completions; shape (sequences, time).
            attention_mask: 1 for tokens, 0 for padding; shape (sequences, time).
            logits_to_keep: The number of completion tokens, at the end of each row.
            batch_size: The number of sequences per forward pass; all of them if not given.
            compute_entropy: True to compute entropies.
            compute_aux_loss: True to compute the auxiliary loss of a mixture of experts.
            more: TRL's arguments for images, which must be None.

        Returns:
            Log-probabilities (nats) and entropies, each of shape (sequences, ``logits_to_keep``), and the auxiliary
            loss. What was not asked for is None.
        """
        unsupported = [name for name, value in more.items() if value is not None]
        if unsupported:
            raise InvalidValue(
                f"fused_logits=True is for text, not for {', '.join(unsupported)}; leave it out"
            )

        accelerator: Any = self.accelerator
        causal_model = accelerator.unwrap_model(model)
        if hasattr(causal_model, "get_base_model"):  # a PEFT model
            causal_model = causal_model.get_base_model()
        head = causal_model.get_output_embeddings()
        config = causal_model.config.get_text_config()
        softcap = getattr(config, "final_logit_softcapping", None)
        if causal_model not in self._tested_models:
            _check_plain_head(model, head, softcap, input_ids[:1, :2])
            self._tested_models |= {causal_model}

        options = {"output_router_logits": True} if compute_aux_loss else {}
        scores: list[Tensor] = []
        aux_losses: list[Tensor] = []
        for rows in torch.arange(len(input_ids)).split(batch_size or len(input_ids)):
            tokens = input_ids[rows]
            attention = attention_mask[rows]
            completions = tokens[:, -logits_to_keep:]
            is_token = attention[:, -logits_to_keep:] != 0

            settings = {"temperature": self.temperature, "logit_softcap": softcap, "entropy": compute_entropy}
            score = partial(_score_completions, head=head, ids=completions, is_token=is_token, **settings)

            # Run the model with another `forward` of its head: it returns log-probabilities and entropies in place of
            # logits, and applies the softcap. The head is still called as a module, so FSDP and DeepSpeed gather its
            # weight as usual.
            without_cap = _replaced(config, "final_logit_softcapping", None)
            with accelerator.autocast(), _replaced(head, "forward", score), without_cap:
                outputs = model(input_ids=tokens, attention_mask=attention, use_cache=False, **options)
            scores.append(outputs.logits)
            if compute_aux_loss:
                aux_losses.append(outputs.aux_loss)

        logp, *entropies = torch.cat(scores).unbind(-1)
        entropy = entropies[0] if entropies else None
        aux_loss = torch.stack(aux_losses).mean() if aux_losses else None
        return logp, entropy, aux_loss


def _score_completions(
    hidden: Tensor, *, head: Any, ids: Tensor, is_token: Tensor, entropy: bool, **settings: Any
) -> Tensor:
    """Compute log-probabilities and entropies of completion tokens; the replacement of the LM head's forward method.

    Args:
        hidden: The hidden states of prompts and completions; shape (rows, time, hidden size).
        head: The LM head.
        ids: The token ids of the completions; shape (rows, tokens).
        is_token: True for tokens, False for padding; same shape.
        entropy: True to compute entropies.
        settings: Further arguments of `bandpo.linear_logp`.

    Returns:
        A tensor of shape (rows, tokens, 1 or 2) in place of logits, with 0 at padding.
    """
    # The logits for a token come from the hidden state before it; shape (tokens, hidden size).
    states = hidden[:, -ids.shape[1] - 1 : -1][is_token]
    outputs = linear_logp(states, head.weight, ids[is_token], entropy=entropy, bias=head.bias, **settings)
    columns = torch.stack([x for x in outputs if x is not None], dim=-1)
    zeros = columns.new_zeros(*is_token.shape, columns.shape[-1])
    return zeros.index_put((is_token,), columns)


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of an object in the block, and restore it after."""
    attributes = dict(vars(owner))
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if name in attributes:
            setattr(owner, name, attributes[name])


def _check_plain_head(model: Any, head: Any, softcap: float | None, tokens: Tensor) -> None:
    """Check that a model's LM head is a plain linear layer, by its logits of a few tokens.

    Raises:
        ValueError: it is not, so that log-probabilities without logits would be wrong.
    """
    requirement = "fused_logits=True needs a plain linear head, but"
    if not isinstance(head, torch.nn.Linear):
        raise InvalidValue(f"{requirement} the model's is a {type(head).__name__}; leave it out")
    expected: list[Tensor] = []

    def compute_expected(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        bias = None if module.bias is None else module.bias[:TESTED_ENTRIES].float()
        logits = linear(arguments[0].float(), module.weight[:TESTED_ENTRIES].float(), bias)
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        expected.append(logits)

    with torch.no_grad(), head.register_forward_hook(compute_expected):
        logits = model(input_ids=tokens, use_cache=False).logits[..., :TESTED_ENTRIES].float()
    largest_difference = (logits - expected[0]).abs().max()
    error = (largest_difference / expected[0].abs().max()).item()
    # bfloat16 has 8 binary digits, and half of them may be lost to rounding.
    if not error < 2**-4:
        raise InvalidValue(
            f"{requirement} the model's logits differ from weight @ hidden by {error:.1%} of the largest; leave it out"
        )
