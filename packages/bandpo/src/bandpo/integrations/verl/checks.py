"""Checks of a verl run's settings beside its method, in the driver before Ray starts, and the run's description."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from bandpo.core.methods import Method
from bandpo.core.text import as_text
from bandpo.integrations._adapt import PROBABILITIES, check_ratio_moves, describe_anchor, read_method
from bandpo.integrations._settings import check_settings as check_refused_settings
from bandpo.integrations.legs import LEGS
from bandpo.integrations.verl.announcement import FILE_LOGGER
from bandpo.integrations.verl.average import average_of, check_average, check_length_norm, describe_average
from bandpo.integrations.verl.correction import CORRECTION, check_correction
from bandpo.integrations.verl.keys import check_names, leaves
from bandpo.integrations.verl.probe import probe_by_setting
from bandpo.integrations.verl.settings import (
    ACTOR,
    POLICY_LOSS,
    ROLLOUT,
    in_bypass_mode,
    loss_of,
    mode_of,
    overrides,
    refuse_if,
    trainer_of,
    uses_bandpo,
    uses_critic,
)

if TYPE_CHECKING:
    from jaxtyping import Float
    from omegaconf import DictConfig
    from torch import Tensor
    from verl.workers.config import ActorConfig

TRAINERS = {
    "one_step_off": "the one-step-off trainer",
    "fully_async": "the fully asynchronous trainer",
    "v0": "the trainer of trainer.use_v1=false",
}
"""The trainers without dynamic sampling, by their names in `trainer_of`."""


def check_settings(method: Method | None, actor: ActorConfig, config: DictConfig) -> dict[str, str]:
    """Check that a run trains with the method of its settings, and return a description of the run.

    Args:
        method: The method of the loss; None if it is not one of bandpo's.
        actor: The actor's settings.
        config: All settings of the run.

    Returns:
        One line about each topic; empty for a run without bandpo.

    Raises:
        ValueError: a setting is refused.
    """
    _check_loss(actor, config)
    if not uses_bandpo(config):
        return {}
    _check_file_logger(config)
    loss = loss_of(actor)
    correction = check_correction(config, actor, loss, method if loss == "band" else None)
    distillation = config.get("distillation")
    refuse_if(
        distillation and distillation.enabled and not distillation.distillation_loss.use_task_rewards,
        f"distillation.distillation_loss.use_task_rewards=false leaves out the policy loss, {method or loss}",
    )
    _check_attention(config)
    idle_clip = ""
    if loss == "band":
        assert method is not None
        _check_method(method, actor, config)
        idle_clip = _check_ratio_moves(actor, config)
    average = ""
    if method and loss == "band":
        setting = actor.policy_loss.get("average")
        average = average_of(method, setting, actor.loss_agg_mode)
    check_length_norm(actor, average)
    sampling = _check_sampling(config, method if loss == "band" else None)
    probed = probe_by_setting(actor, method) if loss in POLICY_LOSS_REGISTRY else None
    if loss == "band":
        assert method is not None
        average = describe_average(method, actor)
    elif probed is not None:
        average = probed.average
    else:
        average = f"{actor.loss_agg_mode}, if the loss reads loss_agg_mode, which could not be tried"
    lines = _describe_run(method, actor, config, average) | {
        "mode": _describe_mode(config),
        "anchor": _describe_anchor(config),
        "correction": correction,
        "sampling": sampling,
    }
    if idle_clip:
        lines["clip"] = idle_clip
    if probed is not None:
        lines["gradient"] = probed.line
    return lines


def _check_loss(actor: ActorConfig, config: DictConfig) -> None:
    """Check that the class of the loss is at the path that verl reads, and that the loss is registered."""
    target = f"{POLICY_LOSS}_target_"
    for key, value in leaves(OmegaConf.to_container(config)):
        is_bandpos = key.endswith("._target_") and str(value).startswith("bandpo.integrations.verl.")
        refuse_if(is_bandpos and key != target, f"{key}: verl does not look there; write {target}")

    losses = sorted(POLICY_LOSS_REGISTRY.keys() - {"audited"})
    loss = loss_of(actor)
    # An external library may register a loss later.
    is_unknown = loss not in losses and not config.actor_rollout_ref.model.external_lib
    refuse_if(is_unknown, f"{POLICY_LOSS}loss_mode: no policy loss is named {loss!r} of {', '.join(losses)}")

    filter_groups = config.algorithm.get("filter_groups")
    trainer = TRAINERS.get(trainer_of(config))
    refuse_if(
        trainer and filter_groups and filter_groups.enable,
        f"algorithm.filter_groups.enable: {trainer} ignores it; set it to false, or train with "
        "verl.trainer.main_ppo and trainer.use_v1=true",
    )


def _check_file_logger(config: DictConfig) -> None:
    """Check that the file of verl's file logger is new or empty, since verl would overwrite its content."""
    logger = config.trainer.logger
    loggers = [logger] if isinstance(logger, str) else logger or ()
    path = os.environ.get(FILE_LOGGER)
    if not path or "file" not in loggers:
        return
    file = Path(path)
    refuse_if(
        file.is_file() and file.stat().st_size > 0,
        f"{FILE_LOGGER}={path}: verl would empty this file, which is there already: unset the variable, and each "
        f"start writes a file of its own under {config.trainer.default_local_dir}/{LEGS}",
    )


