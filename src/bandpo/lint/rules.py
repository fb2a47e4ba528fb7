"""What is checked: one entry for each rule and framework."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bandpo.lint.configuration import Configuration, Setting, Unread
from bandpo.lint.frameworks import FRAMEWORKS

SEVERITIES = ("error", "warning", "note")
"""Of a rule: the run stops or trains something else; a risk; worth knowing, or true of earlier versions only."""


class NotRead(Exception):
    """A rule needs a value that the configuration does not tell. The message says which, and why."""


@dataclass(frozen=True)
class Shown:
    """A setting as a message shows it: ``{x}`` is its value, ``{x.name}`` its name."""

    name: str
    value: Any

    def __str__(self) -> str:
        if isinstance(self.value, Unread):
            return self.value.reason
        return f"{self.value:g}" if isinstance(self.value, float) else str(self.value)


class Values:
    """The settings that a rule reads, as attributes by the rule's short names for them.

    A setting that is not in the configuration has the framework's default.

    Args:
        configuration: The configuration.
        reads: The dotted name of each setting by its short name.
    """

    def __init__(self, configuration: Configuration, reads: Mapping[str, str]):
        self._configuration = configuration
        self._reads = reads

    def __getattr__(self, short_name: str) -> Any:
        """Return the value of a setting.

        Raises:
            NotRead: if it is not known.
        """
        name = self._reads[short_name]
        setting = self._configuration.settings.get(name)
        if setting is None:
            if self._configuration.incomplete:
                raise NotRead(f"{name} may come from {self._configuration.incomplete}")
            return FRAMEWORKS[self._configuration.framework].defaults[name]
        if isinstance(setting.value, Unread):
            raise NotRead(f"{setting.name} is {setting.value.reason}")
        return setting.value

    def is_set(self, *short_names: str) -> bool:
        """Return whether the configuration names one of the settings.

        Raises:
            NotRead: if it names none, and is not complete.
        """
        names = [self._reads[short_name] for short_name in short_names]
        if any(name in self._configuration.settings for name in names):
            return True
        if self._configuration.incomplete:
            raise NotRead(f"{names[0]} may come from {self._configuration.incomplete}")
        return False

    def known(self, short_name: str) -> Any:
        """Return the value of a setting; None if it is not known."""
        try:
            return getattr(self, short_name)
        except NotRead:
            return None

    def setting(self, short_name: str) -> Setting | None:
        """Return the setting as the configuration names it; None if it does not."""
        return self._configuration.settings.get(self._reads[short_name])

    def shown(self, short_name: str) -> Shown:
        """Return the setting for a message, under the name that the configuration has for it."""
        setting = self.setting(short_name)
        name = self._reads[short_name] if setting is None else setting.name
        return Shown(name, self.known(short_name) if setting is None else setting.value)


@dataclass(frozen=True)
class Rule:
    """One check of the configurations of one framework."""

    id: str
    framework: str
    """A key of `FRAMEWORKS`."""
    severity: str
    """One of `SEVERITIES`."""
    title: str
    """What is wrong, in a few words."""
    reads: Mapping[str, str]
    """Short names of the settings that it reads, with their dotted names. A finding stands at the first that is set."""
    condition: Callable[[Values], bool]
    """Whether the configuration has the fault."""
    happens: str
    """What happens, with ``{short name}`` for a value and ``{short name.name}`` for the name of a setting."""
    fix: str
    """What to change, in the framework's own names."""
    source: str
    """Where it is shown: a paper, the framework's source or documentation, or a thread."""


ONE_UPDATE = (
    "Each batch gets one update, and the ratio of new and old probabilities is taken before it: it is 1 for every "
    "token, and no clip acts."
)
"""What makes a clip idle."""
TRUNCATED_SAMPLING = (
    "The engine reports probabilities among the tokens that are left, the trainer computes them among all. Every "
    "importance weight is multiplied by the probability of what is left, which is no change of the policy."
)
ONE_ANSWER = "The advantage of an answer is measured against the other answers to its prompt, and there are none: "
TWO_ANSWERS = (
    "With two answers to a prompt, division by their spread makes every advantage plus or minus one constant, however "
    "little the rewards differ."
)
GSPO_RANGE = (
    "GSPO clips the geometric mean of the ratios of an answer, which stays near 1: its paper clips at 3e-4 and 4e-4. "
    "At 0.05 and more, hardly an answer is clipped."
)
ASYNCHRONOUS = (
    "The old probabilities are computed by the trainer, from weights that are newer than those that sampled the "
    "answers. The ratio does not measure the distance from the sampler, so the clip does not bound it."
)
GSPO_PAPER = "Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, section 5.1; huggingface/trl issue 3834"
LARGEST_RATES = ((2.0, 3e-5), (float("inf"), 1e-5))
"""Largest learning rates of full fine-tuning that pass, for models below so many billions of parameters. Published runs
use 5e-7 to 3e-6."""
LARGEST_RATE_UNKNOWN = 3e-5
LARGEST_RATE_LORA = 2e-4
RATE_HAPPENS = (
    "{rate.name} is {rate}. Published reinforcement learning of language models uses 5e-7 to 3e-6 for all weights and "
    "1e-6 to 1e-4 for LoRA. Far above that, a few steps move the policy to noise."
)
RATE_SOURCE = (
    "DAPO, arXiv 2503.14476 (32B: 1e-6); DeepSeekMath, arXiv 2402.03300 (7B: 1e-6); Tülu 3, arXiv 2411.15124 (8B: "
    "3e-7); Schulman et al., LoRA Without Regret, 2025 (LoRA: ten times that of all weights)"
)


def billions(model: Any) -> float | None:
    """Return the billions of parameters that a model's name tells; None if it tells none.

    >>> billions("Qwen/Qwen2.5-0.5B-Instruct"), billions("gpt2"), billions("Qwen3-30B-A3B")
    (0.5, None, 30.0)
    """
    match = re.search(r"(?<![A-Za-z0-9.])(\d{1,4}(?:\.\d{1,3})?)[bB](?![A-Za-z0-9])", str(model))
    return float(match[1]) if match else None


def rate_is_high(rate: Any, lora: Any, model: Any) -> bool:
    """Return whether a learning rate is far above those of published runs.

    >>> rate_is_high(2e-5, False, "Qwen2.5-7B"), rate_is_high(2e-5, True, "Qwen2.5-7B")
    (True, False)
    """
    if lora:
        return rate > LARGEST_RATE_LORA
    size = billions(model)
    if size is None:
        return rate > LARGEST_RATE_UNKNOWN
    return rate > next(largest for below, largest in LARGEST_RATES if size < below)


