"""The names of TRL on which the integration depends, and a check of them before training.

The names that are private in TRL may change in any version. A renamed one would stop a run with a bare AttributeError,
or without an error leave schedules at their first value, a record without rewards, or TRL's model card in place of
bandpo's. So a trainer checks at construction that all of them exist. What the names mean is compared by
`bandpo.integrations.trl.probe`, before the first batch. The names of TRL's clip metrics only exist once a loss has
logged them, so the trainers check them in each loss, the probe's included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import trl

from bandpo.core.errors import RunProblem


@dataclass(frozen=True, eq=False)
class TrainerNames:
    """The names of one trainer of TRL on which the integration depends.

    Attributes:
        trainer: The name of the trainer's class.
        tested: The versions of TRL with which bandpo was tested.
        of_class: Attributes of the class that bandpo overrides, calls or sets, each with what TRL does with it.
        of_trainer: Attributes of a constructed trainer that bandpo reads or sets, each with its meaning in TRL.
        of_config: Settings of its config that bandpo reads or sets, each with its meaning in TRL.
    """

    trainer: str
    tested: str
    of_class: Mapping[str, str]
    of_trainer: Mapping[str, str]
    of_config: Mapping[str, str]

    def check_config(self, config: Any) -> None:
        """Check that the installed class of the config has every setting of ``of_config``.

        Raises:
            RuntimeError: one is missing. The message has the version of TRL and the name.
        """
        settings = {setting.name for setting in fields(config)}
        for name, meaning in self.of_config.items():
            if name not in settings:
                raise self.missing(f"setting {name} of {config.__name__}", meaning)

    def check_class(self, trainer: type) -> None:
        """Check that the installed class of the trainer has every attribute of ``of_class``.

        Raises:
            RuntimeError: one is missing. The message has the version of TRL and the name.
        """
        for name, meaning in self.of_class.items():
            if not hasattr(trainer, name):
                raise self.missing(f"{self.trainer}.{name}", meaning)

    def check_trainer(self, trainer: Any) -> None:
        """Check that a constructed trainer has every attribute of ``of_trainer``.

        Raises:
            RuntimeError: one is missing. The message has the version of TRL and the name.
        """
        for name, meaning in self.of_trainer.items():
            if not hasattr(trainer, name):
                raise self.missing(f"attribute {name} of {self.trainer}", meaning)

    def missing(self, what: str, meaning: str) -> RunProblem:
        """Return the error about a name of TRL that does not exist.

        Args:
            what: The name, such as ``"GRPOTrainer._step"``.
            meaning: What it is or does, as the rest of a sentence.
        """
        return RunProblem(
            f"trl {trl.__version__} has no {what}, which in trl {self.tested} {meaning}; install "
            f"{'one of these versions' if ' ' in self.tested else 'this version'}"
        )


FORWARD = "_get_per_token_logps_and_entropies"
"""TRL's function that computes the log-probabilities of a loss."""

