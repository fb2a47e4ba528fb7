"""Name the framework of a file that `rlvet lint` does not read, and say what to run instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

DIAGNOSE = "run `rlvet diagnose` on the log of its run"
"""The advice for a framework whose configurations are not read."""


@dataclass(frozen=True)
class OtherFramework:
    """A framework, or another kind of file, whose configurations are not read."""

    title: str
    """The name, as it is printed."""
    settings: Sequence[Sequence[str]] = ()
    """Names of settings that no other framework has. Each entry lists names that must all occur. They are the last
    parts of dotted names."""
    packages: Sequence[str] = ()
    """Packages that a Python script imports."""
    words: Sequence[str] = ()
    """Regular expressions for words of a command or a path."""
    instead: str = DIAGNOSE
    """The advice on what to run instead."""

    def is_imported(self, script: str) -> bool:
        """Return whether a Python script imports the framework."""
        return any(
            re.search(rf"^[ \t]*(?:from|import)[ \t]+{name}\b", script, re.MULTILINE)
            for name in self.packages
        )

    def is_in(self, text: str) -> bool:
        """Return whether a configuration or a shell script has a mark of the framework."""
        if any(all(_has_setting(text, name) for name in names) for names in self.settings):
            return True
        return any(re.search(word, text) for word in self.words)


def _has_setting(text: str, name: str) -> bool:
    """Return whether a text has a setting of this name: ``name: 1``, ``part.name=1`` or ``--name 1``."""
    name = re.escape(name)
    return bool(re.search(rf"(?<![\w-])(?:--{name}(?![\w-])|{name}\"?[ \t]*[:=])", text))


_SLIME_FLAGS = (
    ("n-samples-per-prompt", "num-rollout"),
    ("n-samples-per-prompt", "rollout-batch-size"),
    ("advantage-estimator", "rollout-batch-size"),
)
OTHER_FRAMEWORKS = (
    OtherFramework("ms-swift", (("rlhf_type",),), ("swift",), (r"\bswift\s+rlhf\b",)),
    # miles is a fork of slime, with its flags.
    OtherFramework("miles", packages=("miles",), words=(r"\bmiles/|\bMILES_\w+|/root/miles\b",)),
    OtherFramework("slime", _SLIME_FLAGS, ("slime",)),
    OtherFramework(
        "AReaL",
        (("max_head_offpolicyness",), ("allocation_mode", "gconfig"), ("gconfig", "actor")),
        ("areal",),
    ),
    OtherFramework(
        "NeMo-RL",
        (
            ("num_prompts_per_step",),
            ("num_generations_per_prompt",),
            ("async_grpo",),
            ("grpo", "megatron_cfg"),
            ("grpo", "dtensor_cfg"),
            ("policy", "megatron_cfg"),
            ("policy", "dtensor_cfg"),
        ),
        ("nemo_rl",),
    ),
    # EasyR1 and ROLL both have rollout_batch_size and adv_estimator.
    OtherFramework(
        "EasyR1",
        (("worker", "rollout_batch_size"), ("worker", "adv_estimator")),
        (),
        (r"\bverl\.trainer\.main\s",),
    ),
    OtherFramework(
        "ROLL",
        (
            ("actor_train", "actor_infer"),
            ("num_return_sequences_in_group",),
            ("actor_train", "adv_estimator"),
            ("rollout_batch_size", "adv_estimator"),
        ),
        ("roll",),
    ),
    OtherFramework("Tinker", packages=("tinker", "tinker_cookbook"), words=(r"-m\s+tinker_cookbook\.",)),
    OtherFramework(
        "an MLX program",
        (("train_mode", "group_size"),),
        (r"mlx\w*",),
        (r"\bmlx_models/|\bmlx-community/|-m\s+mlx_\w+",),
    ),
)
"""The frameworks that are named, in the order in which they are looked for."""


def named(text: str, path: str) -> OtherFramework | None:
    """Return the framework that a text has a mark of; None if it has none.

    Args:
        text: The text of a file without a configuration of a framework that is read.
        path: The path of the file. Its suffix determines the format.

    >>> named("swift rlhf --rlhf_type grpo --num_generations 8", "run.sh").title
    'ms-swift'
    """
    if not may_configure(text):
        return None
    if path.lower().endswith(".py"):
        return next((framework for framework in OTHER_FRAMEWORKS if framework.is_imported(text)), None)
    return next((framework for framework in OTHER_FRAMEWORKS if framework.is_in(text)), None)


_GROUP_WORDS = (
    "rollout",
    "grpo",
    "GRPO",
    "group_size",
    "num_generations",
    "n_samples",
    "rlhf",
    "advantage",
    "adv_",
)
"""Words of which each configuration of such training has at least one. A file without them is no configuration."""


def may_configure(text: str) -> bool:
    """Return whether a text has a word of such training."""
    return any(word in text for word in _GROUP_WORDS)
