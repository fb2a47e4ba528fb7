"""The methods that verl refuses with the settings of the recipes, found from their text alone, without verl."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.errors import InvalidValue

if TYPE_CHECKING:
    from bandpo.core.methods import Method

ACTOR = "actor_rollout_ref.actor."
BYPASS = "algorithm.rollout_correction.bypass_mode"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
MICRO_BATCH = f"{ACTOR}ppo_micro_batch_size_per_gpu"
UNSPLIT = (
    f"{ACTOR}use_dynamic_bsz=false",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
)
"""The settings beside `MICRO_BATCH` for one micro-batch in a mini-batch; verl refuses the first without the others."""


def check_for_verl(method: str, is_asynchronous: bool, overrides: Sequence[str], recipes: Path) -> None:
    """Check that verl accepts a method with the settings of the recipes.

    verl's driver has the same checks of the composed settings. These need no verl, so that a command that verl would
    refuse is not printed. A setting that the user has in an override or in their own recipes is left to the driver.

    Args:
        method: The text of a method that is not a rule of the recipes.
        is_asynchronous: True if the mode is not ``sync``: the ratio then refers to the policy that sampled.
        overrides: The user's overrides.
        recipes: The folder of the recipes.

    Raises:
        ValueError: verl would refuse the method. The message has the reason, the nearest method that works, and the
            settings with which this one does.
    """
    from bandpo.core.text import importable_current_folder
    from bandpo.integrations._adapt import read_method

    with importable_current_folder():
        parsed = read_method("--", method, whole_batch=True)
    if parsed.old_policy == "rollout" and not is_asynchronous and not _is_set(BYPASS, overrides, recipes):
        nearest = replace(parsed, old_policy="trainer")
        raise InvalidValue(
            f"--method {method!r}: its ratio refers to the log-probabilities of the rollout engine, and the recipes "
            f"have the trainer's own. For the engine's, add the overrides {BYPASS}=true {LOG_PROBS}=true, or take an "
            f"asynchronous --mode. For the trainer's, take --method {str(nearest)!r}"
        )
    if parsed.whole_batch and not _is_set(MICRO_BATCH, overrides, recipes):
        raise InvalidValue(
            f"--method {method!r}: it has sums over a whole mini-batch, and the recipes have several micro-batches in "
            f"one.{_nearest_per_token(parsed)} If all responses of a mini-batch, divided by the number of GPUs, fit "
            f"into a GPU's memory, add the overrides {' '.join(UNSPLIT)} {MICRO_BATCH}=, with that number"
        )


def _nearest_per_token(method: Method) -> str:
    """Return a sentence with the nearest method that looks at one token at a time; empty if none is known.

    >>> from bandpo.core.methods import BAPO
    >>> _nearest_per_token(BAPO())
    " Its bounds before it widens them are those of --method 'FixedClip(0.4, 0.2)'."
    """
    from bandpo.core.objectives import CovarianceMask, CovariancePenalty
    from bandpo.core.token_rules import BalancedBounds, SecondMoment

    if isinstance(method.clip, BalancedBounds):
        low, high = 1 - float(method.clip.lower), float(method.clip.upper) - 1
        return f" Its bounds before it widens them are those of --method 'FixedClip({low:.4g}, {high:.4g})'."
    if isinstance(method.clip, SecondMoment):
        return " On old data it gained nothing sure over --method 'FixedClip(0.2, 1.0)', which works."
    if isinstance(method.objective, (CovarianceMask, CovariancePenalty)):
        return " For the same purpose, to keep entropy, --method 'CEGPPO()' is published, and was not measured here."
    return ""


def _is_set(setting: str, overrides: Sequence[str], recipes: Path) -> bool:
    """Return True if the user sets a setting to other than false, in an override or in their own recipes."""
    values = [
        value
        for key, _, value in (override.lstrip("+").partition("=") for override in overrides)
        if key == setting
    ]
    if values:
        return values[-1].lower() not in ("false", "null", "")
    return _lines(setting, recipes) != _lines(setting, SHIPPED)


def _lines(setting: str, recipes: Path) -> list[str]:
    """Return the lines of all recipes that have the last word of a setting."""
    line = re.compile(rf"^\s*{setting.rpartition('.')[2]}:\s*([^\s#]+)", re.MULTILINE)
    texts = (path.read_text(encoding="utf-8") for path in sorted(recipes.rglob("*.yaml")))
    return [value for text in texts for value in line.findall(text)]
