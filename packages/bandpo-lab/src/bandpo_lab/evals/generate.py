"""Generate completions: the interface `Sampler`, and a sampler that runs transformers in this process.

A sampler gets all prompts of an evaluation and the positions that have no completion yet, so that a resumed run draws
the same completions as an uninterrupted one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bandpo_lab.errors import FileProblem, InvalidValue

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | Sequence[Mapping[str, str]]
"""Plain text, or messages such as ``[{"role": "user", "content": "1+1?"}]`` for the model's chat template."""


@dataclass(frozen=True)
class Sampling:
    """The settings of sampling; the defaults are those of the paper's evaluations.

    Attributes:
        max_new_tokens: The longest completion, in tokens.
        temperature: The temperature of the softmax; 0 is greedy decoding.
        top_p: The probability mass kept at each step, in (0, 1].
        seed: The seed of all random draws.

    Raises:
        ValueError: A value is out of its range.

    >>> Sampling(temperature=0.6).top_p
    1.0
    """

    max_new_tokens: int = 4096
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InvalidValue(f"max_new_tokens = {self.max_new_tokens} must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise InvalidValue(f"temperature = {self.temperature} must be 0 (greedy) or more, and finite")
        if not 0 < self.top_p <= 1:
            raise InvalidValue(f"top_p = {self.top_p} must lie in (0, 1]; 1 keeps every token")
        if self.seed < 0:
            raise InvalidValue(f"seed = {self.seed} must be 0 or more")

    def seed_of(self, position: int) -> int:
        """Return a seed below 2³¹ for one position of the job, independent of those of other positions."""
        return int(np.random.SeedSequence((self.seed, position)).generate_state(1)[0] >> 1)


@dataclass(frozen=True)
class Completion:
    """A completion of one prompt."""

    text: str
    """The text without special tokens."""
    finish: str
    """``"stop"`` if the model ended the text, ``"length"`` if it was cut; begins with `REFUSED` if there is no text."""
    tokens: int | None
    """The length in tokens; None if it is not known."""


REFUSED = "refused"
"""The first word of `Completion.finish` if a server refused the request."""


class GenerationError(FileProblem):
    """A sampler cannot continue. Completions that it has yielded are valid, and the others can be requested again."""


class Sampler(Protocol):
    """An object that completes prompts."""

    @property
    def sampling(self) -> Sampling:
        """The settings of sampling."""
        ...

    def stream(self, prompts: Sequence[Prompt], missing: Collection[int]) -> Iterator[tuple[int, Completion]]:
        """Yield ``(position, completion)`` for each missing position, in any order.

        Args:
            prompts: All prompts of the job; a prompt that is sampled n times is in it n times.
            missing: The positions in `prompts` that have no completion yet.

        Raises:
            GenerationError: The sampler cannot continue.
        """
        ...


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt; messages are formatted with the tokenizer's chat template.

    Raises:
        ValueError: The prompt is messages and the tokenizer has no chat template, or the prompt has no tokens.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif tokenizer.chat_template is None:
        raise InvalidValue(
            "the prompts are messages, and the model's tokenizer has no chat template: "
            "name one with --chat-template FILE"
        )
    else:
        messages = [dict(message) for message in prompt]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        # The template has written the special tokens.
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise InvalidValue(f"the prompt {prompt!r} has no tokens: give the model something to complete")
    return list(ids)


def all_ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the token ids of each prompt; a prompt that is repeated as the same object is encoded once."""
    ids_by_object: dict[int, list[int]] = {}
    for prompt in prompts:
        if id(prompt) not in ids_by_object:
            ids_by_object[id(prompt)] = prompt_ids(tokenizer, prompt)
    return [ids_by_object[id(prompt)] for prompt in prompts]


class TransformersSampler:
    """A sampler that runs batches through ``model.generate`` in this process.

    The job is split into batches in a fixed way, and each batch has its own seed: with the same batch size, a resumed
    run draws exactly the same completions as an uninterrupted one. The state of torch's random generators is restored.

    Raises:
        ValueError: The batch size is below 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        *,
        batch_size: int = 64,
    ) -> None:
        if batch_size < 1:
            raise InvalidValue(f"batch_size = {batch_size} must be at least 1")
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.batch_size = batch_size

    def stream(self, prompts: Sequence[Prompt], missing: Collection[int]) -> Iterator[tuple[int, Completion]]:
        """Yield ``(position, completion)`` for each missing position, in the order of the prompts.

        A batch with a missing position is generated as a whole, so that its random numbers are always the same.

        Args:
            prompts: All prompts of the job; a prompt that is sampled n times is in it n times.
            missing: The positions in `prompts` that have no completion yet.

        Raises:
            ValueError: A prompt and its completion do not fit into the model's context.
        """
        import torch

        ids = all_ids(self.tokenizer, prompts)
        self._check_context(max(map(len, ids), default=0))
        missing_positions = set(missing)
        was_training = self.model.training
        self.model.eval()
        try:
            for start in range(0, len(ids), self.batch_size):
                positions = range(start, min(start + self.batch_size, len(ids)))
                if missing_positions.isdisjoint(positions):
                    continue
                cuda = [self.model.device] if self.model.device.type == "cuda" else []
                with torch.random.fork_rng(devices=cuda), torch.inference_mode():
                    torch.manual_seed(self.sampling.seed_of(start))
                    completions = self._generate_batch([ids[i] for i in positions])
                for position, completion in zip(positions, completions, strict=True):
                    if position in missing_positions:
                        yield position, completion
        finally:
            self.model.train(was_training)

    def fit_to_context(self, prompts: Sequence[Prompt]) -> None:
        """Lower ``max_new_tokens`` to what the model's context leaves beside the longest prompt, if that is less.

        Raises:
            ValueError: The context leaves nothing.
        """
        context = self._context
        if context is None:
            return
        longest = max(map(len, all_ids(self.tokenizer, prompts)), default=0)
        if longest >= context:
            raise InvalidValue(
                f"the longest prompt has {longest} tokens, which leaves no token of the model's context of {context}; "
                "choose a model with a larger context"
            )
        if longest + self.sampling.max_new_tokens > context:
            self.sampling = replace(self.sampling, max_new_tokens=context - longest)

    def _check_context(self, longest: int) -> None:
        """Check that the longest prompt and its completion fit into the model's context."""
        context = self._context
        if context is not None and longest + self.sampling.max_new_tokens > context:
            raise InvalidValue(
                f"the longest prompt has {longest} tokens and max_new_tokens is "
                f"{self.sampling.max_new_tokens}: more than the model's context of {context}; "
                f"lower max_new_tokens to {max(context - longest, 1)}"
            )

    @property
    def _context(self) -> int | None:
        """The largest number of tokens of a prompt and its completion; None if the model has no such number."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @cached_property
    def _config(self) -> Any:
        """The configuration for ``model.generate``."""
        from transformers import GenerationConfig

        defaults = self.model.generation_config
        eos_token_id = self.tokenizer.eos_token_id if defaults.eos_token_id is None else defaults.eos_token_id
        pad_token_id = self.tokenizer.pad_token_id
        if pad_token_id is None:
            pad_token_id = eos_token_id[0] if isinstance(eos_token_id, list) else eos_token_id
        # The model's own generation config fills in settings that are not passed, so every setting that changes the
        # distribution is passed.
        if self.sampling.temperature > 0:
            distribution = {
                "do_sample": True,
                "temperature": self.sampling.temperature,
                "top_p": self.sampling.top_p,
                "top_k": 0,
                "min_p": 0.0,
            }
        else:
            distribution = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}
        return GenerationConfig(
            max_new_tokens=self.sampling.max_new_tokens,
            max_length=None,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            num_beams=1,
            use_cache=True,
            **distribution,
        )

    def _generate_batch(self, ids: list[list[int]]) -> list[Completion]:
        """Complete the prompts of one batch."""
        import torch

        # Pad on the left: shape (prompts, longest prompt).
        width = max(map(len, ids))
        tokens = torch.full((len(ids), width), self._config.pad_token_id or 0, device=self.model.device)
        attention = torch.zeros_like(tokens)
        for i, row in enumerate(ids):
            tokens[i, width - len(row) :] = torch.tensor(row)
            attention[i, width - len(row) :] = 1
        generate: Any = self.model.generate
        output = generate(tokens, attention_mask=attention, generation_config=self._config)
        eos_token_id = self._config.eos_token_id
        eos_ids = set(eos_token_id if isinstance(eos_token_id, list) else [eos_token_id])
        return [self._completion(row, eos_ids) for row in output[:, width:].tolist()]

    def _completion(self, row: list[int], eos_ids: set[int]) -> Completion:
        """Return the completion in a row of generated tokens, which may end with padding."""
        stop = next((i for i, token in enumerate(row) if token in eos_ids), None)
        if stop is None:
            return Completion(str(self.tokenizer.decode(row, skip_special_tokens=True)), "length", len(row))
        text = str(self.tokenizer.decode(row[:stop], skip_special_tokens=True))
        return Completion(text, "stop", stop + 1)


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    batch_size: int = 64,
) -> list[list[str]]:
    """Sample n completions of each prompt from a model in memory.

    The same seed and batch size give the same completions. The model's training mode is restored.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        prompts: The prompts.
        n: The number of completions of each prompt.
        sampling: The settings of sampling.
        batch_size: The number of completions that are generated at once.

    Returns:
        The texts, one list of n completions per prompt.

    Raises:
        ValueError: n or the batch size is below 1, or a prompt does not fit into the context.
    """
    if n < 1:
        raise InvalidValue(f"n = {n} must be at least 1")
    sampler = TransformersSampler(model, tokenizer, sampling, batch_size=batch_size)
    job = list(itertools.chain.from_iterable(itertools.repeat(prompt, n) for prompt in prompts))
    texts = {i: completion.text for i, completion in sampler.stream(job, range(len(job)))}
    return [[texts[i * n + j] for j in range(n)] for i in range(len(prompts))]