def _largest(*values: Any) -> float:
    """Return the largest of some numbers; None is left out."""
    return max(value for value in values if value is not None)


# TRL

TRL_CLIPS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo")
TRL_UPDATES = {
    "accumulation": "gradient_accumulation_steps",
    "steps": "steps_per_generation",
    "batch": "generation_batch_size",
    "iterations": "num_iterations",
}


def _trl_updates_once(v: Values) -> bool:
    if v.steps is None and v.batch is not None:
        # The batch is divided by the number of processes, which no configuration tells.
        raise NotRead("steps_per_generation follows from generation_batch_size and the number of processes")
    steps = v.accumulation if v.steps is None else v.steps
    return v.accumulation % (steps * v.iterations) == 0


def _trl_truncates(v: Values) -> bool:
    return v.top_p < 1 or (v.top_k or 0) > 0 or (v.min_p or 0) > 0


def _processes_of_trl(v: Values) -> int:
    """Return the number that must divide the number of processes."""
    from math import gcd

    if v.batch is not None:
        return 1
    steps = v.accumulation if v.steps is None else v.steps
    return v.group // gcd(v.group, v.device_batch * steps)


TRL_SOURCE = "trl 1.16.0, trl/trainer/grpo_trainer.py, _generate_and_score_completions and _compute_loss"

TRL_RULES = (
    Rule(
        id="clip-cannot-act",
        framework="trl",
        severity="warning",
        title="the clip cannot act",
        reads={
            "high": "epsilon_high",
            "low": "epsilon",
            "delta": "delta",
            "loss": "loss_type",
            **TRL_UPDATES,
        },
        condition=lambda v: v.is_set("high", "low", "delta") and v.loss in TRL_CLIPS and _trl_updates_once(v),
        happens=ONE_UPDATE + " epsilon {low}, epsilon_high {high} and delta {delta} change nothing.",
        fix="num_iterations above 1, or steps_per_generation above gradient_accumulation_steps; or leave epsilon, "
        "epsilon_high and delta out",
        source="huggingface/trl issue 3120; " + TRL_SOURCE,
    ),
    Rule(
        id="truncated-sampling",
        framework="trl",
        severity="warning",
        title="sampling is truncated, and importance weights are taken",
        reads={
            "top_p": "top_p",
            "top_k": "top_k",
            "min_p": "min_p",
            "vllm": "use_vllm",
            "weight": "vllm_importance_sampling_correction",
        },
        condition=lambda v: _trl_truncates(v) and v.vllm and v.weight,
        happens=TRUNCATED_SAMPLING + " top_p is {top_p}, top_k {top_k}, min_p {min_p}.",
        fix="top_p=1.0, top_k=0 and min_p=None; or vllm_importance_sampling_correction=False",
        source="huggingface/trl issue 6789; " + TRL_SOURCE,
    ),
    Rule(
        id="liger-drops-the-weight",
        framework="trl",
        severity="note",
        title="Liger's loss leaves out the importance weight in TRL before 0.29",
        reads={
            "liger": "use_liger_kernel",
            "vllm": "use_vllm",
            "weight": "vllm_importance_sampling_correction",
        },
        condition=lambda v: bool(v.liger and v.vllm and v.weight),
        happens="TRL before 0.29 does not hand the weight of vLLM's answers to Liger's loss, and a gradient norm 100 "
        "times larger was reported. TRL 1.14 and later do not use Liger's loss.",
        fix="trl>=0.29 with a liger-kernel that takes vllm_is_ratio, or {liger.name}=False",
        source="linkedin/Liger-Kernel issue 1082 and pull request 1088; huggingface/trl pull request 5031",
    ),
    Rule(
        id="gspo-clip",
        framework="trl",
        severity="warning",
        title="the clip of GSPO is that of GRPO",
        reads={
            "level": "importance_sampling_level",
            "low": "epsilon",
            "high": "epsilon_high",
            "loss": "loss_type",
        },
        condition=lambda v: v.level == "sequence" and v.loss in TRL_CLIPS[:-1] and _largest(v.low, v.high) >= 0.05,
        happens=GSPO_RANGE + " epsilon is {low}, epsilon_high {high}.",
        fix="epsilon=3e-4, epsilon_high=4e-4",
        source=GSPO_PAPER,
    ),
    Rule(
        id="batch-does-not-divide",
        framework="trl",
        severity="error",
        title="a generation batch does not hold whole groups",
        reads={"batch": "generation_batch_size", "group": "num_generations"},
        condition=lambda v: v.batch is not None and v.batch % v.group != 0,
        happens="generation_batch_size {batch} is no multiple of num_generations {group}: GRPOConfig refuses it.",
        fix="a generation_batch_size that is a multiple of num_generations",
        source="trl 1.16.0, trl/trainer/grpo_config.py, __post_init__",
    ),
    Rule(
        id="batch-set-twice",
        framework="trl",
        severity="error",
        title="the generation batch is set twice",
        reads={"batch": "generation_batch_size", "steps": "steps_per_generation"},
        condition=lambda v: v.batch is not None and v.steps is not None,
        happens="generation_batch_size and steps_per_generation are both set: GRPOConfig refuses it.",
        fix="one of the two",
        source="trl 1.16.0, trl/trainer/grpo_config.py, __post_init__",
    ),
    Rule(
        id="processes-must-divide",
        framework="trl",
        severity="note",
        title="only some numbers of processes make whole groups",
        reads={
            "group": "num_generations",
            "device_batch": "per_device_train_batch_size",
            "steps": "steps_per_generation",
            "accumulation": "gradient_accumulation_steps",
            "batch": "generation_batch_size",
        },
        condition=lambda v: v.is_set("group", "device_batch", "steps", "accumulation") and _processes_of_trl(v) > 1,
        happens="A generation batch is per_device_train_batch_size {device_batch} times steps_per_generation (by default "
        "gradient_accumulation_steps, {accumulation}) for each process. It holds whole groups of num_generations {group} "
        "with some numbers of processes alone; GRPOConfig refuses the others, one process among them.",
        fix="a number of processes for which the product is a multiple of num_generations",
        source="trl 1.16.0, trl/trainer/grpo_config.py, __post_init__",
    ),
    Rule(
        id="group-of-one",
        framework="trl",
        severity="error",
        title="one answer to each prompt",
        reads={"group": "num_generations"},
        condition=lambda v: v.group < 2,
        happens=ONE_ANSWER + "GRPOConfig refuses num_generations {group}.",
        fix="num_generations=8",
        source="trl 1.16.0, trl/trainer/grpo_config.py, __post_init__",
    ),
    Rule(
        id="group-of-two",
        framework="trl",
        severity="note",
        title="two answers to each prompt",
        reads={"group": "num_generations"},
        condition=lambda v: v.group == 2,
        happens=TWO_ANSWERS,
        fix="num_generations=8, or scale_rewards='none'",
        source="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.1",
    ),
    Rule(
        id="lora-reference",
        framework="trl",
        severity="note",
        title="the KL term is taken to the base model, not to the adapter, in TRL before 0.27",
        reads={"adapter": "model.adapter", "beta": "beta"},
        condition=lambda v: bool(v.adapter and v.beta),
        happens="The model has an adapter that is already trained, and beta is {beta}. TRL before 0.27 takes the "
        "reference by turning the adapter off, so the KL is large at the first step and pulls back to the base model.",
        fix="trl>=0.27, which keeps a copy of the adapter; or merge the adapter first; or beta=0.0",
        source="huggingface/trl issue 3194 and pull request 4723",
    ),
    Rule(
        id="mean-depends-on-micro-batch",
        framework="trl",
        severity="note",
        title="the loss depends on how a batch is split",
        reads={
            "loss": "loss_type",
            "accumulation": "gradient_accumulation_steps",
            "device_batch": "per_device_train_batch_size",
        },
        condition=lambda v: v.loss == "bnpo" and v.accumulation > 1,
        happens="loss_type 'bnpo' divides by the tokens of each micro-batch: a token weighs more in a micro-batch of "
        "short answers, and another per_device_train_batch_size gives another loss.",
        fix="loss_type='dapo', which divides by the tokens of the whole batch",
        source=TRL_SOURCE,
    ),
    Rule(
        id="learning-rate",
        framework="trl",
        severity="warning",
        title="the learning rate is far above published ones",
        reads={"rate": "learning_rate", "model": "model_name_or_path", "lora": "use_peft"},
        condition=lambda v: v.rate > LARGEST_RATES[-1][1] and rate_is_high(v.rate, v.lora, v.known("model")),
        happens=RATE_HAPPENS,
        fix="learning_rate=1e-6, or 1e-5 with LoRA",
        source=RATE_SOURCE,
    ),
)

