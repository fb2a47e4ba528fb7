"""Completions from a model: the interface, and its default, transformers in this process.

A generator is any object with a `stream` method (`Sampler`). Each time it is handed the whole job
and the positions still missing, so that a resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bandpo.errors import FileProblem, InvalidValue

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | Sequence[Mapping[str, str]]
"""Plain text, or messages such as ``[{"role": "user", "content": "1+1?"}]`` for the model's chat template."""


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; the defaults are those of the paper's evaluations.

    Attributes:
        max_new_tokens: Longest completion, in tokens.
        temperature: Of the softmax; 0 takes the most probable token each time.
        top_p: Probability mass kept at each step, in (0, 1].
        seed: Of everything random.

    Raises:
        ValueError: A value out of its range.

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
        """A seed for one position of the job, independent of the others, below 2³¹."""
        return int(np.random.SeedSequence((self.seed, position)).generate_state(1)[0] >> 1)


@dataclass(frozen=True)
class Completion:
    """What a model wrote: the text without special tokens, why it ended and how long it is in tokens."""

    text: str
    finish: str
    """``"stop"`` where the model ended it, ``"length"`` where it was cut; begins with `REFUSED` where there is none."""
    tokens: int | None


REFUSED = "refused"


class GenerationError(FileProblem):
    """A generator cannot go on. What it has yielded stays valid, and the rest can be asked for again."""


class Sampler(Protocol):
    """Anything that completes prompts."""

    @property
    def sampling(self) -> Sampling:
        """How completions are drawn."""
        ...

    def stream(self, prompts: Sequence[Prompt], missing: Collection[int]) -> Iterator[tuple[int, Completion]]:
        """Yields ``(position, completion)`` for every missing position of `prompts`, in any order.

        A prompt to be sampled n times stands there n times.

        Raises:
            GenerationError: It cannot go on.
        """
        ...


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, messages through the tokenizer's chat template.

    Raises:
        ValueError: Messages, and the tokenizer has no chat template; or a prompt without a single token.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif tokenizer.chat_template is None:
        raise InvalidValue(
            "the prompts are messages and the model's tokenizer has no chat template: "
            "give one (--chat-template FILE)"
        )
    else:
        messages = [dict(message) for message in prompt]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        # The template writes its own special tokens.
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise InvalidValue(f"the prompt {prompt!r} has no tokens: give the model something to complete")
    return list(ids)


def all_ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """`prompt_ids` of each; one that repeats is the same object, and is encoded once."""
    known = {key: prompt_ids(tokenizer, prompt) for key, prompt in {id(p): p for p in prompts}.items()}
    return [known[id(prompt)] for prompt in prompts]


class TransformersSampler:
    """Batches through ``model.generate`` in this process.

    Batches are cut from the whole job and each has its own seed: with the same batch size a resumed run draws
    exactly what an uninterrupted one would. The process's own random generators are left as they were.

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
        self.model, self.tokenizer, self.sampling, self.batch_size = model, tokenizer, sampling, batch_size

    def stream(self, prompts: Sequence[Prompt], missing: Collection[int]) -> Iterator[tuple[int, Completion]]:
        """See `Sampler.stream`.

        Raises:
            ValueError: A prompt and its completion do not fit into the model's context.
        """
        import torch

        ids = all_ids(self.tokenizer, prompts)
        self._check_context(max(map(len, ids), default=0))
        wanted = set(missing)
        was_training = self.model.training
        self.model.eval()
        try:
            for start in range(0, len(ids), self.batch_size):
                positions = range(start, min(start + self.batch_size, len(ids)))
                if wanted.isdisjoint(positions):
                    continue
                cuda = [self.model.device] if self.model.device.type == "cuda" else []
                with torch.random.fork_rng(devices=cuda), torch.inference_mode():
                    torch.manual_seed(self.sampling.seed_of(start))
                    completions = self._batch([ids[i] for i in positions])
                yield from ((i, c) for i, c in zip(positions, completions, strict=True) if i in wanted)
        finally:
            self.model.train(was_training)

    def _check_context(self, longest: int) -> None:
        context = getattr(self.model.config, "max_position_embeddings", None)
        if context is not None and longest + self.sampling.max_new_tokens > context:
            raise InvalidValue(
                f"the longest prompt has {longest} tokens and max_new_tokens is "
                f"{self.sampling.max_new_tokens}: more than the model's context of {context}; "
                f"lower max_new_tokens to {max(context - longest, 1)}"
            )

    @cached_property
    def _config(self) -> Any:
        from transformers import GenerationConfig

        defaults = self.model.generation_config
        end = self.tokenizer.eos_token_id if defaults.eos_token_id is None else defaults.eos_token_id
        pad = self.tokenizer.pad_token_id
        if pad is None:
            pad = end[0] if isinstance(end, list) else end
        # A model's own settings fill in what is not given, so all that bends the distribution is given.
        draw: dict[str, Any] = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}
        if self.sampling.temperature > 0:
            draw = {"do_sample": True, "temperature": self.sampling.temperature, "top_p": self.sampling.top_p}
            draw |= {"top_k": 0, "min_p": 0.0}
        return GenerationConfig(
            max_new_tokens=self.sampling.max_new_tokens,
            max_length=None,
            eos_token_id=end,
            pad_token_id=pad,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            num_beams=1,
            use_cache=True,
            **draw,
        )

    def _batch(self, ids: list[list[int]]) -> list[Completion]:
        import torch

        width = max(map(len, ids))
        tokens = torch.full((len(ids), width), self._config.pad_token_id or 0, device=self.model.device)
        attention = torch.zeros_like(tokens)
        for i, row in enumerate(ids):
            tokens[i, width - len(row) :] = torch.tensor(row)
            attention[i, width - len(row) :] = 1
        generate: Any = self.model.generate
        output = generate(tokens, attention_mask=attention, generation_config=self._config)
        ends = self._config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        return [self._completion(row, ends) for row in output[:, width:].tolist()]

    def _completion(self, row: list[int], ends: set[int]) -> Completion:
        stop = next((i for i, token in enumerate(row) if token in ends), None)
        written = row if stop is None else row[:stop]
        text = str(self.tokenizer.decode(written, skip_special_tokens=True))
        return Completion(text, "length" if stop is None else "stop", len(written) + (stop is not None))


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    batch_size: int = 64,
) -> list[list[str]]:
    """n completions of each prompt, one list a prompt, from a model in memory, which comes back in the mode it was in.

    The same seed and batch size give the same completions.

    Raises:
        ValueError: n or the batch size is below 1, or a prompt does not fit into the context.
    """
    if n < 1:
        raise InvalidValue(f"n = {n} must be at least 1")
    generator = TransformersSampler(model, tokenizer, sampling, batch_size=batch_size)
    job = [prompt for prompt in prompts for _ in range(n)]
    texts = {i: completion.text for i, completion in generator.stream(job, range(len(job)))}
    return [[texts[i * n + j] for j in range(n)] for i in range(len(prompts))]
