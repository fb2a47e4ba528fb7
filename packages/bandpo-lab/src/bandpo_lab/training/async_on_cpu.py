"""TRL's asynchronous trainer on a CPU: stand-ins for what needs a GPU, at the places that TRL provides for it.

TRL's `AsyncGRPOTrainer` accepts a `rollout_worker` and a `weight_transfer` in place of a vLLM server. `OldSampler` is
both. It samples from a copy of the model whose weights are some versions old, in the process of the trainer and at the
moment at which the trainer asks for a sample. So a training is the same each time it is run.

`trl_on_a_cpu` replaces the two functions of TRL that need a GPU: the attention kernel, and the name of the device. All
else is TRL's: the queue and its limit of staleness, the packing of rows with common prefixes, the loss, the
accumulation, the versions.
"""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from bandpo_lab.errors import RunProblem

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

STD_EPSILON = 1e-8
"""The constant that `AsyncRolloutWorker` adds to the standard deviation of a group's rewards."""
RewardFunction = Callable[..., Sequence[float | None]]
"""A reward function as for TRL."""


@contextmanager
def trl_on_a_cpu() -> Generator[None, None, None]:
    """Let TRL's asynchronous trainer train on a CPU in the block."""
    kernel = packing._flash_attn
    peak_flops = async_grpo_trainer.get_peak_flops_per_device
    packing._flash_attn = lambda: DenseAttention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    try:
        yield
    finally:
        packing._flash_attn = kernel
        async_grpo_trainer.get_peak_flops_per_device = peak_flops