# verl

VERL_ACTOR = "actor_rollout_ref.actor."
VERL_CORRECTION = "algorithm.rollout_correction."
VERL_CLIPS = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "geo_mean", "cispo", "clip_cov")
VERL_GROUPS = ("grpo", "grpo_passk", "grpo_vectorized", "rloo", "rloo_vectorized", "gdpo", "opo")
VERL_UPDATES = {
    "train": "data.train_batch_size",
    "mini": f"{VERL_ACTOR}ppo_mini_batch_size",
    "epochs": f"{VERL_ACTOR}ppo_epochs",
}
VERL_ASYNC = {
    "program": "program",
    "mode": "trainer.v1.trainer_mode",
    "v1": "trainer.use_v1",
    "bypass": f"{VERL_CORRECTION}bypass_mode",
    "weight": f"{VERL_CORRECTION}rollout_is",
    "reject": f"{VERL_CORRECTION}rollout_rs",
}
VERL_ASYNC_PROGRAMS = ("fully_async", "one_step_off")


def _verl_is_async(v: Values) -> bool:
    other_program = any(part in v.program for part in VERL_ASYNC_PROGRAMS)
    return other_program or bool(v.v1 and v.mode in ("colocate_async", "separate_async"))


def _verl_program(v: Values) -> None:
    """Refuse to judge a program that is not verl's, and may make its batches and groups otherwise.

    Raises:
        NotRead: if the program is another.
    """
    if v.program and not v.program.startswith("verl."):
        raise NotRead(f"{v.program} is no program of verl, and may make its batches and groups otherwise")


def _verl_is_single(v: Values) -> bool:
    if v.estimator not in VERL_GROUPS or v.group != 1:
        return False
    _verl_program(v)
    # A teacher's signal needs no group.
    return not v.distillation


def _verl_batch_is_broken(v: Values) -> bool:
    if v.train % v.mini == 0:
        return False
    _verl_program(v)
    return True


def _verl_lora(v: Values) -> bool:
    return bool(v.lora_rank or v.lora or v.adapter)