def _check_attention(config: DictConfig) -> None:
    """Check that sequence parallelism is only used with FlashAttention.

    verl only patches FlashAttention's function to exchange the parts of a sequence between GPUs. Under another
    attention each GPU attends to its own part.
    """
    settings = config.actor_rollout_ref
    workers = {"actor_rollout_ref.actor": (settings.actor, settings.model)}
    if settings.actor.use_kl_loss or config.algorithm.get("use_kl_in_reward"):
        workers["actor_rollout_ref.ref"] = (settings.ref, settings.model)
    if uses_critic(config):
        workers["critic"] = (config.critic, config.critic.model)

    name = "ulysses_sequence_parallel_size"
    for path, (worker, model) in workers.items():
        attention = (model.get("override_config") or {}).get("attn_implementation") or "flash_attention_2"
        if not str(worker.get("strategy")).startswith("fsdp") or "flash" in attention:
            continue
        sizes = {
            f"{path}.{name}": worker.get(name) or 1,
            f"{path}.fsdp_config.{name}": (worker.get("fsdp_config") or {}).get(name) or 1,
        }
        for key, size in sizes.items():
            refuse_if(
                size > 1,
                f"attn_implementation={attention} under {key}={size}: each GPU attends to its own part of a sequence "
                f"alone, so the probabilities are wrong; set {key}=1, or install FlashAttention",
            )


def _check_method(method: Method, actor: ActorConfig, config: DictConfig) -> None:
    """Check that no setting contradicts a method of bandpo or has no effect beside it."""
    loss_settings = config.actor_rollout_ref.actor.policy_loss
    is_null = "method" in loss_settings and loss_settings["method"] is None
    refuse_if(
        is_null, f"{POLICY_LOSS}method is null: leave it out for Band(KL(), 0.05), or write 'Unclipped()'"
    )

    check_refused_settings("verl", actor, method)
    refuse_if(
        not _is_rule_alone(loss_settings) and f"{ACTOR}clip_ratio_c" in overrides(),
        f"{ACTOR}clip_ratio_c={actor.clip_ratio_c} has no effect beside {method}, a whole method, which has its own "
        f"dual clip or none: leave it out, or write it into the method, as in 'BandPO(dual_clip={actor.clip_ratio_c})'",
    )
    check_average(method, actor)
    refuse_if(
        method.old_policy == "rollout" and not in_bypass_mode(config),
        f"{POLICY_LOSS}method: {method!r} refers to the rollout engine's log-probabilities, and verl gives the "
        f"trainer's: set {CORRECTION}bypass_mode=true and {ROLLOUT}calculate_log_probs=true; or "
        f"method={str(replace(method, old_policy='trainer'))!r} for the trainer's",
    )
    if method.whole_batch:
        _check_whole_batch(method, actor, config)


