"""What verl's driver checks and announces before Ray starts: a method under verl's other settings."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf

from bandpo.integrations import _verl_average
from bandpo.integrations._verl_announcement import FILE_LOGGER
from bandpo.integrations._verl_correction import DRIVER, check_correction
from bandpo.integrations._verl_settings import (
    ACTOR,
    ROLLOUT,
    WHERE,
    bypasses,
    is_ours,
    leaves,
    new_settings,
    overrides,
    refuse,
    trainer_of,
    uses_critic,
)
from bandpo.methods import Method
from bandpo.rules import Unclipped
from bandpo.runs.legs import LEGS
from bandpo.text import as_text

if TYPE_CHECKING:
    from jaxtyping import Float
    from omegaconf import DictConfig
    from torch import Tensor
    from verl.workers.config import ActorConfig

PROBABILITIES = (0.01, 0.1, 0.5, 0.9, 0.99)
"""From a rare token to a sure one, to say and to try what a rule allows."""
FAR = 10
"""A ratio that hardly a token reaches: the paper's cap, and the authors' dual clip."""
OF_LOSSES = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "tau_pos", "tau_neg")
OF_LOSSES += ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
"""Settings of verl's own losses, which no method reads: the actor's, and the policy loss's."""
TRAINERS = {"one_step_off": "the one-step-off trainer", "fully_async": "the fully asynchronous trainer"}
TRAINERS |= {"v0": "the trainer of trainer.use_v1=false"}
"""The trainers that know no dynamic sampling, by what `trainer_of` calls them."""


def loss_of(actor: ActorConfig) -> str:
    """Return the name of the loss that a worker trains with, audited or not."""
    return actor.policy_loss.get("audited") or actor.policy_loss.loss_mode


def check_settings(method: Method | None, actor: ActorConfig, config: DictConfig) -> dict[str, str]:
    """Refuse what would train another method than was asked for, by the name of the setting.

    Args:
        method: The method that the loss is; None if it is none of bandpo's.
        actor: The actor's settings.
        config: All settings of the run.

    Returns:
        What the run is, by topic; empty for a run of which bandpo knows nothing.

    Raises:
        ValueError: a setting is refused.
    """
    _check_names(actor, config)
    if not is_ours(config):
        return {}
    _check_file_logger(config)
    loss = loss_of(actor)
    correction = check_correction(config, actor, loss, method if loss == "band" else None)
    distillation = config.get("distillation")
    refuse(
        distillation and distillation.enabled and not distillation.distillation_loss.use_task_rewards,
        f"distillation.distillation_loss.use_task_rewards=false leaves out the policy loss, {method or loss}",
    )
    _check_attention(config)
    if loss == "band":
        assert method is not None
        _check_method(method, actor, config)
    setting = actor.policy_loss.get("average")
    named = (
        _verl_average.average_of(method, setting, actor.loss_agg_mode) if method and loss == "band" else ""
    )
    _verl_average.check_norm(actor, named)
    sampling = _sampling(config, method if loss == "band" else None)
    return _identity(method, actor, config) | {
        "anchor": _anchor(config),
        "correction": correction,
        "sampling": sampling,
    }


