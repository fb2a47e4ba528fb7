"""A method under verl's other settings: refused where they would make it another, and proved while it trains."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf

from bandpo.audit.online import BandWarning
from bandpo.batch import Batch
from bandpo.errors import InvalidValue, RunProblem
from bandpo.gradient_check import compare
from bandpo.integrations._verl_announcement import leaves
from bandpo.loss import aggregate, known_aggregation
from bandpo.methods import Method
from bandpo.rules import Unclipped
from bandpo.schedules import TrainingState
from bandpo.text import as_text

if TYPE_CHECKING:
    from jaxtyping import Float
    from omegaconf import DictConfig
    from torch import Tensor
    from verl.workers.config import ActorConfig

ACTOR = "actor_rollout_ref.actor."
WHERE = f"{ACTOR}policy_loss."
VERLS_DEFAULT = "token-mean"
PROBABILITIES = (0.01, 0.1, 0.5, 0.9, 0.99)
"""From a rare token to a sure one, to say and to try what a rule allows."""
FAR = 10
"""A ratio that hardly a token reaches: the paper's cap, and the authors' dual clip."""
OF_LOSSES = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "tau_pos", "tau_neg")
OF_LOSSES += ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
"""Settings of verl's own losses, which no method reads: the actor's, and the policy loss's."""
FREE = re.compile(rf"^(recipe\b|model_engine$|{WHERE})|kwargs")
"""Settings of which verl's config need not have the names."""
EVERY = 1000
"""Losses from one comparison to the next. One costs about ten losses, so a hundredth of what the loss costs."""


def mode_of(method: Method, loss_agg_mode: str) -> str:
    """The ``loss_agg_mode`` that a method is averaged by: its own, unless the user has set verl's."""
    if method.aggregation is None or loss_agg_mode != VERLS_DEFAULT:
        return loss_agg_mode
    own = known_aggregation(method.aggregation)
    return "token-sum" if own == "sum" else own


def check_settings(method: Method | None, actor: ActorConfig, config: DictConfig) -> None:
    """Refuse in the driver what would train another method than was asked for, by the name of the setting."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as KNOWN

    places = dict.fromkeys(vars(actor), ACTOR) | dict.fromkeys(("method", *vars(actor.policy_loss)), WHERE)
    for key in new_settings(config):
        name = key.rpartition(".")[2]
        _refuse(name in places, f"{key}: verl does not look there; write {places.get(name)}{name}")
    for key, value in leaves(OmegaConf.to_container(config)):
        ours = key.endswith("._target_") and str(value).startswith("bandpo.integrations.verl.")
        _refuse(ours and key != f"{WHERE}_target_", f"{key}: verl does not look there; write {WHERE}_target_")
    for key in ("data.train_batch_size", f"{ACTOR}ppo_mini_batch_size", f"{ACTOR}ppo_epochs"):
        whole = isinstance(count := OmegaConf.select(config, key), int) and count > 0
        _refuse(not whole, f"{key} must be a whole number of at least 1, got {count!r}")
    mode = actor.policy_loss.get("audited") or actor.policy_loss.loss_mode
    losses = sorted(KNOWN.keys() - {"audited"})
    unknown = mode not in losses and not config.actor_rollout_ref.model.external_lib  # which may register it
    _refuse(unknown, f"{WHERE}loss_mode: no policy loss is named {mode!r} of {', '.join(losses)}")
    ignored = config.algorithm.filter_groups.enable and not config.trainer.use_v1
    _refuse(ignored, "algorithm.filter_groups.enable: the trainer of trainer.use_v1=false ignores it")
    if method is None or mode != "band":
        return
    distilled = config.distillation.enabled and not config.distillation.distillation_loss.use_task_rewards
    _refuse(
        distilled,
        f"distillation.distillation_loss.use_task_rewards=false leaves out the policy loss, {method}",
    )
    written = config.actor_rollout_ref.actor.policy_loss
    empty = "method" in written and written["method"] is None
    _refuse(empty, f"{WHERE}method is null: leave it out for Band(KL(), 0.05), or write 'Unclipped()'")
    for name in OF_LOSSES:
        where, given = (ACTOR, actor) if hasattr(actor, name) else (WHERE, actor.policy_loss)
        said, instead = f"{where}{name}={getattr(given, name)}", f"{WHERE}method='FixedClip(low, high)'"
        other = getattr(given, name) != getattr(type(given), name)
        _refuse(other, f"{said} has no effect beside {method}: leave it out, or write {instead}")
    kind = OmegaConf.select(config, "algorithm.rollout_correction.loss_type", default="ppo_clip")
    ignored = _bypasses(config) and kind != "ppo_clip"
    _refuse(ignored, f"algorithm.rollout_correction.loss_type={kind} has no effect beside {method}")
    _check_acts(method, config)
    _refuse(
        method.old_policy == "rollout" and not _bypasses(config),
        f"{WHERE}method: {method!r} refers to the rollout engine's log-probabilities, and verl gives the trainer's: "
        "set algorithm.rollout_correction.bypass_mode=true and actor_rollout_ref.rollout.calculate_log_probs=true; or "
        f"method={str(replace(method, old_policy='trainer'))!r} for the trainer's",
    )
    if not method.objective.whole_batch:
        return
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    rows, micro = actor.ppo_mini_batch_size * actor.rollout_n, actor.ppo_micro_batch_size_per_gpu or 0
    _refuse(
        actor.use_dynamic_bsz or micro * gpus < rows,
        f"{WHERE}method: {_splits(method, math.ceil(rows / gpus))}",
    )
    _refuse(
        actor.engine.get("pipeline_model_parallel_size", 1) > 1,
        f"{WHERE}method: {method!r} has sums over all processes, and those of a pipeline have no loss: set "
        f"{ACTOR}megatron.pipeline_model_parallel_size=1",
    )


def _refuse(wrong: object, why: str) -> None:
    if wrong:
        raise InvalidValue(why)


def _splits(method: Method, rows: float) -> str:
    return (
        f"{method!r} needs a whole mini-batch at once, and verl splits it: set {ACTOR}use_dynamic_bsz=false and "
        f"{ACTOR}ppo_micro_batch_size_per_gpu={rows:g}"
    )


def _bypasses(config: DictConfig) -> bool:
    """Whether the old policy is the rollout engine's."""
    return bool((config.algorithm.get("rollout_correction") or {}).get("bypass_mode"))