VERL_RULES = (
    Rule(
        id="clip-cannot-act",
        framework="verl",
        severity="warning",
        title="the clip cannot act",
        reads={
            "high": f"{VERL_ACTOR}clip_ratio_high",
            "low": f"{VERL_ACTOR}clip_ratio_low",
            "clip": f"{VERL_ACTOR}clip_ratio",
            "loss": f"{VERL_ACTOR}policy_loss.loss_mode",
            **VERL_UPDATES,
            **VERL_ASYNC,
        },
        condition=lambda v: (
            v.is_set("high", "low", "clip")
            and v.loss in VERL_CLIPS
            and v.train == v.mini
            and v.epochs == 1
            and not v.bypass
            and not _verl_is_async(v)
        ),
        happens=ONE_UPDATE + " {train.name} and {mini.name} are both {train}, and {epochs.name} is {epochs}: "
        "clip_ratio_low {low} and clip_ratio_high {high} change nothing.",
        fix="actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size, or "
        "actor_rollout_ref.actor.ppo_epochs above 1; or leave the clip out",
        source="verl-project/verl issue 791; BytedTsinghua-SIA/DAPO issues 11 and 23; verl 0.9.1, "
        "verl/trainer/ppo/v1/trainer_base.py, _update_actor",
    ),
    Rule(
        id="asynchronous-anchor",
        framework="verl",
        severity="warning",
        title="the ratio is not measured from what sampled",
        reads={
            **VERL_ASYNC,
            "older": "async_training.use_rollout_log_probs",
        },
        condition=lambda v: (
            _verl_is_async(v) and not v.bypass and v.weight is None and v.reject is None and not v.older
        ),
        happens=ASYNCHRONOUS + " No importance weight corrects it.",
        fix="algorithm.rollout_correction.bypass_mode=True, which measures from the sampler, or "
        "algorithm.rollout_correction.rollout_is=token",
        source="verl 0.9.1, verl/trainer/ppo/v1/trainer_separate_async.py, _compute_old_log_prob; radixark/miles pull "
        "request 1829",
    ),
    Rule(
        id="truncated-sampling",
        framework="verl",
        severity="warning",
        title="sampling is truncated, and importance weights are taken",
        reads={
            "top_p": "actor_rollout_ref.rollout.top_p",
            "top_k": "actor_rollout_ref.rollout.top_k",
            "weight": f"{VERL_CORRECTION}rollout_is",
            "reject": f"{VERL_CORRECTION}rollout_rs",
            "bypass": f"{VERL_CORRECTION}bypass_mode",
        },
        condition=lambda v: (
            (v.top_p < 1 or v.top_k > 0) and bool(v.weight is not None or v.reject is not None or v.bypass)
        ),
        happens=TRUNCATED_SAMPLING + " top_p is {top_p}, top_k {top_k}.",
        fix="actor_rollout_ref.rollout.top_p=1.0 and actor_rollout_ref.rollout.top_k=-1",
        source="huggingface/trl issue 6789, of the same arithmetic; verl 0.9.1, verl/workers/config/rollout.py "
        "(logprobs_mode: processed_logprobs)",
    ),
    Rule(
        id="gspo-clip",
        framework="verl",
        severity="warning",
        title="the clip of GSPO is that of GRPO",
        reads={
            "loss": f"{VERL_ACTOR}policy_loss.loss_mode",
            "low": f"{VERL_ACTOR}clip_ratio_low",
            "high": f"{VERL_ACTOR}clip_ratio_high",
        },
        condition=lambda v: v.loss == "gspo" and _largest(v.low, v.high) >= 0.05,
        happens=GSPO_RANGE + " clip_ratio_low is {low}, clip_ratio_high {high}.",
        fix="actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4",
        source=GSPO_PAPER + "; verl-project/verl pull request 2775, by an author of the paper",
    ),
    Rule(
        id="batch-does-not-divide",
        framework="verl",
        severity="error",
        title="a batch does not hold whole mini-batches",
        reads={
            "train": "data.train_batch_size",
            "mini": f"{VERL_ACTOR}ppo_mini_batch_size",
            "program": "program",
        },
        condition=_verl_batch_is_broken,
        happens="data.train_batch_size {train} is no multiple of ppo_mini_batch_size {mini}: the actor's update stops "
        "with an assertion.",
        fix="a data.train_batch_size that is a multiple of actor_rollout_ref.actor.ppo_mini_batch_size",
        source="verl 0.9.1, verl/utils/tensordict_utils.py, make_iterator; verl/workers/config/actor.py, validate",
    ),
    Rule(
        id="batch-does-not-divide-among-gpus",
        framework="verl",
        severity="error",
        title="the answers of a batch do not divide among the GPUs",
        reads={
            "train": "data.train_batch_size",
            "group": "actor_rollout_ref.rollout.n",
            "gpus": "trainer.n_gpus_per_node",
            "nodes": "trainer.nnodes",
            "dynamic": f"{VERL_ACTOR}use_dynamic_bsz",
            "strategy": f"{VERL_ACTOR}strategy",
            "program": "program",
        },
        condition=lambda v: (
            not v.dynamic
            and v.strategy in ("fsdp", "fsdp2")
            and not any(part in v.program for part in VERL_ASYNC_PROGRAMS)
            and v.train * v.group % (v.gpus * v.nodes) != 0
        ),
        happens="data.train_batch_size {train} times rollout.n {group} is no multiple of {gpus} times {nodes} GPUs: verl "
        "stops before it trains.",
        fix="a data.train_batch_size for which the product is a multiple of trainer.n_gpus_per_node × trainer.nnodes",
        source="verl 0.9.1, verl/utils/config.py, validate_config",
    ),
    Rule(
        id="group-of-one",
        framework="verl",
        severity="error",
        title="one answer to each prompt",
        reads={
            "group": "actor_rollout_ref.rollout.n",
            "estimator": "algorithm.adv_estimator",
            "program": "program",
            "distillation": "distillation.enabled",
        },
        condition=_verl_is_single,
        happens=ONE_ANSWER + "{estimator} then takes the reward itself as the advantage, without a baseline.",
        fix="actor_rollout_ref.rollout.n=8",
        source="verl 0.9.1, verl/trainer/ppo/core_algos.py, compute_grpo_outcome_advantage",
    ),
    Rule(
        id="group-of-two",
        framework="verl",
        severity="note",
        title="two answers to each prompt",
        reads={
            "group": "actor_rollout_ref.rollout.n",
            "estimator": "algorithm.adv_estimator",
            "spread": "algorithm.norm_adv_by_std_in_grpo",
        },
        condition=lambda v: v.estimator in VERL_GROUPS[:3] and v.group == 2 and bool(v.spread),
        happens=TWO_ANSWERS,
        fix="actor_rollout_ref.rollout.n=8, or algorithm.norm_adv_by_std_in_grpo=False",
        source="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.1",
    ),
    Rule(
        id="lora-reference",
        framework="verl",
        severity="warning",
        title="the KL term is taken to the base model, not to the adapter",
        reads={
            "adapter": "actor_rollout_ref.model.lora_adapter_path",
            "loss": f"{VERL_ACTOR}use_kl_loss",
            "reward": "algorithm.use_kl_in_reward",
        },
        condition=lambda v: v.is_set("adapter")
        and bool(v.loss or v.reward)
        and (v.known("adapter") is not None or isinstance(getattr(v.setting("adapter"), "value", None), Unread)),
        happens="The run begins with the adapter {adapter}, and the reference is computed with every adapter turned "
        "off: the KL is large at the first step, and pulls back to the base model.",
        fix="merge the adapter into actor_rollout_ref.model.path first, or actor_rollout_ref.actor.use_kl_loss=False and "
        "algorithm.use_kl_in_reward=False",
        source="verl 0.9.1, verl/trainer/ppo/v1/trainer_base.py, _compute_ref_log_prob (no_lora_adapter); "
        "huggingface/trl issue 3194 describes the effect",
    ),
    Rule(
        id="correction-without-probabilities",
        framework="verl",
        severity="error",
        title="nothing applies the correction",
        reads={
            "kept": "actor_rollout_ref.rollout.calculate_log_probs",
            "reject": f"{VERL_CORRECTION}rollout_rs",
            "weight": f"{VERL_CORRECTION}rollout_is",
            "bypass": f"{VERL_CORRECTION}bypass_mode",
        },
        condition=lambda v: bool(not v.kept and (v.reject is not None or v.weight is not None) and not v.bypass),
        happens="calculate_log_probs is {kept}, so the engine's probabilities are not in the batch, and rollout_rs {reject} "
        "and rollout_is {weight} are passed over without a word.",
        fix="actor_rollout_ref.rollout.calculate_log_probs=True",
        source="verl 0.9.1, verl/trainer/ppo/v1/trainer_base.py: the correction runs where rollout_log_probs is in the "
        "batch",
    ),
    Rule(
        id="correction-in-bypass",
        framework="verl",
        severity="error",
        title="nothing applies the correction",
        reads={
            "bypass": f"{VERL_CORRECTION}bypass_mode",
            "reject": f"{VERL_CORRECTION}rollout_rs",
            "weight": f"{VERL_CORRECTION}rollout_is",
            "kind": f"{VERL_CORRECTION}loss_type",
            "v1": "trainer.use_v1",
            "program": "program",
            "loss": f"{VERL_ACTOR}policy_loss.loss_mode",
        },
        condition=lambda v: bool(
            v.bypass
            and (v.reject is not None or v.weight is not None or v.kind != "ppo_clip")
            and v.v1
            and v.loss != "bypass_mode"
            and not any(part in v.program for part in VERL_ASYNC_PROGRAMS)
        ),
        happens="With bypass_mode, the correction is left to the loss bypass_mode. The trainer that verl 0.9.1 uses by "
        "default (trainer.use_v1) does not choose that loss: rollout_rs {reject}, rollout_is {weight} and loss_type {kind} "
        "have no effect.",
        fix="algorithm.rollout_correction.bypass_mode=False, or trainer.use_v1=False",
        source="verl 0.9.1: apply_bypass_mode of verl/trainer/ppo/rollout_corr_helper.py is called by "
        "verl/trainer/ppo/ray_trainer.py alone",
    ),
    Rule(
        id="rejection-without-threshold",
        framework="verl",
        severity="error",
        title="rejection has no threshold",
        reads={
            "reject": f"{VERL_CORRECTION}rollout_rs",
            "threshold": f"{VERL_CORRECTION}rollout_rs_threshold",
        },
        condition=lambda v: v.reject is not None and v.threshold is None,
        happens="rollout_rs is {reject}, and rollout_rs_threshold is not set: the first step stops with an error.",
        fix="algorithm.rollout_correction.rollout_rs_threshold",
        source="verl 0.9.1, verl/trainer/ppo/rollout_corr_helper.py, compute_rollout_correction_and_rejection_mask",
    ),
    Rule(
        id="mean-depends-on-micro-batch",
        framework="verl",
        severity="warning",
        title="the loss depends on how a batch is split",
        reads={
            "mean": f"{VERL_ACTOR}loss_agg_mode",
            "scale": f"{VERL_ACTOR}loss_scale_factor",
        },
        condition=lambda v: v.mean == "seq-mean-token-sum-norm" and v.scale is None,
        happens="loss_agg_mode seq-mean-token-sum-norm without loss_scale_factor divides by the longest answer of each "
        "micro-batch, so the weight of an answer depends on those beside it. Dr. GRPO divides by a constant.",
        fix="actor_rollout_ref.actor.loss_scale_factor=N with N the value of data.max_response_length",
        source="verl 0.9.1, verl/trainer/ppo/core_algos.py, agg_loss; verl-project/verl issue 3741",
    ),
    Rule(
        id="learning-rate",
        framework="verl",
        severity="warning",
        title="the learning rate is far above published ones",
        reads={
            "rate": f"{VERL_ACTOR}optim.lr",
            "model": "actor_rollout_ref.model.path",
            "lora": "actor_rollout_ref.model.lora_rank",
            "lora_rank": "actor_rollout_ref.model.lora.rank",
            "adapter": "actor_rollout_ref.model.lora_adapter_path",
            "optimizer": f"{VERL_ACTOR}optim.optimizer",
        },
        condition=lambda v: (
            v.rate > LARGEST_RATES[-1][1]
            and str(v.optimizer).lower().startswith("adam")
            and rate_is_high(v.rate, _verl_lora(v), v.known("model"))
        ),
        happens=RATE_HAPPENS,
        fix="actor_rollout_ref.actor.optim.lr=1e-6, or 1e-5 with LoRA",
        source=RATE_SOURCE,
    ),
)

