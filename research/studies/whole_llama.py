"""A Llama model in plain torch: all weights in float32, products in another dtype, and sampling without a host.

Training computes all positions at once. Sampling computes one position of all answers at a time, and on a GPU replays
it as a CUDA graph, so that the time of a small model is not spent on launches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import load_file
from torch.nn import functional

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

LOOK_EVERY = 16
"""The number of positions after which sampling looks whether all answers have ended."""


class Shape(NamedTuple):
    """The sizes of a model."""

    layers: int
    heads: int
    key_heads: int
    """The number of heads of keys and values, each of which serves several heads of queries."""
    head_size: int
    epsilon: float
    """The constant of the norms."""
    theta: float
    """The base of the rotary frequencies."""


class Llama:
    """A Llama model with tied embeddings and without biases.

    Args:
        folder: The folder of the model, with ``config.json`` and ``model.safetensors``.
        device: The device of the weights.
        dtype: The dtype of the products. The weights that are trained are in float32.

    Raises:
        ValueError: The configuration has a part that this class does not have.
    """

    def __init__(self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rope = config["rope_parameters"]
        if (
            config["model_type"] != "llama"
            or rope["rope_type"] != "default"
            or not config["tie_word_embeddings"]
        ):
            raise ValueError(f"{folder}: not a Llama with tied embeddings and plain rotary positions")
        heads = config["num_attention_heads"]
        self.shape = Shape(
            config["num_hidden_layers"],
            heads,
            config["num_key_value_heads"],
            config.get("head_dim") or config["hidden_size"] // heads,
            config["rms_norm_eps"],
            rope["rope_theta"],
        )
        self.dtype = dtype
        self.weights = {
            name: weight.to(device, torch.float32).requires_grad_()
            for name, weight in load_file(folder / "model.safetensors").items()
        }

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.weights["model.norm.weight"].device

    def logits(self, ids: Int[Tensor, "rows time"], start: int = 0) -> Float[Tensor, "rows rest vocabulary"]:
        """Compute the logits of the token after each token from position ``start`` on, with a gradient.

        Rows of different lengths are padded on the right, where nothing attends to.
        """
        weights = {name: weight.to(self.dtype) for name, weight in self.weights.items()}
        positions = torch.arange(ids.shape[1], device=ids.device)

        def attend(query: Tensor, key: Tensor, value: Tensor, _layer: int) -> Tensor:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        states = hidden_states(weights, self.shape, ids, positions, attend)
        return functional.linear(states[:, start:], weights["model.embed_tokens.weight"])


Attention = Callable[["Tensor", "Tensor", "Tensor", int], "Tensor"]
"""A function from queries, keys and values of new positions, and the index of the layer, to what is attended."""


def hidden_states(
    weights: Mapping[str, Tensor],
    shape: Shape,
    ids: Int[Tensor, "rows time"],
    positions: Int[Tensor, " time"],
    attend: Attention,
) -> Float[Tensor, "rows time width"]:
    """Compute the states from which the logits at some positions are computed.

    Args:
        weights: The weights by their names in transformers.
        shape: The sizes of the model.
        ids: The tokens.
        positions: Their positions.
        attend: The attention.
    """
    frequencies = shape.theta ** -(
        torch.arange(0, shape.head_size, 2, device=ids.device, dtype=torch.float32) / shape.head_size
    )
    angles = (positions[:, None] * frequencies).repeat(1, 2)
    x = functional.embedding(ids, weights["model.embed_tokens.weight"])
    cosine = angles.cos().to(x.dtype)
    sine = angles.sin().to(x.dtype)

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], shape.epsilon)

    def heads(x: Tensor, name: str) -> Float[Tensor, "rows heads time size"]:
        return (
            functional.linear(x, weights[f"{name}.weight"])
            .unflatten(-1, (-1, shape.head_size))
            .transpose(1, 2)
        )

    def rotate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cosine + torch.cat([-right, left], -1) * sine

    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        y = norm(x, f"{layer}.input_layernorm")
        query = rotate(heads(y, f"{layer}.self_attn.q_proj"))
        key = rotate(heads(y, f"{layer}.self_attn.k_proj"))
        value = heads(y, f"{layer}.self_attn.v_proj")
        attended = attend(query, key, value, index).transpose(1, 2).flatten(2)
        x = x + functional.linear(attended, weights[f"{layer}.self_attn.o_proj.weight"])
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate = functional.silu(functional.linear(y, weights[f"{layer}.mlp.gate_proj.weight"]))
        up = functional.linear(y, weights[f"{layer}.mlp.up_proj.weight"])
        x = x + functional.linear(gate * up, weights[f"{layer}.mlp.down_proj.weight"])
    return norm(x, "model.norm")


class Sampled(NamedTuple):
    """Sampled answers."""

    tokens: Int[Tensor, "answers time"]
    mask: Bool[Tensor, "answers time"]
    """True for a token of the answer, which ends with its end token."""
    entropy: Float[Tensor, "answers time"]
    """The entropy (nats) of the policy at each token."""


class Sampler:
    """Sampling from a model at temperature 1, with memory that is kept between calls.

    Args:
        model: The model. Each call uses the weights that it has then.
        rows: The number of answers of a call.
        prompt_length: The number of tokens of each prompt.
        length: The largest number of tokens of an answer.
        end: The token that ends an answer.
    """

    def __init__(self, model: Llama, rows: int, prompt_length: int, length: int, end: int):
        self.model = model
        self.prompt_length = prompt_length
        self.end = end
        device, dtype, shape = model.device, model.dtype, model.shape
        self._weights = {
            name: torch.empty_like(weight, dtype=dtype, requires_grad=False)
            for name, weight in model.weights.items()
        }
        cache_shape = (shape.layers, 2, rows, shape.key_heads, prompt_length + length, shape.head_size)
        self._cache = torch.zeros(cache_shape, dtype=dtype, device=device)
        self._ids = torch.zeros(rows, dtype=torch.long, device=device)
        self._time = torch.zeros(1, dtype=torch.long, device=device)
        self._chances = torch.zeros(rows, length, device=device)
        self._tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self._entropy = torch.zeros(rows, length, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def rows(self) -> int:
        """The number of answers of a call."""
        return len(self._ids)

    @torch.no_grad()
    def sample(self, prompts: Int[Tensor, "prompts time"], chances: Float[Tensor, "answers time"]) -> Sampled:
        """Sample the same number of answers to each prompt.

        Args:
            prompts: The tokens of the prompts.
            chances: A number between 0 and 1 for each token, by which it is chosen: the same numbers and the same
                policy give the same answers.
        """
        for name, weight in self.model.weights.items():
            self._weights[name].copy_(weight)
        answers = self.rows // len(prompts)
        self._read_prompts(prompts, answers)
        self._ids.copy_(prompts[:, -1].repeat_interleave(answers))
        self._chances.copy_(chances)
        self._tokens.fill_(self.end)
        self._entropy.zero_()
        self._time.zero_()
        length = chances.shape[1]
        for time in range(length):
            self._step()
            if (time + 1) % LOOK_EVERY == 0 and bool((self._tokens[:, : time + 1] == self.end).any(1).all()):
                break
        ended = (self._tokens == self.end).int()
        mask = ended.cumsum(1) == ended  # nothing before it has ended the answer
        return Sampled(self._tokens.clone(), mask, self._entropy * mask)

    def _read_prompts(self, prompts: Tensor, answers: int) -> None:
        """Compute the keys and values of each prompt once, without its last token."""
        if self.prompt_length == 1:
            return
        positions = torch.arange(self.prompt_length - 1, device=prompts.device)

        def attend(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
            for part, new in enumerate((key, value)):
                self._cache[layer, part, :, :, : self.prompt_length - 1] = new.repeat_interleave(answers, 0)
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        hidden_states(self._weights, self.model.shape, prompts[:, :-1], positions, attend)

    def _step(self) -> None:
        """Choose the next token of all answers."""
        if self.model.device.type != "cuda":
            self._choose()
            return
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Return a CUDA graph of one step, and leave the state as it was."""
        before = self._ids.clone(), self._time.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries are initialized before the capture
            self._choose()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._choose()
        self._ids.copy_(before[0])
        self._time.copy_(before[1])
        return graph

    def _choose(self) -> None:
        """Compute the distribution after the last tokens, and choose by the cumulative one."""
        shape = self.model.shape
        position = self._time + self.prompt_length - 1
        visible = torch.arange(self._cache.shape[4], device=position.device) <= position

        def attend(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
            keys, values = self._cache[layer]
            keys.index_copy_(2, position, key)
            values.index_copy_(2, position, value)
            # The heads of queries that share a head of keys are the rows of one product.
            grouped = query.view(len(query), shape.key_heads, -1, shape.head_size)
            scores = grouped @ keys.transpose(2, 3) / shape.head_size**0.5
            weights = scores.float().masked_fill(~visible, float("-inf")).softmax(-1).to(values.dtype)
            return (weights @ values).view(query.shape)

        states = hidden_states(self._weights, shape, self._ids[:, None], position, attend)[:, 0]
        logits = functional.linear(states, self._weights["model.embed_tokens.weight"]).float()
        logp = logits.log_softmax(-1)
        probabilities = logp.exp()
        edges = probabilities.cumsum(-1)
        # The sum is 1 only to rounding. A chance of nearly 1 takes the last token whose probability is counted.
        threshold = self._chances.index_select(1, self._time) * edges[:, -1:]
        tokens = (edges <= threshold).sum(-1).clamp(max=edges.shape[1] - 1)
        self._tokens.index_copy_(1, self._time, tokens[:, None])
        self._entropy.index_copy_(1, self._time, -(probabilities * logp).sum(-1, keepdim=True))
        self._ids.copy_(tokens)
        self._time.add_(1)