class DenseAttention:
    """The part of the package flash_attn that TRL calls, in plain torch."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Float[Tensor, "queries heads size"],
        key: Float[Tensor, "keys key_heads size"],
        value: Float[Tensor, "keys key_heads size"],
        query_ends: Int[Tensor, " ends"],
        key_ends: Int[Tensor, " ends"],
        longest_query: int,
        longest_key: int,
        *,
        softmax_scale: float | None = None,
        causal: bool,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Float[Tensor, "queries heads size"]:
        """Compute the causal attention of packed sequences, of each to its own keys.

        A sequence may have more keys than queries. Its last query then sees all of its keys.

        Args:
            query: The queries of all sequences, one after the other.
            key: The keys.
            value: The values.
            query_ends: 0, and the end of the queries of each sequence.
            key_ends: 0, and the end of the keys of each sequence.
            longest_query: The largest number of queries of a sequence.
            longest_key: The largest number of keys of a sequence.
            softmax_scale: The factor of the scores.
            causal: True, as TRL passes it.
            window_size: The window of the attention, which must be without limit.

        Raises:
            RunProblem: The attention has a window.
        """
        if not causal or window_size != (-1, -1):
            raise RunProblem(f"the attention on a CPU is causal and has no window, got {window_size}")
        queries = query_ends.diff().tolist()
        keys = key_ends.diff().tolist()
        sizes = ((query, queries), (key, keys), (value, keys))
        # Each (sequences, heads, time, size).
        rows = [pad_sequence([*x.split(of_x)], batch_first=True).transpose(1, 2) for x, of_x in sizes]
        shift = (key_ends.diff() - query_ends.diff())[:, None, None]
        position = torch.arange(longest_query, device=query.device)[None, :, None]
        of_key = torch.arange(longest_key, device=query.device)[None, None, :]
        # A padded query sees its sequence's keys, so that no row of the softmax is empty.
        is_visible = (of_key <= position + shift) & (of_key < key_ends.diff()[:, None, None])
        output = scaled_dot_product_attention(
            *rows,
            attn_mask=is_visible[:, None],
            scale=softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        output = output.transpose(1, 2)
        return torch.cat([row[:length] for row, length in zip(output, queries, strict=True)])


class _Completions(NamedTuple):
    """The completions of a prompt."""

    prompt: list[int]
    """The ids of the prompt."""
    ids: list[list[int]]
    """The ids of each completion, with the token that ends it."""
    logps: list[list[float]]
    """Their log-probabilities (nats) at the temperature of sampling."""


class OldSampler:
    """A rollout worker and a weight transfer of `AsyncGRPOTrainer` that samples with weights of some versions ago.

    The trainer publishes versions 1, 2, … of its weights. A sample that is requested after version v is from version
    v − lag, or from the first one. TRL requests a micro-batch before the update on the one before it. With
    ``lag=0`` the first micro-batch after an update is therefore one version old.

    Args:
        model: A model of the trainer's architecture, whose weights are overwritten.
        tokenizer: The tokenizer.
        rows: The rows of the data set, with a column ``prompt``, texts or conversations. They are used one after the
            other, again and again.
        reward_funcs: The reward function, or several whose rewards are added, as for TRL.
        lag: The number of versions between the newest weights and those that sample.
        num_generations: The number of completions of each prompt.
        prompts: The number of prompts that are sampled together.
        max_new_tokens: The length limit of a completion.
        temperature: The temperature of sampling.
        chat_template_kwargs: Arguments of the chat template, for conversations.
        seed: The seed of sampling.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        rows: Sequence[Mapping[str, Any]],
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        *,
        lag: int,
        num_generations: int,
        prompts: int = 1,
        max_new_tokens: int = 40,
        temperature: float = 1.0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._rows = rows
        self._reward_funcs = [reward_funcs] if callable(reward_funcs) else [*reward_funcs]
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._lag = lag
        self._num_generations = num_generations
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        # Each id that the model declares as an end ends a completion, as in TRL.
        declared = model.generation_config.eos_token_id
        ends = declared if isinstance(declared, list) else [declared]
        self._ends: set[int] = {tokenizer.eos_token_id, *ends} - {None}
        self._random = torch.Generator().manual_seed(seed)
        self._sent: dict[str, Tensor] = {}
        self._versions: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=lag + 1)
        self._samples: deque[RolloutSample] = deque()
        self._groups = 0
        self.rewards: list[float] = []
        """The mean reward of each request."""
        self.rollout_buffer: Any = self
        self.metrics_queue: Any = queue.Queue()

    # The weight transfer.

    def init_weight_transfer(self) -> None:
        """Do nothing."""

    def pause(self) -> None:
        """Do nothing."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Keep a copy of the weights."""
        self._sent = {name: weight.clone() for name, weight in iterator}

    def resume(self) -> None:
        """Do nothing."""

    def destroy(self) -> None:
        """Do nothing."""

    # The rollout worker.

    def start(self) -> None:
        """Do nothing: samples are made when they are requested."""

    def stop(self) -> None:
        """Do nothing."""

    def check_health(self, stale_after_s: float) -> None:
        """Do nothing."""

    def update_model_version(self, model_version: int) -> None:
        """Give a number to the weights that were sent last."""
        self._versions.append((model_version, self._sent))

    # The queue.

    def qsize(self) -> int:
        """Return the number of samples that are ready."""
        return len(self._samples)

    def get(self, timeout: float | None = None) -> RolloutSample:
        """Return the next sample; make some if there is none."""
        if not self._samples:
            self._samples += self._sample()
        return self._samples.popleft()

    def _sample(self) -> list[RolloutSample]:
        """Return the samples of the next prompts, with rewards and advantages."""
        version, weights = self._versions[0]
        result = self._model.load_state_dict(weights, strict=False)
        if result.unexpected_keys:
            raise RunProblem(f"the sampler's model has no weights {', '.join(result.unexpected_keys)}")
        start = self._groups
        self._groups += self._prompts
        rows = [self._rows[number % len(self._rows)] for number in range(start, self._groups)]
        samples: list[RolloutSample] = []
        rewards: list[float] = []
        for group, (row, completions) in enumerate(zip(rows, self._generate(rows), strict=True), start):
            scores = self._score(row, completions.ids)
            rewards += scores.tolist()
            prompt = completions.prompt
            for ids, logps, score, advantage in zip(
                completions.ids, completions.logps, scores, _advantages(scores), strict=True
            ):
                samples.append(
                    RolloutSample(
                        prompt=[],
                        completion=[],
                        input_ids=np.array([*prompt, *ids]),
                        completion_mask=np.array([0] * len(prompt) + [1] * len(ids)),
                        old_log_probs=np.array([0.0] * len(prompt) + logps, dtype=np.float32),
                        advantage=float(advantage),
                        model_version=version,
                        group_id=group,
                        metrics={"reward": float(score)},
                        enqueued_at=time.time(),
                    )
                )
        if np.isnan(rewards).all():
            raise RunProblem(
                f"every reward of the weights of version {version} is NaN or None, so there is nothing to learn from: "
                "see the reward functions, and whether their columns are in the data"
            )
        self.rewards.append(float(np.nanmean(rewards)))
        return samples

    def _score(
        self, row: Mapping[str, Any], ids: Sequence[Sequence[int]]
    ) -> Float[np.ndarray, " completions"]:
        """Return the sum of the rewards of each completion of a prompt; NaN for one that no function scores."""
        texts = [self._tokenizer.decode(of_one, skip_special_tokens=True) for of_one in ids]
        is_text = isinstance(row["prompt"], str)
        columns = {name: [value] * len(texts) for name, value in row.items() if name != "prompt"}
        columns["prompts"] = [row["prompt"]] * len(texts)
        columns["completions"] = [
            text if is_text else [{"role": "assistant", "content": text}] for text in texts
        ]
        scores: list[list[float]] = []
        for function in self._reward_funcs:
            of_function = function(**columns, completion_ids=ids)
            scores.append([math.nan if score is None else float(score) for score in of_function])
        table = np.array(scores, dtype=np.float64)
        return np.where(np.isnan(table).all(0), np.nan, np.nansum(table, 0))

    @torch.no_grad()
    def _generate(self, rows: Sequence[Mapping[str, Any]]) -> list[_Completions]:
        """Sample the completions of the prompts of rows, all in one batch with padding on the left."""
        prompts = [self._prompt_ids(row["prompt"]) for row in rows]
        longest = max(map(len, prompts))
        ends = torch.tensor(sorted(self._ends))
        padded = [[self._tokenizer.eos_token_id] * (longest - len(prompt)) + prompt for prompt in prompts]
        is_prompt = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids = torch.tensor(padded).repeat_interleave(self._num_generations, 0)
        mask = torch.tensor(is_prompt).repeat_interleave(self._num_generations, 0)
        position = (mask.cumsum(1) - 1).clamp(min=0)

        cache: Any = None
        tokens: list[Tensor] = []
        logps: list[Tensor] = []
        is_done = torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(self._max_new_tokens):
            output = self._model(
                ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            logp = (output.logits[:, -1].float() / self._temperature).log_softmax(-1)
            ids = logp.exp().multinomial(1, generator=self._random)
            tokens.append(ids)
            logps.append(logp.gather(1, ids))
            is_done |= torch.isin(ids[:, 0], ends)
            if is_done.all():
                break
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            position = position[:, -1:] + 1

        results = [_Completions(prompt, [], []) for prompt in prompts]
        table = torch.cat(tokens, 1).tolist()
        logps_of_rows = torch.cat(logps, 1).tolist()
        for number, (row, row_logps) in enumerate(zip(table, logps_of_rows, strict=True)):
            length = next((place for place, token in enumerate(row, 1) if token in self._ends), len(row))
            result = results[number // self._num_generations]
            result.ids.append(row[:length])
            result.logps.append(row_logps[:length])
        return results

    def _prompt_ids(self, prompt: Any) -> list[int]:
        """Return the ids of a prompt, a text or a conversation."""
        if isinstance(prompt, str):
            return self._tokenizer(prompt)["input_ids"]
        return self._tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False, **self._chat_template_kwargs
        )


def _advantages(scores: Float[np.ndarray, " completions"]) -> Float[np.ndarray, " completions"]:
    """Return the advantages of a group as `AsyncRolloutWorker` computes them; 0 for a completion without a score."""
    if np.isnan(scores).all():
        return np.zeros_like(scores)
    advantages = (scores - np.nanmean(scores)) / (np.nanstd(scores) + STD_EPSILON)
    return np.nan_to_num(advantages)