# SkyRL

SKYRL_ALGORITHM = "trainer.algorithm."
SKYRL_OLD_PROBABILITIES = (
    "regular",
    "dual_clip",
    "gspo",
    "cispo",
    "clip_cov",
    "kl_cov",
    "sapo",
    "cross_entropy",
    "importance_sampling",
)
SKYRL_LOSS = {
    "loss": f"{SKYRL_ALGORITHM}policy_loss_type",
    "anchor": f"{SKYRL_ALGORITHM}cispo.cispo_anchor",
}
SKYRL_CORRECTION = {
    "weight": f"{SKYRL_ALGORITHM}off_policy_correction.tis_ratio_type",
    "mask": f"{SKYRL_ALGORITHM}off_policy_correction.sequence_mask_metric",
    "older": f"{SKYRL_ALGORITHM}use_tis",
}
SKYRL_BATCHES = {
    "train": "trainer.train_batch_size",
    "mini": "trainer.policy_mini_batch_size",
}


def _skyrl_uses_old_probabilities(v: Values) -> bool:
    return v.loss in SKYRL_OLD_PROBABILITIES and not (v.loss == "cispo" and v.anchor == "rollout")


def _skyrl_corrects(v: Values) -> bool:
    return bool(v.weight is not None or v.mask is not None or v.older)


def _skyrl_micro_batches_are_broken(v: Values) -> bool:
    gpus = v.gpus * v.nodes // v.parallel
    answers = v.mini * v.group // gpus
    return answers == 0 or answers % v.micro != 0