def _check_ratio_moves(actor: ActorConfig, config: DictConfig) -> str:
    """Check that ratios can differ from 1; return a line if they cannot and this is accepted."""
    fix = f"make it smaller than data.train_batch_size, or set {ACTOR}ppo_epochs=2"
    if mode_of(config) != "sync":
        fix = f"training is asynchronous, so {TO_SAMPLER}"
    return check_ratio_moves(
        # Without the dual clip that verl has by default.
        _written_method(actor.policy_loss),
        # The rollout engine's log-probabilities are old at the first update, too.
        math.inf if in_bypass_mode(config) else _updates(config),
        f"{ACTOR}ppo_mini_batch_size",
        fix,
        accepted=actor.policy_loss.get("accept_idle_clip", False),
        accept=f"+{POLICY_LOSS}accept_idle_clip=true",
    )


def _is_rule_alone(loss_settings: Any) -> bool:
    """Return True if the method of the settings is a clip rule alone, beside which verl's ``clip_ratio_c`` applies."""
    return _written_method(loss_settings).only_rule


def _written_method(loss_settings: Any) -> Method:
    """Return the method of the settings, without verl's dual clip."""
    return read_method(POLICY_LOSS, loss_settings.get("method"), whole_batch=True)


def _check_whole_batch(method: Method, actor: ActorConfig, config: DictConfig) -> None:
    """Check that one call of the loss gets all of a GPU's sequences, for a method with sums over a mini-batch."""
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    rows = actor.ppo_mini_batch_size * actor.rollout_n
    micro_batch = actor.ppo_micro_batch_size_per_gpu or 0
    refuse_if(actor.use_dynamic_bsz or micro_batch * gpus < rows, not_for_verl(method))
    refuse_if(method.within_process and gpus > 1, not_for_processes(method, gpus))
    copies = _copies_of_each_token(actor)
    refuse_if(method.objective.whole_batch and copies > 1, not_for_copies(method, copies))
    refuse_if(
        actor.engine.get("pipeline_model_parallel_size", 1) > 1,
        f"{POLICY_LOSS}method: {method!r} has sums over all processes, and those of a pipeline have no loss: set "
        f"{ACTOR}megatron.pipeline_model_parallel_size=1",
    )


def not_for_verl(method: Method) -> str:
    """Return the error message for a method with sums over a mini-batch, which verl splits."""
    return (
        f"{POLICY_LOSS}method: {method!r} has sums over a whole mini-batch, and verl hands its loss one micro-batch at "
        "a time, with the backward pass of each before the next is known. If a mini-batch fits, set "
        f"{ACTOR}use_dynamic_bsz=false and {ACTOR}ppo_micro_batch_size_per_gpu to all responses of a mini-batch, "
        "divided by the number of GPUs; otherwise train it with Tinker's forward_backward_custom or a loop of your own"
    )


def not_for_processes(method: Method, processes: int) -> str:
    """Return the error message for a method of which a part looks at the tokens of one process only, of several."""
    return (
        f"{POLICY_LOSS}method: {method!r} depends on all tokens of a mini-batch, and a part of it only looks at those "
        f"of its own GPU, of {processes}. Set trainer.n_gpus_per_node=1 and trainer.nnodes=1, or let that part gather "
        "the tokens of TrainingState(processes=...), as bandpo.core.token_rules.SecondMoment does, and return False in "
        "within_process"
    )


def not_for_copies(method: Method, copies: int) -> str:
    """Return the error message for a method that ranks tokens, of which several GPUs have a copy each."""
    return (
        f"{POLICY_LOSS}method: {method!r} ranks all tokens of a mini-batch, and each token is on {copies} GPUs, which "
        "would count as different tokens. Set the sizes of tensor, context and Ulysses sequence parallelism to 1"
    )


def _copies_of_each_token(actor: ActorConfig) -> int:
    """Return the number of GPUs that compute the loss of the same token."""
    copies = 1
    for name in ("ulysses_sequence_parallel_size", "tensor_model_parallel_size", "context_parallel_size"):
        copies *= actor.engine.get(name, 1) or 1
    return copies


