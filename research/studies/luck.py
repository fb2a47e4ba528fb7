"""How fast an upper bound lets a rare right answer grow if wrong answers are sometimes rewarded by luck.

    PYTHONPATH=research python -m studies.luck

In each batch every answer with a rewarded sample rises from p to c(p)·p, where c is the upper bound, and the other
answers share what is left. This is what a policy does whose winners reach their bound in every batch. The growth of the
right answer's log-probability is simulated, and computed to first order:

    h·ln c(p_right) − Σ l_i·(c(p_i) − 1)·p_i

with the probability h that the right answer wins in a batch, and l_i that wrong answer i does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from bandpo import Band, FixedClip, Loosest, TotalVariation
from studies.bandits import RIGHT, zipf

if TYPE_CHECKING:
    from bandpo.core.rules import ClipRule

SAMPLES = 128
"""The samples of a batch."""
START = 0.01
"""The initial probability of the right answer."""
LUCK = (0.0, 0.05, 0.2)
"""The probabilities that a wrong answer is rewarded."""
CONSTANTS = np.exp(np.linspace(np.log(1.05), np.log(20.0), 120))
"""The constant bounds among which the best one is searched."""
CLIP = FixedClip(0.2)
RULES: Mapping[str, ClipRule] = {
    "clip 0.2": CLIP,
    "clip [.8, 2]": FixedClip(0.2, 1.0),
    "Band": Band(),
    "room by mass": Loosest(CLIP, Band(TotalVariation(), 0.02)),
}


def bounds_of(rule: ClipRule, p: np.ndarray) -> np.ndarray:
    """Return the upper bounds of a rule, of the shape of ``p``."""
    return rule.bounds(torch.from_numpy(p).log()).upper.numpy()


def winning(p: np.ndarray, luck: float) -> np.ndarray:
    """Return the probability that each answer has a rewarded sample in a batch; the first answer is right."""
    rewarded = np.full(len(p), luck)
    rewarded[0] = RIGHT
    return 1 - (1 - rewarded * p) ** SAMPLES


def first_order_growth(p: np.ndarray, bounds: np.ndarray, luck: float) -> float:
    """Compute the growth of the right answer's log-probability in a batch, in nats, to first order."""
    wins = winning(p, luck)
    return float(wins[0] * np.log(bounds[0]) - (wins * (bounds - 1) * p)[1:].sum())


def draw_winners(p: np.ndarray, luck: float, batches: int = 20_000) -> np.ndarray:
    """Draw which answers have a rewarded sample in each batch, of shape (batches, answers)."""
    rng = np.random.default_rng(0)
    samples = rng.multinomial(SAMPLES, p, batches)
    rewarded = np.full(len(p), luck)
    rewarded[0] = RIGHT
    return rng.binomial(samples, rewarded) > 0


def simulated_growth(p: np.ndarray, bounds: np.ndarray, wins: np.ndarray) -> float:
    """Compute the mean growth of the right answer's log-probability in simulated batches, in nats.

    Args:
        p: The probabilities of the answers.
        bounds: The upper bounds of their ratios.
        wins: The winners of each batch: `draw_winners`.

    >>> p, bounds = np.array([0.01, 0.99]), np.array([1.2, 1.0])
    >>> growth = simulated_growth(p, bounds, draw_winners(p, luck=0.0))
    >>> abs(growth - first_order_growth(p, bounds, luck=0.0)) < 0.003
    True
    """
    raised = np.where(wins, bounds * p, 0.0).sum(1)
    # Winners that would exceed a probability of 1 together are scaled down to 0.999.
    shrink = np.minimum(1.0, 0.999 / np.maximum(raised, 1e-12))
    others = np.where(wins, 0.0, p).sum(1)
    scale_of_others = np.where(others > 0, (1 - raised * shrink) / np.maximum(others, 1e-12), 1.0)
    growth = np.where(wins[:, 0], np.log(bounds[0] * shrink), np.log(scale_of_others))
    return float(growth.mean())


def rows() -> Iterator[str]:
    """Yield the rows of the table: the growth under each rule, by luck."""
    yield "| luck | " + " | ".join(RULES) + " | the best constant |"
    yield "|---|" + "---:|" * (len(RULES) + 1)
    p = np.array(zipf(START).start[0])
    for luck in LUCK:
        wins = draw_winners(p, luck)
        cells = []
        for rule in RULES.values():
            bounds = bounds_of(rule, p)
            cells.append(
                f"{simulated_growth(p, bounds, wins):+.2f} ({first_order_growth(p, bounds, luck):+.2f})"
            )
        growth = [simulated_growth(p, np.full(len(p), constant), wins) for constant in CONSTANTS]
        best = int(np.argmax(growth))
        edge = "≥ " if best == len(CONSTANTS) - 1 else ""
        cells.append(f"{growth[best]:+.2f}, at {edge}{CONSTANTS[best]:.2g}")
        yield f"| {luck:g} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("\n".join(rows()))