SKYRL_RULES = (
    Rule(
        id="clip-cannot-act",
        framework="skyrl",
        severity="warning",
        title="the clip cannot act",
        reads={
            "high": f"{SKYRL_ALGORITHM}eps_clip_high",
            "low": f"{SKYRL_ALGORITHM}eps_clip_low",
            **SKYRL_LOSS,
            **SKYRL_BATCHES,
            "epochs": "trainer.update_epochs_per_batch",
            "fully_async": "trainer.fully_async.enabled",
        },
        condition=lambda v: (
            v.is_set("high", "low")
            and v.loss in ("regular", "dual_clip", "gspo")
            and not v.fully_async
            and v.train == v.mini
            and v.epochs == 1
        ),
        happens=ONE_UPDATE + " trainer.train_batch_size and trainer.policy_mini_batch_size are both {train}: eps_clip_low "
        "{low} and eps_clip_high {high} change nothing.",
        fix="trainer.policy_mini_batch_size below trainer.train_batch_size, or trainer.update_epochs_per_batch above 1; "
        "or leave the clip out",
        source="NovaSky-AI/SkyRL issue 1692; BytedTsinghua-SIA/DAPO issue 23",
    ),
    Rule(
        id="asynchronous-anchor",
        framework="skyrl",
        severity="error",
        title="the ratio is not measured from what sampled",
        reads={"fully_async": "trainer.fully_async.enabled", "program": "program", **SKYRL_LOSS},
        condition=lambda v: (
            bool(v.fully_async or "fully_async" in v.program) and _skyrl_uses_old_probabilities(v)
        ),
        happens=ASYNCHRONOUS + " Earlier versions train without a clip; later ones refuse policy_loss_type {loss} here.",
        fix="trainer.algorithm.policy_loss_type=rollout_is (or dppo, or cispo with cispo.cispo_anchor=rollout)",
        source="NovaSky-AI/SkyRL issue 1315 and pull requests 1850 and 1980",
    ),
    Rule(
        id="asynchronous-anchor-one-step",
        framework="skyrl",
        severity="warning",
        title="the ratio is not measured from what sampled",
        reads={"program": "program", "fully_async": "trainer.fully_async.enabled", **SKYRL_LOSS, **SKYRL_CORRECTION},
        condition=lambda v: (
            ".async." in v.program
            and not v.fully_async
            and _skyrl_uses_old_probabilities(v)
            and not _skyrl_corrects(v)
        ),
        happens=ASYNCHRONOUS + " The sampler is one batch behind, and no importance weight corrects it.",
        fix="trainer.algorithm.policy_loss_type=rollout_is, or "
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        source="NovaSky-AI/SkyRL, examples/train/async; radixark/miles pull request 1829 on the same arrangement",
    ),
    Rule(
        id="truncated-sampling",
        framework="skyrl",
        severity="warning",
        title="sampling is truncated, and importance weights are taken",
        reads={
            "top_p": "generator.sampling_params.top_p",
            "top_k": "generator.sampling_params.top_k",
            "min_p": "generator.sampling_params.min_p",
            **SKYRL_LOSS,
            **SKYRL_CORRECTION,
        },
        condition=lambda v: (
            (v.top_p < 1 or v.top_k > 0 or v.min_p > 0)
            and (_skyrl_corrects(v) or v.loss in ("rollout_is", "dppo"))
        ),
        happens="SkyRL leaves vLLM to report probabilities as they are before truncation. The importance weights then "
        "compare two distributions of which neither sampled the answers, and the truncation is not corrected. top_p is "
        "{top_p}, top_k {top_k}, min_p {min_p}.",
        fix="generator.sampling_params.top_p=1.0, generator.sampling_params.top_k=-1, generator.sampling_params.min_p=0.0",
        source="NovaSky-AI/SkyRL, skyrl/backends/skyrl_train/inference_servers (no logprobs_mode is set; vLLM's default is "
        "raw_logprobs); compare huggingface/trl issue 6789",
    ),
    Rule(
        id="gspo-clip",
        framework="skyrl",
        severity="warning",
        title="the clip of GSPO is that of GRPO",
        reads={
            "loss": f"{SKYRL_ALGORITHM}policy_loss_type",
            "low": f"{SKYRL_ALGORITHM}eps_clip_low",
            "high": f"{SKYRL_ALGORITHM}eps_clip_high",
        },
        condition=lambda v: v.loss == "gspo" and _largest(v.low, v.high) >= 0.05,
        happens=GSPO_RANGE + " eps_clip_low is {low}, eps_clip_high {high}.",
        fix="trainer.algorithm.eps_clip_low=3e-4 trainer.algorithm.eps_clip_high=4e-4",
        source=GSPO_PAPER,
    ),
    Rule(
        id="batch-does-not-divide",
        framework="skyrl",
        severity="error",
        title="a batch does not hold whole mini-batches",
        reads=SKYRL_BATCHES,
        condition=lambda v: v.train % v.mini != 0,
        happens="trainer.train_batch_size {train} is no multiple of trainer.policy_mini_batch_size {mini}: SkyRL stops "
        "before it trains.",
        fix="a trainer.train_batch_size that is a multiple of trainer.policy_mini_batch_size",
        source="NovaSky-AI/SkyRL, skyrl/train/utils/utils.py, validate_batch_sizes",
    ),
    Rule(
        id="micro-batch-does-not-divide",
        framework="skyrl",
        severity="error",
        title="a mini-batch does not hold whole micro-batches",
        reads={
            "micro": "trainer.micro_train_batch_size_per_gpu",
            "mini": "trainer.policy_mini_batch_size",
            "group": "generator.n_samples_per_prompt",
            "gpus": "trainer.placement.policy_num_gpus_per_node",
            "nodes": "trainer.placement.policy_num_nodes",
            "parallel": "trainer.policy.sequence_parallel_size",
            "strategy": "trainer.strategy",
        },
        condition=lambda v: v.strategy in ("fsdp", "fsdp2") and _skyrl_micro_batches_are_broken(v),
        happens="policy_mini_batch_size {mini} times n_samples_per_prompt {group}, on {gpus} times {nodes} GPUs, is no "
        "multiple of micro_train_batch_size_per_gpu {micro} on each: SkyRL stops before it trains.",
        fix="a trainer.micro_train_batch_size_per_gpu that divides the answers of a mini-batch on each GPU",
        source="NovaSky-AI/SkyRL, skyrl/train/utils/utils.py, validate_batch_sizes",
    ),
    Rule(
        id="group-of-one",
        framework="skyrl",
        severity="error",
        title="one answer to each prompt",
        reads={
            "group": "generator.n_samples_per_prompt",
            "estimator": f"{SKYRL_ALGORITHM}advantage_estimator",
        },
        condition=lambda v: v.estimator in ("grpo", "rloo") and v.group == 1,
        happens=ONE_ANSWER + "{estimator} then takes the reward itself as the advantage, without a baseline.",
        fix="generator.n_samples_per_prompt=8",
        source="NovaSky-AI/SkyRL, skyrl/backends/skyrl_train/utils/ppo_utils.py, compute_grpo_outcome_advantage",
    ),
    Rule(
        id="group-of-two",
        framework="skyrl",
        severity="note",
        title="two answers to each prompt",
        reads={
            "group": "generator.n_samples_per_prompt",
            "estimator": f"{SKYRL_ALGORITHM}advantage_estimator",
            "spread": f"{SKYRL_ALGORITHM}grpo_norm_by_std",
        },
        condition=lambda v: v.estimator == "grpo" and v.group == 2 and bool(v.spread),
        happens=TWO_ANSWERS,
        fix="generator.n_samples_per_prompt=8, or trainer.algorithm.grpo_norm_by_std=false",
        source="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.1",
    ),
    Rule(
        id="mean-depends-on-micro-batch",
        framework="skyrl",
        severity="warning",
        title="the loss depends on how a batch is split",
        reads={"mean": f"{SKYRL_ALGORITHM}loss_reduction"},
        condition=lambda v: v.mean == "token_mean_legacy",
        happens="loss_reduction token_mean_legacy divides by the tokens of each micro-batch: a token weighs more in a "
        "micro-batch of short answers, and another micro_train_batch_size_per_gpu gives another loss.",
        fix="trainer.algorithm.loss_reduction=token_mean",
        source="NovaSky-AI/SkyRL, skyrl/backends/skyrl_train/utils/ppo_utils.py, "
        "apply_loss_reduction_to_advantages_minibatch",
    ),
    Rule(
        id="learning-rate",
        framework="skyrl",
        severity="warning",
        title="the learning rate is far above published ones",
        reads={
            "rate": "trainer.policy.optimizer_config.lr",
            "model": "trainer.policy.model.path",
            "lora": "trainer.policy.model.lora.rank",
        },
        condition=lambda v: v.rate > LARGEST_RATES[-1][1] and rate_is_high(v.rate, v.lora, v.known("model")),
        happens=RATE_HAPPENS,
        fix="trainer.policy.optimizer_config.lr=1e-6, or 1e-5 with LoRA",
        source=RATE_SOURCE,
    ),
)