_OF_CLASS = {
    "_compute_loss": "computes the loss, which bandpo calls with a method's advantages",
    FORWARD: "computes a loss's log-probabilities, from which bandpo computes the advantages",
    "_generate_and_score_completions": "generates a batch, at which bandpo updates schedules and marks truncation",
    "_calculate_rewards": "scores a batch, from which bandpo records the rewards",
    "_save_checkpoint": "writes a checkpoint, before which bandpo writes the record",
    "get_off_policy_mask": "computes the off-policy mask, which bandpo applies",
    "create_model_card": "writes the model card, in which bandpo names the method",
    "_name": "names the method in the model card",
    "_paper": "names the paper in the model card",
    "_tag_names": "has the tags of the model card",
}
_OF_TRAINER = {
    "epsilon_low": "is a bound of the clip, which bandpo replaces",
    "epsilon_high": "is a bound of the clip, which bandpo replaces",
    "loss_type": "selects the loss aggregation",
    "importance_sampling_level": "selects ratios per token or per sequence",
    "beta": "is the coefficient of the KL term",
    "off_policy_mask_threshold": "is the threshold of the off-policy mask",
    "top_entropy_quantile": "is the share of tokens in the loss",
    "entropy_coef": "is the coefficient of the entropy bonus",
    "_entropy_bonus_enabled": "says if there is an entropy bonus",
    "_entropy_window_stats": "has the sums for the adaptive entropy bonus",
    "_last_world_entropy": "has the entropy that the adaptive entropy bonus compares",
    "aux_loss_enabled": "says if there is an auxiliary loss",
    "use_vllm": "says if vLLM generates",
    "vllm_importance_sampling_correction": "says if the loss has importance weights",
    "rollout_func": "generates in place of the trainer",
    "reward_funcs": "are the reward functions, whose failures bandpo names",
    "reward_func_names": "are their names",
    "temperature": "is the temperature of the log-probabilities",
    "max_completion_length": "normalises loss_type='dr_grpo'",
    "num_generations": "is the number of answers to each prompt",
    "num_iterations": "is the number of updates with each batch",
    "multi_objective_aggregation": "says how rewards are added up",
    "reward_weights": "has the weights of the rewards",
    "_step": "counts the losses, by which bandpo numbers batches and updates",
    "_metrics": "has the metrics of the next log",
    "_tokenizer": "has the ids of the tokens that end a completion",
}
_OF_CONFIG = {
    "epsilon": "is a bound of the clip, which a method replaces",
    "epsilon_high": "is a bound of the clip, which a method replaces",
    "delta": "is the upper bound of the ratio, which a method replaces",
    "loss_type": "selects the loss aggregation",
    "importance_sampling_level": "selects ratios per token or per sequence",
    "use_bias_correction_kl": "says if the KL term is multiplied by the ratio",
    "off_policy_mask_threshold": "is the threshold of the off-policy mask",
    "steps_per_generation": "is the number of losses for each generation",
    "num_iterations": "is the number of updates with each batch",
    "use_liger_kernel": "selects fused kernels",
    "temperature": "is the temperature of sampling",
    "top_p": "restricts the sampled tokens",
    "top_k": "restricts the sampled tokens",
    "min_p": "restricts the sampled tokens",
    "repetition_penalty": "changes the probabilities of sampling",
    "generation_kwargs": "has further settings of sampling",
}

GRPO = TrainerNames("GRPOTrainer", "1.10 to 1.16", _OF_CLASS, _OF_TRAINER, _OF_CONFIG)
"""The names of TRL's GRPOTrainer and GRPOConfig."""

_CLIP = "is a bound of the clip, which a method replaces"

ASYNC_GRPO = TrainerNames(
    "AsyncGRPOTrainer",
    "1.16",
    of_class={
        "compute_loss": "computes the loss, in whose place bandpo computes the method's",
        "get_train_dataloader": "makes the batches, to which bandpo adds versions, groups and rewards",
        "_sync_weight": "publishes a version of the weights, whose step bandpo keeps",
        "_save_checkpoint": _OF_CLASS["_save_checkpoint"],
        "create_model_card": _OF_CLASS["create_model_card"],
        "_name": _OF_CLASS["_name"],
        "_paper": _OF_CLASS["_paper"],
        "_tag_names": _OF_CLASS["_tag_names"],
    },
    of_trainer={
        "epsilon_low": _CLIP,
        "epsilon_high": _CLIP,
        "aux_loss_enabled": _OF_TRAINER["aux_loss_enabled"],
        "model_version": "counts the published versions of the weights",
        "eos_token_ids": "has the ids of the tokens that end a completion",
        "_metrics": _OF_TRAINER["_metrics"],
        "_rollout_dataset": "reads the samples from the queue, in which bandpo keeps their versions",
    },
    of_config={
        **{
            name: _OF_CONFIG[name]
            for name in ("epsilon", "epsilon_high", "temperature", "top_p", "top_k", "min_p")
        },
        "repetition_penalty": _OF_CONFIG["repetition_penalty"],
        "max_staleness": "is the largest number of versions between sampling and training",
        "weight_sync_steps": "is the number of optimiser steps from one version of the weights to the next",
        "token_budget": "is the number of tokens of a micro-batch",
    },
)
"""The names of TRL's AsyncGRPOTrainer and AsyncGRPOConfig, which may change in any version of TRL."""