def _check_names(actor: ActorConfig, config: DictConfig) -> None:
    """Refuse settings of the loss where verl does not look, and a loss that nobody knows."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    places = dict.fromkeys(vars(actor), ACTOR) | dict.fromkeys(("method", *vars(actor.policy_loss)), WHERE)
    for key in new_settings(config):
        name = key.rpartition(".")[2]
        refuse(name in places, f"{key}: verl does not look there; write {places.get(name)}{name}")
    for key, value in leaves(OmegaConf.to_container(config)):
        ours = key.endswith("._target_") and str(value).startswith("bandpo.integrations.verl.")
        refuse(ours and key != f"{WHERE}_target_", f"{key}: verl does not look there; write {WHERE}_target_")
    losses = sorted(POLICY_LOSS_REGISTRY.keys() - {"audited"})
    loss = loss_of(actor)
    unknown = loss not in losses and not config.actor_rollout_ref.model.external_lib  # which may register it
    refuse(unknown, f"{WHERE}loss_mode: no policy loss is named {loss!r} of {', '.join(losses)}")
    groups = config.algorithm.get("filter_groups")
    trainer = TRAINERS.get(trainer_of(config))
    refuse(
        trainer and groups and groups.enable,
        f"algorithm.filter_groups.enable: {trainer} ignores it; set it to false, or train with "
        "verl.trainer.main_ppo and trainer.use_v1=true",
    )


def _check_file_logger(config: DictConfig) -> None:
    """Refuse a file of the file logger that holds something already, since verl empties it."""
    logger = config.trainer.logger
    named = os.environ.get(FILE_LOGGER)
    if not named or "file" not in ([logger] if isinstance(logger, str) else logger or ()):
        return
    file = Path(named)
    refuse(
        file.is_file() and file.stat().st_size > 0,
        f"{FILE_LOGGER}={named}: verl would empty this file, which is there already: unset the variable, and each "
        f"start writes a file of its own under {config.trainer.default_local_dir}/{LEGS}",
    )


def _check_attention(config: DictConfig) -> None:
    """Refuse sequence parallelism under an attention that sees its own part of a sequence only.

    verl exchanges the parts within FlashAttention's function alone.
    """
    settings = config.actor_rollout_ref
    parts = {"actor_rollout_ref.actor": (settings.actor, settings.model)}
    if settings.actor.use_kl_loss or config.algorithm.get("use_kl_in_reward"):
        parts["actor_rollout_ref.ref"] = (settings.ref, settings.model)
    if uses_critic(config):
        parts["critic"] = (config.critic, config.critic.model)
    for where, (part, model) in parts.items():
        attention = (model.get("override_config") or {}).get("attn_implementation") or "flash_attention_2"
        if not str(part.get("strategy")).startswith("fsdp") or "flash" in attention:
            continue
        name = "ulysses_sequence_parallel_size"
        of_engine = (part.get("fsdp_config") or {}).get(name) or 1
        for key, size in (
            (f"{where}.{name}", part.get(name) or 1),
            (f"{where}.fsdp_config.{name}", of_engine),
        ):
            refuse(
                size > 1,
                f"attn_implementation={attention} under {key}={size}: each GPU attends to its own part of a sequence "
                f"alone, so the probabilities are wrong; set {key}=1, or install FlashAttention",
            )


def _check_method(method: Method, actor: ActorConfig, config: DictConfig) -> None:
    """Refuse what would change a method of bandpo's, or leave a setting without effect."""
    written = config.actor_rollout_ref.actor.policy_loss
    empty = "method" in written and written["method"] is None
    refuse(empty, f"{WHERE}method is null: leave it out for Band(KL(), 0.05), or write 'Unclipped()'")
    for name in OF_LOSSES:
        where, settings = (ACTOR, actor) if hasattr(actor, name) else (WHERE, actor.policy_loss)
        value = getattr(settings, name)
        refuse(
            value != getattr(type(settings), name),
            f"{where}{name}={value} has no effect beside {method}: leave it out, or write "
            f"{WHERE}method='FixedClip(low, high)'",
        )
    refuse(
        not _takes_dual_clip(written) and f"{ACTOR}clip_ratio_c" in overrides(),
        f"{ACTOR}clip_ratio_c={actor.clip_ratio_c} has no effect beside {method}, a whole method, which has its own "
        "dual clip or none: leave it out, or write it into the method, as in 'Method(FixedClip(0.2), DualClip(10))'",
    )
    _verl_average.check_average(method, actor)
    _check_acts(method, config)
    refuse(
        method.old_policy == "rollout" and not bypasses(config),
        f"{WHERE}method: {method!r} refers to the rollout engine's log-probabilities, and verl gives the trainer's: "
        f"set {DRIVER}bypass_mode=true and {ROLLOUT}calculate_log_probs=true; or "
        f"method={str(replace(method, old_policy='trainer'))!r} for the trainer's",
    )
    if method.whole_batch:
        _check_whole_batch(method, actor, config)


def _takes_dual_clip(written: Any) -> bool:
    """Return whether ``clip_ratio_c`` acts: beside a clip rule alone, which Band is where no method is written."""
    from bandpo.integrations._adapt import read_method

    return read_method(WHERE, written.get("method"), whole_batch=True).only_rule