# prime-rl

PRIME_RL_SAMPLING = "orchestrator.train.sampling.extra_body."

PRIME_RL_RULES = (
    Rule(
        id="truncated-sampling",
        framework="prime-rl",
        severity="warning",
        title="sampling is truncated, and importance weights are taken",
        reads={
            "top_p": f"{PRIME_RL_SAMPLING}top_p",
            "top_k": f"{PRIME_RL_SAMPLING}top_k",
            "min_p": f"{PRIME_RL_SAMPLING}min_p",
        },
        condition=lambda v: (
            (v.top_p is not None and v.top_p < 1) or (v.top_k or 0) > 0 or (v.min_p or 0) > 0
        ),
        happens="prime-rl's losses weight every token by the ratio of the trainer's and the engine's probabilities, and "
        "0.8.0 takes the trainer's over all tokens. top_p is {top_p}, top_k {top_k}, min_p {min_p}.",
        fix="leave top_p, top_k and min_p out of orchestrator.train.sampling.extra_body",
        source="prime-rl 0.8.0, src/prime_rl/trainer/rl/loss.py, default_loss_fn; PrimeIntellect-ai/prime-rl pull request "
        "3431; huggingface/trl issue 6789",
    ),
    Rule(
        id="batch-does-not-divide",
        framework="prime-rl",
        severity="error",
        title="a batch does not hold whole groups",
        reads={
            "batch": "orchestrator.batch_size",
            "group": "orchestrator.group_size",
            "tokens": "orchestrator.token_batch_size",
        },
        condition=lambda v: v.tokens is None and (128 if v.batch is None else v.batch) % v.group != 0,
        happens="orchestrator.batch_size (128 by default) is no multiple of {group.name} {group}: prime-rl refuses it.",
        fix="an orchestrator.batch_size that is a multiple of {group.name}",
        source="prime-rl 0.8.0, packages/prime-rl-configs/src/prime_rl/configs/orchestrator.py, resolve_batching",
    ),
    Rule(
        id="group-of-one",
        framework="prime-rl",
        severity="error",
        title="one answer to each prompt",
        reads={
            "group": "orchestrator.train.source.group_size",
            "algorithm": "orchestrator.algo.type",
        },
        condition=lambda v: v.algorithm in ("grpo", "max_rl", "echo") and v.group == 1,
        happens=ONE_ANSWER + "{algorithm} subtracts the mean of the group, so every advantage is 0. 1 is the default of "
        "orchestrator.group_size.",
        fix="orchestrator.group_size = 16",
        source="prime-rl 0.8.0, src/prime_rl/orchestrator/algo/grpo.py",
    ),
    Rule(
        id="learning-rate",
        framework="prime-rl",
        severity="warning",
        title="the learning rate is far above published ones",
        reads={
            "rate": "trainer.optim.lr",
            "model": "model.name",
            "lora": "trainer.model.lora.rank",
            "optimizer": "trainer.optim.type",
        },
        condition=lambda v: (
            v.rate > LARGEST_RATES[-1][1]
            and v.optimizer == "adamw"
            and rate_is_high(v.rate, v.lora, v.known("model"))
        ),
        happens=RATE_HAPPENS,
        fix="lr = 1e-6 under [trainer.optim], or 1e-5 with LoRA",
        source=RATE_SOURCE,
    ),
)

# OpenRLHF

OPENRLHF_GROUPS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
OPENRLHF_CLIP = {"pair": "actor.eps_clip_low_high", "clip": "actor.eps_clip"}
OPENRLHF_CORRECTION = {
    "weight": "algo.advantage.is_correction_enable",
    "loss": "actor.policy_loss_type",
}


def _openrlhf_micro_batches_are_broken(v: Values) -> bool:
    processes = v.gpus * v.nodes // (v.ring * v.tensor)
    return v.train % (v.micro * processes) != 0