def _updates(config: DictConfig) -> int:
    """Return the number of optimiser steps with the same old policy; at the first of them every ratio is 1.

    verl pads a batch to a multiple of the mini-batches of actor and critic. Some trainers split a batch into parts.
    Each part then has an old policy of its own, unless rollouts are on separate GPUs.
    """
    actor = config.actor_rollout_ref.actor
    trainer = config.trainer
    kind = trainer_of(config)
    if kind == "fully_async":
        # The old policy is the same until the parameters are synchronised.
        steps = config.async_training.trigger_parameter_sync_step
        return config.async_training.require_batches * actor.ppo_epochs * steps

    batch_parts = 1
    is_separate = False
    if kind == "v1":
        mode = trainer.v1.trainer_mode
        mode_settings = trainer.v1.get(mode) or {}  # empty for a mode that verl does not have
        batch_parts = mode_settings.get("parameter_sync_step", 1)
        is_separate = mode == "separate_async"

    mini_batch = actor.ppo_mini_batch_size
    multiple = mini_batch
    if uses_critic(config):
        multiple = math.lcm(mini_batch, config.critic.ppo_mini_batch_size)
    padded_batch = math.ceil(config.data.train_batch_size / batch_parts / multiple) * multiple
    updates = padded_batch // mini_batch * actor.ppo_epochs
    return updates * batch_parts if is_separate else updates


def _bounds(method: Method) -> Float[Tensor, "2 probability"]:
    """Return the lower and upper bound of the ratio at each of `PROBABILITIES`."""
    bounds = method.clip.bounds(torch.tensor([PROBABILITIES], dtype=torch.float64).log())
    return torch.cat([bounds.lower, bounds.upper])


TO_SAMPLER = f"set {CORRECTION}bypass_mode=true and {ROLLOUT}calculate_log_probs=true"
"""The settings that make the old log-probabilities the sampler's."""


def _describe_anchor(config: DictConfig) -> str:
    """Return a line about the origin of the old log-probabilities."""
    is_separate = mode_of(config) in ("separate_async", "fully_async")
    other = (
        {"other": "the log-probabilities of the trainer's weights at the last sync"} if is_separate else {}
    )
    return describe_anchor(
        in_bypass_mode(config),
        f"{CORRECTION}bypass_mode={str(in_bypass_mode(config)).lower()}",
        asynchronous=mode_of(config) != "sync",
        fix=TO_SAMPLER,
        **other,
    )


def _check_sampling(config: DictConfig, method: Method | None) -> str:
    """Check that old and new probabilities are over the same vocabulary at the same temperature.

    The trainer's probabilities are over the full vocabulary at the sampler's temperature. So are the rollout engine's
    with ``processed_logprobs``, unless top_p or top_k removes tokens. With ``raw_logprobs`` they are those at
    temperature 1.

    Args:
        config: The run's config.
        method: The method of the loss; None if it is not one of bandpo's.

    Returns:
        A line about the sampling.

    Raises:
        ValueError: the old probabilities are the rollout engine's, and differ from the trainer's in one of these.
    """
    rollout = config.actor_rollout_ref.rollout
    is_raw = rollout.get("logprobs_mode") == "raw_logprobs"
    temperature = {} if rollout.temperature == 1 else {"temperature": rollout.temperature}
    restrictions = {}
    if rollout.top_p < 1:
        restrictions["top_p"] = rollout.top_p
    if rollout.top_k > 0:
        restrictions["top_k"] = rollout.top_k

    # In an asynchronous run the trainer's log-probabilities are not those of the policy that sampled.
    or_trainer = "" if mode_of(config) != "sync" else f", or set {CORRECTION}bypass_mode=false"
    if method is not None and in_bypass_mode(config):
        for name, value in restrictions.items():
            refuse_if(
                not is_raw,
                f"{ROLLOUT}{name}={value}: under {CORRECTION}bypass_mode=true the old probabilities are the rollout "
                f"engine's, of the tokens that {name} leaves, and {method} compares them with the trainer's, of the "
                f"full vocabulary: leave {name} out{or_trainer}",
            )
        refuse_if(
            is_raw and temperature,
            f"{ROLLOUT}logprobs_mode=raw_logprobs: the rollout engine's log-probabilities are those at temperature 1, "
            f"and the trainer's those at {ROLLOUT}temperature={rollout.temperature}: set "
            f"{ROLLOUT}logprobs_mode=processed_logprobs",
        )

    settings = temperature | restrictions
    if not settings:
        return "from the full vocabulary at temperature 1, as the probabilities p are"
    text = ", ".join(f"{name}={value}" for name, value in settings.items())
    return (
        f"{text}: the probabilities p are those of the full vocabulary at temperature {rollout.temperature}"
    )


