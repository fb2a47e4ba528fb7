"""The trainers of verl that a recipe can run in: their entry points, configs, and the settings that old data needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

ModeName = Literal["sync", "colocate_async", "separate_async", "fully_async", "one_step_off"]
"""The names of the modes. All but `sync` train on data that older weights have sampled."""
MODES = get_args(ModeName)
ANCHOR = (
    "algorithm.rollout_correction.bypass_mode=true",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
)
"""The settings with which the ratio refers to the policy that sampled."""


@dataclass(frozen=True)
class EntryPoint:
    """A program of verl that trains, and its main config."""

    module: str
    config_name: str
    config_folder: str
    """The folder of the config, within the package verl."""
    search_path: str | None = None
    """The place of verl's other configs, if the main config names a path that only a clone of verl has."""

    def command(self, config_dir: Path | None) -> list[str]:
        """Return the arguments of Python that start the program, up to the overrides.

        Args:
            config_dir: A folder with further config files, such as recipes.
        """
        config_options = [] if config_dir is None else ["--config-dir", str(config_dir.resolve())]
        search_path = [] if self.search_path is None else [f"hydra.searchpath=[{self.search_path}]"]
        return ["-m", self.module, *config_options, *search_path]


SEARCH_PATH = "pkg://verl.trainer.config"
"""The place of verl's configs, in an installed verl."""
MAIN = EntryPoint("verl.trainer.main_ppo", "ppo_trainer", "trainer/config")
FULLY_ASYNC = EntryPoint(
    "verl.experimental.fully_async_policy.fully_async_main",
    "fully_async_ppo_trainer",
    "experimental/fully_async_policy/config",
)
ONE_STEP_OFF = EntryPoint(
    "verl.experimental.one_step_off_policy.main_ppo",
    "one_step_off_ppo_trainer",
    "experimental/one_step_off_policy/config",
    SEARCH_PATH,
)


def entry_point(mode: ModeName) -> EntryPoint:
    """Return the program of a mode."""
    return {"fully_async": FULLY_ASYNC, "one_step_off": ONE_STEP_OFF}.get(mode, MAIN)


def entry_point_of(config_name: str) -> EntryPoint:
    """Return the program with a main config."""
    return {program.config_name: program for program in (MAIN, FULLY_ASYNC, ONE_STEP_OFF)}[config_name]


def mode_of(config: Any) -> ModeName:
    """Return the mode in which verl trains with a composed config."""
    from bandpo.integrations.verl import settings

    return cast(ModeName, settings.mode_of(config))


def has_separate_sampler(mode: ModeName) -> bool:
    """Return True if the sampler has GPUs of its own in a mode."""
    return mode in ("separate_async", "fully_async", "one_step_off")


def mode_overrides(mode: ModeName) -> list[str]:
    """Return the overrides that turn a recipe for the synchronous trainer into one for a mode.

    In an asynchronous mode, the ratio refers to the policy that sampled. A sampler with GPUs of its own has one node,
    with as many GPUs as a node of the trainer. The overrides of a recipe or of a user come after these.

    >>> mode_overrides("colocate_async")[0]
    'trainer.v1.trainer_mode=colocate_async'
    """
    if mode == "sync":
        return []
    own_nodes = ["rollout.nnodes=1", "rollout.n_gpus_per_node=${trainer.n_gpus_per_node}"]
    separate = "actor_rollout_ref.hybrid_engine=false"
    rollout = "actor_rollout_ref.rollout."
    settings = {
        "colocate_async": ["trainer.v1.trainer_mode=colocate_async"],
        "separate_async": [
            "trainer.v1.trainer_mode=separate_async",
            f"{rollout}checkpoint_engine.backend=nccl",
            *[rollout.removesuffix("rollout.") + setting for setting in own_nodes],
        ],
        # This trainer has no batch: its rollouts are prompts, as many as the epochs have.
        "fully_async": [
            separate,
            *own_nodes,
            "data.train_batch_size=0",
            "data.gen_batch_size=1",
            "rollout.total_rollout_steps=null",
        ],
        "one_step_off": [separate, *own_nodes],
    }
    return [*settings[mode], *ANCHOR]
