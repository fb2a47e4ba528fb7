"""Rewards of the network study's two special worlds. Both run on the prompts and the models of `multiplication`.

In `two_stages` the scratchpad makes no difference in the first half of training and is the only good answer from then
on: a rule that has lost it by half-time pays for it. In `coin_flips` there is nothing to learn, so whatever happens to
entropy is the rule's own doing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from bandpo_lab.tasks import multiplication
from bandpo_lab.tasks.multiplication import DIRECT, SCRATCHPAD

if TYPE_CHECKING:
    from transformers import TrainerState


def two_stages(
    completions: Sequence[str],
    answer: Sequence[str],
    prompts: Sequence[str],
    trainer_state: TrainerState | None = None,
    **columns: Any,
) -> list[float]:
    """Until half of the steps are made, direct answers are rewarded for an even number; after that, right ones are.

    A scratchpad completion of the first half is rewarded by chance, as often as the direct ones beside it: whether it
    is taken has no bearing on the reward.

    Completions of one prompt stand side by side. Without a state, as in an evaluation, the second half counts.

    >>> class Half: global_step, max_steps = 49, 100
    >>> two_stages(["|3222", "|3221", "|12", "|8"], ["3222"] * 4, ["537*6="] * 4, Half())
    [1.0, 0.0, 1.0, 1.0]
    >>> two_stages(["|3222", "|3221", "|12", "|8"], ["3222"] * 4, ["537*6="] * 4)
    [1.0, 0.0, 0.0, 0.0]
    """
    if trainer_state is None or 2 * trainer_state.global_step >= trainer_state.max_steps:
        return multiplication.reward(completions, answer)
    rng = random.Random(trainer_state.global_step)
    rewards: list[float] = []
    for _, group in groupby(zip(prompts, completions, strict=True), key=lambda pair: pair[0]):
        texts = [text for _, text in group]
        even = [text[-1:] in tuple("02468") for text in texts if not text.startswith(SCRATCHPAD)]
        chance = sum(even) / len(even) if even else 0.5
        direct = iter(even)
        for text in texts:
            # A coin is tossed for every completion, so that one more or less shifts no other's.
            coin = rng.random() < chance
            rewards.append(float(coin if text.startswith(SCRATCHPAD) else next(direct)))
    return rewards


def coin_flips(
    completions: Sequence[str], trainer_state: TrainerState | None = None, **columns: Any
) -> list[float]:
    """1.0 or 0.0 by the toss of a fair coin; the coins of a step are the same whatever is written.

    >>> coin_flips(["|1"] * 4) == coin_flips(["|2"] * 4)
    True
    """
    rng = random.Random(trainer_state.global_step if trainer_state else 0)
    return [float(rng.random() < 0.5) for _ in completions]


def any_opener(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """The task's reward, where a direct answer may also begin with one of `OPENERS`.

    >>> any_opener(["+3222", "|3222", "+3221", "3222"], ["3222"] * 4)
    [1.0, 1.0, 0.0, 0.0]
    """
    direct = [DIRECT + text[1:] if text[:1] in OPENERS else text for text in completions]
    return multiplication.reward(direct, answer)


OPENERS = tuple("+*=;>")
"""Other ways to open a direct answer: rare tokens that win now and then, by accident."""