def _check_whole_batch(method: Method, actor: ActorConfig, config: DictConfig) -> None:
    """Refuse a method with sums over a mini-batch, unless one call of the loss is given all of a GPU's part."""
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    rows = actor.ppo_mini_batch_size * actor.rollout_n
    micro_batch = actor.ppo_micro_batch_size_per_gpu or 0
    refuse(actor.use_dynamic_bsz or micro_batch * gpus < rows, not_for_verl(method))
    refuse(
        actor.engine.get("pipeline_model_parallel_size", 1) > 1,
        f"{WHERE}method: {method!r} has sums over all processes, and those of a pipeline have no loss: set "
        f"{ACTOR}megatron.pipeline_model_parallel_size=1",
    )


def not_for_verl(method: Method) -> str:
    """Return why a method with sums over a mini-batch cannot be trained where verl splits it."""
    return (
        f"{WHERE}method: {method!r} is not for verl: it has sums over a whole mini-batch, and verl hands its loss one "
        "micro-batch at a time, with the backward pass of each before the next is known. Train it with Tinker's "
        "forward_backward_custom or a loop of your own, or choose another method"
    )


def _check_acts(method: Method, config: DictConfig) -> None:
    """Refuse a clip rule that can never act."""
    if method.clip == Unclipped():
        return
    rule = repr(method.clip)
    # What a rule of the tokens allows is known with the tokens only.
    if not method.clip.looks_at_tokens:
        p = torch.tensor(PROBABILITIES)
        lower, upper = _allowed(method)
        above = (upper > 0.9 * (1 / p).clamp(max=FAR)).all() and upper.isfinite().any()
        below = (lower < 1 / FAR).all() and lower.any()
        refuse(
            above or below,
            f"{WHERE}method: at no probability does {rule} block a ratio {'above' if above else 'below'} 1 that "
            "training reaches. Is a number mistyped? No bound on a side is low=1 or high=inf",
        )
    refuse(
        _updates(config) <= 1 and not bypasses(config),
        f"{ACTOR}ppo_mini_batch_size: there is one update for each batch, so every ratio is 1 and {rule} never acts: "
        "make it smaller than data.train_batch_size, or write method='Unclipped()'",
    )


def _allowed(method: Method) -> Float[Tensor, "2 probability"]:
    bounds = method.clip.bounds(torch.tensor([PROBABILITIES], dtype=torch.float64).log())
    return torch.cat([bounds.lower, bounds.upper])


def _updates(config: DictConfig) -> int:
    """Return the optimiser steps on one batch, at whose start every ratio is 1.

    verl fills a batch up to whole mini-batches of actor and critic. It may train on parts of a batch: then each has an
    old policy of its own, unless rollouts are on separate GPUs.
    """
    actor, critic, trainer = config.actor_rollout_ref.actor, config.critic, config.trainer
    kind = trainer_of(config)
    if kind == "fully_async":
        # The old policy stays that of the first of these steps.
        steps = config.async_training.trigger_parameter_sync_step
        return config.async_training.require_batches * actor.ppo_epochs * steps
    parts, separate = 1, False
    if kind == "v1":
        mode = trainer.v1.trainer_mode
        of_mode = trainer.v1.get(mode) or {}  # none of a mode that verl does not know
        parts = of_mode.get("parameter_sync_step", 1)
        separate = mode == "separate_async"
    mini_batch = actor.ppo_mini_batch_size
    whole = math.lcm(mini_batch, critic.ppo_mini_batch_size) if uses_critic(config) else mini_batch
    updates = math.ceil(config.data.train_batch_size / parts / whole) * whole // mini_batch * actor.ppo_epochs
    return updates * parts if separate else updates


def _anchor(config: DictConfig) -> str:
    """Return in words whose log-probabilities are the old ones."""
    if bypasses(config):
        return f"the rollout engine's log-probabilities ({DRIVER}bypass_mode=true)"
    return (
        f"the trainer's own log-probabilities before the first update on a batch ({DRIVER}bypass_mode=false)"
    )


