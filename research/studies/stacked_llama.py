"""Layers of several Llama models that differ in their weights alone, evaluated together.

The weights of all models are stacked in one tensor, so that one matrix product serves all of them. A GPU then trains
dozens of small models in the time of a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Cache = list[tuple["Tensor", "Tensor"]]
"""Keys and values of each layer, of shape (models × rows, heads, time, size of a head)."""


class StackedLayers:
    """Layers of ``models`` Llama models, with the same weights at first.

    Args:
        model: A ``LlamaModel`` of transformers.
        layers: Its layers to take.
        models: The number of copies.
        with_norm: True to apply the model's final norm after the layers.
        dtype: The dtype of weights and products. The states between layers are in float32.
    """

    def __init__(
        self,
        model: Any,
        layers: slice,
        models: int,
        *,
        with_norm: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        def stack(weight: Tensor) -> Tensor:
            return weight.detach().to(dtype).expand(models, *weight.shape).clone()

        self._config = model.config
        self._rotary = model.rotary_emb
        self._dtype = dtype
        self._layers = [
            {name: stack(weight) for name, weight in layer.named_parameters()}
            for layer in model.layers[layers]
        ]
        self._norm = stack(model.norm.weight) if with_norm else None

    @property
    def parameters(self) -> list[Float[Tensor, "models ..."]]:
        """All weights."""
        weights = [weight for layer in self._layers for weight in layer.values()]
        return weights if self._norm is None else [*weights, self._norm]

    def __call__(
        self, states: Float[Tensor, "models rows time width"], cache: Cache | None = None
    ) -> tuple[Float[Tensor, "models rows time width"], Cache]:
        """Return the output states, and the keys and values of all positions so far.

        Args:
            states: The input states of the next positions: of all positions, or of one if there is a cache.
            cache: The keys and values of earlier positions.
        """
        new_cache: Cache = []
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(states, layer["input_layernorm.weight"])
            attended, keys_and_values = self._attention(normed, layer, cache[index] if cache else None)
            new_cache.append(keys_and_values)
            states = states + attended
            normed = self._rms_norm(states, layer["post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(_linear(normed, layer["mlp.gate_proj.weight"]))
            up = _linear(normed, layer["mlp.up_proj.weight"])
            states = states + _linear(gate * up, layer["mlp.down_proj.weight"])
        if self._norm is not None:
            states = self._rms_norm(states, self._norm)
        return states, new_cache

    def _rms_norm(self, states: Tensor, weight: Float[Tensor, "models width"]) -> Tensor:
        scale = torch.rsqrt(states.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return states * scale * weight[:, None, None]

    def _attention(
        self, states: Tensor, layer: dict[str, Tensor], past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        models, rows, time, _ = states.shape
        begin = 0 if past is None else past[0].shape[2]
        assert begin == 0 or time == 1, "the mask below is for all positions or for one"

        def heads(name: str) -> Tensor:
            projected = _linear(states, layer[f"self_attn.{name}.weight"])
            return projected.view(models * rows, time, -1, self._config.head_dim).transpose(1, 2)

        positions = torch.arange(begin, begin + time, device=states.device)[None]
        cos, sin = self._rotary(states, positions)
        queries, keys = apply_rotary_pos_emb(heads("q_proj"), heads("k_proj"), cos, sin)
        # The rotation is in float32.
        queries = queries.to(self._dtype)
        keys = keys.to(self._dtype)
        values = heads("v_proj")
        if past is not None:
            keys = torch.cat([past[0], keys], 2)
            values = torch.cat([past[1], values], 2)
        output = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=time > 1, enable_gqa=True
        )
        output = output.transpose(1, 2).reshape(models, rows, time, -1)
        return _linear(output, layer["self_attn.o_proj.weight"]), (keys, values)


def select_rows(cache: Cache, rows: Sequence[int] | Tensor) -> Cache:
    """Return the keys and values of some rows of one model."""
    return [(keys[rows], values[rows]) for keys, values in cache]


def _linear(
    states: Float[Tensor, "models rows time inputs"], weight: Float[Tensor, "models outputs inputs"]
) -> Float[Tensor, "models rows time outputs"]:
    """Apply each model's matrix to its states."""
    product = torch.bmm(states.flatten(1, 2).to(weight.dtype), weight.transpose(1, 2))
    return product.view(*states.shape[:3], -1)
