"""Combination locks: every digit of a code is fairly likely to be guessed, the whole code is not.

A prompt is the key `4071=`, its code `7304` (each digit plus 3, modulo 10), and only the whole code opens the
lock. The base model, made in 20 s by

    python -m studies.lock --skill 0.3 --seed 0 --output_dir base

takes the right digit with a probability of `skill` at each place, any other with equal probabilities, so that it
opens a lock of four digits in `skill`⁴ of its tries. Where `multiplication` has one rare token in front of a sure
path, no token here is rare, and the reward is: reinforcement learning has to raise all places together.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from bandpo.errors import InvalidValue
from bandpo_lab.tasks.multiplication import EOS, Split, tokenizer
from studies import base_model

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Qwen2ForCausalLM

PLACES = 4


def code(key: str) -> str:
    """What opens the lock.

    >>> code("4071")
    '7304'
    """
    return "".join(str((int(digit) + 3) % 10) for digit in key)


def keys(split: Split, n: int, seed: int = 0) -> list[str]:
    """`n` different keys of a split, in random order; a tenth of the 10,000 belongs to `"eval"`.

    Raises:
        ValueError: unknown split, or `n` beyond the number of keys there are.

    >>> set(keys("train", 9000)) & set(keys("eval", 1000))
    set()
    """
    if split not in ("train", "eval"):
        raise InvalidValue(f"split={split!r}: choose one of train, eval")
    scattered = ["".join(digits) for digits in product("0123456789", repeat=PLACES)]
    random.Random(0).shuffle(scattered)
    held_out = len(scattered) // 10
    members = scattered[:held_out] if split == "eval" else scattered[held_out:]
    if not 0 <= n <= len(members):
        raise InvalidValue(f"n={n}: choose 0 to {len(members)}, the keys of the {split} split")
    return random.Random(seed).sample(members, n)


def dataset(split: Split, n: int, seed: int = 0) -> Dataset:
    """`keys` as a dataset in TRL's standard prompt-only format: plain-text columns `prompt` and `answer`.

    >>> dataset("train", 100).column_names
    ['prompt', 'answer']
    """
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{key}=", "answer": code(key)} for key in keys(split, n, seed)])


def reward(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1.0 for the whole code and nothing else, else 0.0; called as TRL calls reward functions.

    >>> reward(["7304", "7305", "73041"], ["7304"] * 3)
    [1.0, 0.0, 0.0]
    """
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


@dataclass(frozen=True)
class WarmUp:
    """How the base model is made.

    Raises:
        ValueError: a value out of range.
    """

    skill: float = field(
        default=0.3, metadata={"help": "probability of the right digit, above 0.1 and below 1"}
    )
    seed: int = field(default=0, metadata={"help": "of the weights and of the data"})
    steps: int = field(default=300, metadata={"help": "optimizer steps; a skill near 0.1 needs more"})
    batch_size: int = field(default=64, metadata={"help": "keys in a step"})
    learning_rate: float = field(default=2e-3, metadata={"help": "peak of the one-cycle schedule"})

    def __post_init__(self) -> None:
        if not 0.1 < self.skill < 1:
            raise InvalidValue(
                f"skill={self.skill}: choose a probability above 0.1 (pure guessing) and below 1"
            )
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise InvalidValue(f"{name}={getattr(self, name)}: choose at least 1")
        if not self.learning_rate > 0:
            raise InvalidValue(f"learning_rate={self.learning_rate}: choose a number above 0")


def warm_up(settings: WarmUp, *, progress: bool = True) -> Qwen2ForCausalLM:
    """Train the base model from scratch, by cross entropy against the wanted probabilities themselves.

    What stands at the other places is drawn from them too, so that a wrong digit does not disturb the next.
    """
    encoder, model = tokenizer(), base_model.fresh_model(settings.seed)
    ids = encoder.get_vocab()
    digits = torch.tensor([ids[str(digit)] for digit in range(10)])
    rng, drawn = random.Random(settings.seed), torch.Generator().manual_seed(settings.seed)
    pool = keys("train", 9000)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, settings.steps)
    for _ in tqdm(range(settings.steps), desc="warm-up", disable=not progress):
        chosen = rng.choices(pool, k=settings.batch_size)
        right = torch.tensor([[int(digit) for digit in code(key)] for key in chosen])
        wanted = torch.full((*right.shape, 10), (1 - settings.skill) / 9).scatter(
            -1, right[..., None], settings.skill
        )
        written = torch.multinomial(wanted.flatten(0, 1), 1, generator=drawn).view(right.shape)
        prompts = encoder([f"{key}=" for key in chosen], return_tensors="pt").input_ids
        logp = model(torch.cat([prompts, digits[written]], dim=1)).logits[:, PLACES:].log_softmax(-1)
        loss = -(wanted * logp[:, :-1, digits]).sum(-1).mean() - logp[:, -1, ids[EOS]].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def measure(model: Qwen2ForCausalLM, n: int = 256) -> dict[str, float]:
    """The exact mean probability, over `n` held-out keys, of the right digit and of the whole code."""
    encoder = tokenizer()
    asked = keys("eval", n)
    tokens = encoder([f"{key}={code(key)}{EOS}" for key in asked], return_tensors="pt").input_ids
    logp = model(tokens).logits[:, PLACES:-1].double().log_softmax(-1)
    logp = logp.gather(-1, tokens[:, PLACES + 1 :, None])[..., 0]
    return {"skill": logp[:, :-1].exp().mean().item(), "opens": logp.sum(1).exp().mean().item()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make, measure and save a base model."""
    base_model.make("studies.lock", WarmUp, warm_up, measure, arguments)


if __name__ == "__main__":
    main()