def _sampling(config: DictConfig, method: Method | None) -> str:
    """Check that old and new probabilities are of one kind, and return in words what they are.

    The trainer's are of the full vocabulary at the sampler's temperature. The rollout engine's are so under its
    ``processed_logprobs`` unless tokens are left out of the sampling; its ``raw_logprobs`` are those at temperature 1.

    Raises:
        ValueError: a method is given the rollout engine's as old ones, and these are of another kind.
    """
    rollout = config.actor_rollout_ref.rollout
    raw = rollout.get("logprobs_mode") == "raw_logprobs"
    changes = {} if rollout.temperature == 1 else {"temperature": rollout.temperature}
    leaves_out = {}
    if rollout.top_p < 1:
        leaves_out["top_p"] = rollout.top_p
    if rollout.top_k > 0:
        leaves_out["top_k"] = rollout.top_k
    if method is not None and bypasses(config):
        for name, value in leaves_out.items():
            refuse(
                not raw,
                f"{ROLLOUT}{name}={value}: under {DRIVER}bypass_mode=true the old probabilities are the rollout "
                f"engine's, of the tokens that {name} leaves, and {method} compares them with the trainer's, of the "
                f"full vocabulary: leave {name} out, or set {DRIVER}bypass_mode=false",
            )
        refuse(
            raw and changes,
            f"{ROLLOUT}logprobs_mode=raw_logprobs: the rollout engine's log-probabilities are those at temperature 1, "
            f"and the trainer's those at {ROLLOUT}temperature={rollout.temperature}: set "
            f"{ROLLOUT}logprobs_mode=processed_logprobs",
        )
    changes |= leaves_out
    if not changes:
        return "from the full vocabulary at temperature 1, as the probabilities p are"
    text = ", ".join(f"{name}={value}" for name, value in changes.items())
    return (
        f"{text}: the probabilities p are those of the full vocabulary at temperature {rollout.temperature}"
    )


def _identity(method: Method | None, actor: ActorConfig, config: DictConfig) -> dict[str, str]:
    """Return what a run is, by topic: its loss and the ratios that this allows, its updates and its size."""
    loss = loss_of(actor)
    parts = [] if loss == "band" else [f"verl's {loss}"]
    parts += [as_text(method)] if method else []
    distillation = config.get("distillation")
    parts += ["and verl's distillation"] if distillation and distillation.enabled else []
    if method and method.clip.looks_at_tokens:
        ratios = "by the tokens of each batch"
    else:
        ends = zip(PROBABILITIES, *_allowed(method).tolist(), strict=True) if method else ()
        ratios = ", ".join(f"{low:.5g} to {high:.5g} at p = {p}" for p, low, high in ends)
    data, trainer, rollout = config.data, config.trainer, config.actor_rollout_ref.rollout
    prompts = data.train_batch_size
    if trainer_of(config) == "fully_async":
        prompts = config.async_training.require_batches * actor.ppo_mini_batch_size
    late = f", from step {trainer.critic_warmup}" if trainer.critic_warmup > 1 else ""
    new = ", ".join(new_settings(config))
    stock: Callable[..., Any] | None = None
    if loss != "band":
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        stock = POLICY_LOSS_REGISTRY.get(loss)
    lines = {
        "loss": ", ".join(parts),
        "ratios": ratios,
        "average": _verl_average.announced(method, stock, actor),
    }
    written = config.actor_rollout_ref.actor.policy_loss
    if loss == "band" and not _takes_dual_clip(written) and actor.clip_ratio_c != type(actor).clip_ratio_c:
        lines["dual clip"] = (
            f"the method's own or none; clip_ratio_c={actor.clip_ratio_c} acts beside a clip rule alone"
        )
    lines |= {
        "updates": f"{_updates(config)} for each batch of {prompts} × {rollout.n} responses{late}",
        "model": f"{config.actor_rollout_ref.model.path}, at most {data.max_response_length} tokens a response",
        "training": f"advantages of {config.algorithm.adv_estimator}, learning rate {actor.optim.lr:g}, KL loss "
        f"{actor.use_kl_loss and actor.kl_loss_coef:g}, entropy {actor.entropy_coeff:g}, "
        f"{trainer.total_epochs} epochs, {trainer.nnodes} × {trainer.n_gpus_per_node} GPUs",
    }
    return lines | ({"not verl's": f"{new}: verl has no settings of these names"} if new else {})