def _check_acts(method: Method, config: DictConfig) -> None:
    """Refuse a clip rule that can never act."""
    if method.clip == Unclipped():
        return
    rule, p, (lower, upper) = repr(method.clip), torch.tensor(PROBABILITIES), _allowed(method)
    above = (upper > 0.9 * (1 / p).clamp(max=FAR)).all() and upper.isfinite().any()
    below = (lower < 1 / FAR).all() and lower.any()
    _refuse(
        above or below,
        f"{WHERE}method: at no probability does {rule} block a ratio {'above' if above else 'below'} 1 that training "
        "reaches. Is a number mistyped? No bound on a side is low=1 or high=inf",
    )
    _refuse(
        _updates(config) <= 1 and not _bypasses(config),
        f"{ACTOR}ppo_mini_batch_size: there is one update for each batch, so every ratio is 1 and {rule} never acts: "
        "make it smaller than data.train_batch_size, or write method='Unclipped()'",
    )


def _allowed(method: Method) -> Float[Tensor, "2 probability"]:
    bounds = method.clip.bounds(torch.tensor([PROBABILITIES], dtype=torch.float64).log())
    return torch.cat([bounds.lower, bounds.upper])


def _updates(config: DictConfig) -> int:
    """Optimiser steps on one batch, at whose start every ratio is 1.

    verl fills a batch up to whole mini-batches of actor and critic. It may train on parts of a batch: then each has an
    old policy of its own, unless rollouts are on separate GPUs.
    """
    actor, critic, trainer = config.actor_rollout_ref.actor, config.critic, config.trainer
    of_mode = trainer.v1.get(trainer.v1.trainer_mode) or {}  # none of a mode that verl does not know
    parts = of_mode.get("parameter_sync_step", 1) if trainer.use_v1 else 1
    default, mini = config.algorithm.adv_estimator == "gae", actor.ppo_mini_batch_size
    learns = default if critic.enable is None else critic.enable
    whole = math.lcm(mini, critic.ppo_mini_batch_size) if learns else mini
    updates = math.ceil(config.data.train_batch_size / parts / whole) * whole // mini * actor.ppo_epochs
    return updates * parts if trainer.v1.trainer_mode == "separate_async" else updates


