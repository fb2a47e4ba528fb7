"""A method under verl's other settings: refused where they would make it another, and proved while it trains."""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf

from bandpo.audit.watch import BandWarning
from bandpo.batch import Batch
from bandpo.certificate import compare
from bandpo.errors import InvalidValue, RunProblem
from bandpo.integrations._adapt import token_weights
from bandpo.integrations._verl_identity import leaves
from bandpo.loss import aggregate, known_aggregation
from bandpo.methods import Method
from bandpo.radius import TrainingState
from bandpo.rules import Unclipped
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
EVERY = 1000
"""Losses from one comparison to the next. One costs about ten losses, so a hundredth of what the loss costs."""
_logger = logging.getLogger("bandpo")


def mode_of(method: Method, loss_agg_mode: str) -> str:
    """The ``loss_agg_mode`` that a method is averaged by: its own, unless the user has set verl's."""
    if method.aggregation is None or loss_agg_mode != VERLS_DEFAULT:
        return loss_agg_mode
    own = known_aggregation(method.aggregation)
    return "token-sum" if own == "sum" else own


def check_settings(method: Method | None, actor: ActorConfig, config: DictConfig) -> None:
    """Refuse in the driver what would train another method than was asked for, by the name of the setting."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as KNOWN

    for key, value in leaves(OmegaConf.to_container(config)):
        parent, _, name = key.rpartition(".")
        target = name == "_target_" and str(value).startswith("bandpo.integrations.verl.")
        ours = target or (name in ("method", "clip") and parent.endswith("policy_loss"))
        _refuse(ours and f"{parent}." != WHERE, f"{key}: verl does not look there; write {WHERE}{name}")
    mode = actor.policy_loss.get("audited") or actor.policy_loss.loss_mode
    unknown = mode not in KNOWN and not config.actor_rollout_ref.model.get(
        "external_lib"
    )  # which may register it
    _refuse(unknown, f"{WHERE}loss_mode: no policy loss is named {mode!r} of {', '.join(sorted(KNOWN))}")
    ignored = config.algorithm.filter_groups.enable and not config.trainer.use_v1
    _refuse(ignored, "algorithm.filter_groups.enable: the trainer of trainer.use_v1=false ignores it")
    if method is None or mode != "band":
        return
    written = config.actor_rollout_ref.actor.policy_loss
    for name in ("method", "clip"):
        empty = name in written and written[name] is None
        _refuse(empty, f"{WHERE}{name} is null: leave it out for Band(KL(), 0.05), or write 'Unclipped()'")
    for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        said, instead = f"{ACTOR}{name}={getattr(actor, name)}", f"{WHERE}method='FixedClip(low, high)'"
        other = getattr(actor, name) != getattr(type(actor), name)
        _refuse(other, f"{said} has no effect beside {method}: leave it out, or write {instead}")
    _check_acts(method, config)
    own = mode_of(method, VERLS_DEFAULT)
    if method.aggregation and own != mode_of(method, actor.loss_agg_mode):
        _logger.warning(
            "%sloss_agg_mode=%s, which you set, averages in place of %s's own %s",
            *(ACTOR, actor.loss_agg_mode, method, own),
        )
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
    stale = config.trainer.use_v1 and config.trainer.v1.trainer_mode != "sync"
    _refuse(
        _updates(config) <= 1 and not stale and not _bypasses(config),
        f"{ACTOR}ppo_mini_batch_size: there is one update for each batch, so every ratio is 1 and {rule} never acts: "
        "make it smaller than data.train_batch_size, or write clip='Unclipped()'",
    )


def _allowed(method: Method) -> Float[Tensor, "2 probability"]:
    bounds = method.clip.bounds(torch.tensor([PROBABILITIES], dtype=torch.float64).log())
    return torch.cat([bounds.lower, bounds.upper])


def _updates(config: DictConfig) -> float:
    """Optimiser steps for each batch."""
    actor = config.actor_rollout_ref.actor
    return config.data.train_batch_size / actor.ppo_mini_batch_size * actor.ppo_epochs


def identity(method: Method | None, actor: ActorConfig, config: DictConfig) -> dict[str, str]:
    """What a run is, in words: its loss and the ratios that this allows, its updates and its size."""
    mode = actor.policy_loss.get("audited") or actor.policy_loss.loss_mode
    loss = ([] if mode == "band" else [f"verl's {mode}"]) + ([as_text(method)] if method else [])
    ends = zip(PROBABILITIES, *_allowed(method).tolist(), strict=True) if method else ()
    data, trainer, rollout = config.data, config.trainer, config.actor_rollout_ref.rollout
    return {
        "loss": ", ".join(loss),
        "ratios": ", ".join(f"{low:.3g} to {high:.3g} at p = {p}" for p, low, high in ends),
        "average": mode_of(method, actor.loss_agg_mode) if method else actor.loss_agg_mode,
        "updates": f"{_updates(config):g} for each batch of {data.train_batch_size} × {rollout.n} responses",
        "model": f"{config.actor_rollout_ref.model.path}, at most {data.max_response_length} tokens a response",
        "training": f"learning rate {actor.optim.lr:g}, KL loss {actor.use_kl_loss and actor.kl_loss_coef:g}, entropy "
        f"{actor.entropy_coeff:g}, {trainer.total_epochs} epochs, {trainer.nnodes} × {trainer.n_gpus_per_node} GPUs",
    }


def share_of(mask: Tensor, mode: str, info: Mapping[str, Any]) -> Tensor:
    """What each token's loss counts for by verl's documentation of its averages, of which ``info`` has the sizes."""
    whole, name = info.get("batch_num_tokens" if mode == "token-mean" else "global_batch_size"), mode
    per_token = info.get("dp_size") or 1.0
    if mode == "token-sum":
        whole, name = None, "sum"
    elif mode == "seq-mean-token-sum-norm":
        name = "seq-mean-token-sum"
        per_token = per_token / (info.get("loss_scale_factor") or mask.shape[-1])
    return per_token * token_weights(lambda losses: aggregate(losses, mask, name, normalizer=whole), mask)


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
        """Watch the backward pass of one loss, if it is its turn; the rest as for `bandpo.certificate.compare`.

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