OPENRLHF_RULES = (
    Rule(
        id="clip-cannot-act",
        framework="openrlhf",
        severity="warning",
        title="the clip cannot act",
        reads={
            **OPENRLHF_CLIP,
            "prompts": "rollout.batch_size",
            "group": "rollout.n_samples_per_prompt",
            "train": "train.batch_size",
            "epochs": "train.max_epochs",
            **OPENRLHF_CORRECTION,
        },
        condition=lambda v: (
            v.is_set("pair", "clip")
            and v.prompts * v.group == v.train
            and v.epochs == 1
            and not (v.loss == "gspo" and v.weight)
        ),
        happens=ONE_UPDATE + " {prompts} prompts with {group} answers make one batch of {train}: the clip changes nothing.",
        fix="{train.name} below the number of answers, or {epochs.name} above 1; or leave the clip out",
        source="BytedTsinghua-SIA/DAPO issue 23; OpenRLHF 0.11.0, openrlhf/trainer/ray/ppo_actor.py, ppo_train",
    ),
    Rule(
        id="asynchronous-anchor",
        framework="openrlhf",
        severity="warning",
        title="the ratio is not measured from what sampled",
        reads={"asynchronous": "train.async_enable", "weight": "algo.advantage.is_correction_enable"},
        condition=lambda v: bool(v.asynchronous and not v.weight),
        happens=ASYNCHRONOUS + " No importance weight corrects it.",
        fix="--algo.advantage.is_correction_enable (before 0.10: --enable_vllm_is_correction)",
        source="OpenRLHF 0.11.0, openrlhf/models/loss.py, PolicyLoss; radixark/miles pull request 1829",
    ),
    Rule(
        id="truncated-sampling",
        framework="openrlhf",
        severity="warning",
        title="sampling is truncated, and importance weights are taken",
        reads={"top_p": "rollout.top_p", "weight": "algo.advantage.is_correction_enable"},
        condition=lambda v: v.top_p < 1 and bool(v.weight),
        happens=TRUNCATED_SAMPLING + " {top_p.name} is {top_p}.",
        fix="--{top_p.name} 1.0",
        source="huggingface/trl issue 6789, of the same arithmetic; OpenRLHF 0.11.0, openrlhf/cli/train_ppo_ray.py "
        "(processed_logprobs)",
    ),
    Rule(
        id="gspo-clip",
        framework="openrlhf",
        severity="warning",
        title="the clip of GSPO is that of GRPO",
        reads={"loss": "actor.policy_loss_type", **OPENRLHF_CLIP},
        condition=lambda v: v.loss == "gspo" and _largest(*(v.pair or [v.clip])) >= 0.05,
        happens=GSPO_RANGE + " {pair.name} is {pair}, {clip.name} {clip}.",
        fix="--{pair.name} 3e-4 4e-4",
        source=GSPO_PAPER,
    ),
    Rule(
        id="batch-does-not-divide",
        framework="openrlhf",
        severity="error",
        title="a batch does not hold whole micro-batches",
        reads={
            "train": "train.batch_size",
            "micro": "train.micro_batch_size",
            "gpus": "actor.num_gpus_per_node",
            "nodes": "actor.num_nodes",
            "ring": "ds.ring_attn_size",
            "tensor": "ds.tensor_parallel_size",
            "dynamic": "train.dynamic_batch_enable",
        },
        condition=lambda v: not v.dynamic and _openrlhf_micro_batches_are_broken(v),
        happens="{train.name} {train} is no multiple of {micro.name} {micro} times the actor's processes ({gpus} times "
        "{nodes} GPUs): DeepSpeed refuses it.",
        fix="a {train.name} that is a multiple of the product",
        source="OpenRLHF 0.11.0, openrlhf/utils/deepspeed/deepspeed.py (accumulated_gradient)",
    ),
    Rule(
        id="batch-larger-than-answers",
        framework="openrlhf",
        severity="warning",
        title="a batch is larger than the answers of a step",
        reads={
            "train": "train.batch_size",
            "prompts": "rollout.batch_size",
            "group": "rollout.n_samples_per_prompt",
        },
        condition=lambda v: v.train > v.prompts * v.group,
        happens="{train.name} {train} is more than {prompts} prompts times {group} answers: a step ends before one update is "
        "complete, and with dynamic batches it makes none.",
        fix="a {train.name} of at most {prompts.name} times {group.name}",
        source="OpenRLHF 0.11.0, openrlhf/trainer/ppo_utils/replay_buffer.py, setup_dynamic_batch",
    ),
    Rule(
        id="group-of-one",
        framework="openrlhf",
        severity="error",
        title="one answer to each prompt",
        reads={"group": "rollout.n_samples_per_prompt", "estimator": "algo.advantage.estimator"},
        condition=lambda v: v.estimator in OPENRLHF_GROUPS and v.group == 1,
        happens=ONE_ANSWER + "OpenRLHF refuses {estimator} with {group.name} 1, which is its default.",
        fix="--{group.name} 8",
        source="OpenRLHF 0.11.0, openrlhf/cli/train_ppo_ray.py",
    ),
    Rule(
        id="group-of-two",
        framework="openrlhf",
        severity="note",
        title="two answers to each prompt",
        reads={
            "group": "rollout.n_samples_per_prompt",
            "estimator": "algo.advantage.estimator",
        },
        condition=lambda v: v.estimator == "group_norm" and v.group == 2,
        happens=TWO_ANSWERS,
        fix="--{group.name} 8, or --{estimator.name} dr_grpo",
        source="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.1",
    ),
    Rule(
        id="learning-rate",
        framework="openrlhf",
        severity="warning",
        title="the learning rate is far above published ones",
        reads={
            "rate": "actor.adam.lr",
            "model": "actor.model_name_or_path",
            "lora": "ds.lora.rank",
            "optimizer": "actor.optim",
        },
        condition=lambda v: (
            v.rate > LARGEST_RATES[-1][1]
            and v.optimizer == "adam"
            and rate_is_high(v.rate, v.lora, v.known("model"))
        ),
        happens=RATE_HAPPENS,
        fix="--{rate.name} 1e-6, or 1e-5 with LoRA",
        source=RATE_SOURCE,
    ),
)

RULES: tuple[Rule, ...] = (*TRL_RULES, *VERL_RULES, *SKYRL_RULES, *PRIME_RL_RULES, *OPENRLHF_RULES)
"""All rules."""