def identity(method: Method | None, actor: ActorConfig, config: DictConfig) -> dict[str, str]:
    """What a run is, in words: its loss and the ratios that this allows, its updates and its size."""
    mode = actor.policy_loss.get("audited") or actor.policy_loss.loss_mode
    loss = ([] if mode == "band" else [f"verl's {mode}"]) + ([as_text(method)] if method else [])
    loss += ["and verl's distillation"] if config.distillation.enabled else []
    ends = zip(PROBABILITIES, *_allowed(method).tolist(), strict=True) if method else ()
    data, trainer, rollout = config.data, config.trainer, config.actor_rollout_ref.rollout
    late = f", from step {trainer.critic_warmup}" if trainer.critic_warmup > 1 else ""
    new = ", ".join(new_settings(config))
    return {
        "loss": ", ".join(loss),
        "ratios": ", ".join(f"{low:.5g} to {high:.5g} at p = {p}" for p, low, high in ends),
        "average": mode_of(method, actor.loss_agg_mode) if method and mode == "band" else actor.loss_agg_mode,
        "updates": f"{_updates(config)} for each batch of {data.train_batch_size} × {rollout.n} responses{late}",
        "model": f"{config.actor_rollout_ref.model.path}, at most {data.max_response_length} tokens a response",
        "training": f"advantages of {config.algorithm.adv_estimator}, learning rate {actor.optim.lr:g}, KL loss "
        f"{actor.use_kl_loss and actor.kl_loss_coef:g}, entropy {actor.entropy_coeff:g}, "
        f"{trainer.total_epochs} epochs, {trainer.nnodes} × {trainer.n_gpus_per_node} GPUs",
    } | ({"not verl's": f"{new}: verl has no settings of these names"} if new else {})


def new_settings(config: DictConfig) -> list[str]:
    """Settings that verl's own config does not have, which a misspelling makes too; not those of a method or recipe."""

    def verls(key: str) -> bool:
        return key in known_settings() or ("." in key and verls(key.rpartition(".")[0]))

    keys = [key for key, value in leaves(OmegaConf.to_container(config)) if value is not None]
    return [key for key in keys if not (verls(key) or FREE.search(key))]


@functools.cache
def known_settings() -> set[str]:
    """verl's own settings, of each of its engines."""
    import verl

    files = Path(verl.__path__[0], "trainer/config").glob("_generated_ppo*.yaml")
    return {key for file in files for key, _ in leaves(OmegaConf.to_container(OmegaConf.load(file)))}


def share_of(mask: Tensor, mode: str, info: Mapping[str, Any]) -> Tensor:
    """What each token's loss counts for by verl's documentation of its averages, of which ``info`` has the sizes."""
    whole, name = info.get("batch_num_tokens" if mode == "token-mean" else "global_batch_size"), mode
    per_token = info.get("dp_size") or 1.0
    if mode == "token-sum":
        whole, name = None, "sum"
    elif mode == "seq-mean-token-sum-norm":
        name = "seq-mean-token-sum"
        per_token = per_token / (info.get("loss_scale_factor") or mask.shape[-1])
    with torch.enable_grad():  # the derivative of an average, which is linear
        losses = torch.zeros_like(mask, dtype=torch.float32, requires_grad=True)
        return per_token * torch.autograd.grad(aggregate(losses, mask, name, normalizer=whole), losses)[0]


def state_of(method: Method, rows: int, config: ActorConfig) -> TrainingState:
    """What the method's sums run over: all processes, if it has sums; refused where ``rows`` are a part of its own."""
    if not method.objective.whole_batch:
        return TrainingState()
    info = config.global_batch_info
    whole = (info.get("global_batch_size") or 0) / (info.get("dp_size") or 1)
    _refuse(rows < whole, _splits(method, whole))
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    several = group is not None and torch.distributed.get_world_size(group) > 1
    return TrainingState(processes=group if several else None)


class Certifier:
    """Compares what reaches the log-probabilities in the backward pass with the method's gradient, now and then.

    It does so for the first loss of each process, for the first of which tokens are blocked, and for every `EVERY`-th
    of either. A factor on the whole loss is verl's: the number of micro-batches, or a loss scale.
    """

    def __init__(self) -> None:
        self._losses: Counter[bool] = Counter()

    def __call__(
        self,
        loss: Tensor,
        logp: Tensor,
        method: Method,
        batch: Batch,
        share: Tensor,
        *,
        blocked: bool,
        stop: bool,
    ) -> None:
        """Watch the backward pass of one loss, if it is its turn; the rest as for `bandpo.gradient_check.compare`.

        ``blocked`` says whether the method blocks a token, ``stop`` whether a mismatch ends the run or is a warning.
        """
        turn = self._losses[blocked] % EVERY == 0
        self._losses[blocked] += 1
        # Sums over processes cannot be formed again in one process's backward pass.
        if not turn or batch.state.processes is not None:
            return
        scale: list[Tensor] = []
        loss.register_hook(scale.append)  # called before that of the log-probabilities

        def look(gradient: Tensor) -> None:
            found = compare(gradient, method, batch, share * scale[-1])
            if found.equal:
                print(f"bandpo: {found}", flush=True)  # verl's own way to say something; Ray passes it on
            elif stop:
                raise RunProblem(f"{found}; {ACTOR}policy_loss.certify=warn trains on")
            else:
                warnings.warn(str(found), BandWarning, stacklevel=2)

        logp.register_hook(look)