def _describe_run(
    method: Method | None, actor: ActorConfig, config: DictConfig, average: str
) -> dict[str, str]:
    """Return one line about each topic of a run: its loss and the allowed ratios, its updates and its size."""
    loss = loss_of(actor)
    lines = {
        "loss": _describe_loss(method, loss, config),
        "ratios": _describe_ratios(method),
        "average": average,
    }

    loss_settings = config.actor_rollout_ref.actor.policy_loss
    is_changed = actor.clip_ratio_c != type(actor).clip_ratio_c
    if loss == "band" and is_changed and not _is_rule_alone(loss_settings):
        lines["dual clip"] = (
            f"the method's own or none; clip_ratio_c={actor.clip_ratio_c} acts beside a clip rule alone"
        )

    data = config.data
    trainer = config.trainer
    prompts = data.train_batch_size
    if trainer_of(config) == "fully_async":
        prompts = config.async_training.require_batches * actor.ppo_mini_batch_size
    responses = config.actor_rollout_ref.rollout.n
    start = f", from step {trainer.critic_warmup}" if trainer.critic_warmup > 1 else ""
    lines |= {
        "updates": f"{_updates(config)} for each batch of {prompts} × {responses} responses{start}",
        "model": f"{config.actor_rollout_ref.model.path}, at most {data.max_response_length} tokens a response",
        "training": f"advantages of {config.algorithm.adv_estimator}, learning rate {actor.optim.lr:g}, KL loss "
        f"{actor.use_kl_loss and actor.kl_loss_coef:g}, entropy {actor.entropy_coeff:g}, "
        f"{trainer.total_epochs} epochs, {trainer.nnodes} × {trainer.n_gpus_per_node} GPUs",
    }

    unknown = ", ".join(map(str, check_names(config)))
    if unknown:
        lines["not verl's"] = f"{unknown}: verl has no settings of these names"
    return lines


def _describe_mode(config: DictConfig) -> str:
    """Return a line about the trainer's mode, and the GPUs that sample only."""
    mode = mode_of(config)
    if mode == "sync":
        return "sync, on the data of the newest weights"
    line = f"{mode}, on data that older weights may have sampled"
    if mode == "colocate_async":
        return line
    sampler = config.actor_rollout_ref.rollout if mode == "separate_async" else config.rollout
    return f"{line}, on {sampler.nnodes} × {sampler.n_gpus_per_node} GPUs of the sampler's own"


def _describe_loss(method: Method | None, loss: str, config: DictConfig) -> str:
    """Return the names of a run's loss: verl's name of it, the method, and distillation, as far as they apply."""
    names = [] if loss == "band" else [f"verl's {loss}"]
    if method:
        names.append(as_text(method))
    distillation = config.get("distillation")
    if distillation and distillation.enabled:
        names.append("and verl's distillation")
    return ", ".join(names)


def _describe_ratios(method: Method | None) -> str:
    """Return the bounds of the ratio at each of `PROBABILITIES`, as text; empty if no method is known."""
    if method is None:
        return ""
    if method.clip.depends_on_tokens:
        return "by the tokens of each batch"
    bounds = zip(PROBABILITIES, *_bounds(method).tolist(), strict=True)
    return ", ".join(f"{low:.5g} to {high:.5g} at p = {p}" for p, low, high in bounds)
