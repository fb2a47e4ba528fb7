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

from bandpo.audit.watch import BandWarning
from bandpo.batch import Batch
from bandpo.certificate import compare
from bandpo.errors import InvalidValue, RunProblem
from bandpo.integrations._adapt import token_weights
from bandpo.loss import aggregate, known_aggregation
from bandpo.methods import Method
from bandpo.radius import TrainingState

if TYPE_CHECKING:
    from torch import Tensor
    from verl.workers.config import ActorConfig

ACTOR = "actor_rollout_ref.actor."
VERLS_DEFAULT = "token-mean"
EVERY = 1000
"""Losses from one comparison to the next. One costs about ten losses, so a hundredth of what the loss costs."""
_logger = logging.getLogger("bandpo")


def mode_of(method: Method, loss_agg_mode: str) -> str:
    """The ``loss_agg_mode`` that a method is averaged by: its own, unless the user has set verl's.

    >>> from bandpo import GRPO
    >>> mode_of(GRPO(), "token-mean"), mode_of(GRPO(), "seq-mean-token-sum")
    ('seq-mean-token-mean', 'seq-mean-token-sum')
    """
    if method.aggregation is None or loss_agg_mode != VERLS_DEFAULT:
        return loss_agg_mode
    own = known_aggregation(method.aggregation)
    return "token-sum" if own == "sum" else own


def check_settings(method: Method, actor: ActorConfig, config: Any) -> None:
    """Refuse in the driver what would make the method another one, and say which setting of verl's stands beside it.

    Args:
        method: The method.
        actor: The actor's settings.
        config: All settings of the run.

    Raises:
        ValueError: the method refers to the rollout engine's log-probabilities, and verl would give the trainer's; or
            it needs a whole mini-batch at once, and verl would split it. The message names the setting to change.
    """
    own = mode_of(method, VERLS_DEFAULT)
    if method.aggregation and own != mode_of(method, actor.loss_agg_mode):
        _logger.warning(
            "%sloss_agg_mode=%s, which you set, averages in place of %s's own %s",
            *(ACTOR, actor.loss_agg_mode, method, own),
        )
    correction = config.algorithm.get("rollout_correction") or {}
    if method.old_policy == "rollout" and not correction.get("bypass_mode"):
        raise InvalidValue(
            f"{method!r} refers to the rollout engine's log-probabilities, and verl gives the trainer's: set "
            "algorithm.rollout_correction.bypass_mode=true and actor_rollout_ref.rollout.calculate_log_probs=true; or "
            f"method={str(replace(method, old_policy='trainer'))!r} for the trainer's"
        )
    if not method.objective.whole_batch:
        return
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    rows, micro = actor.ppo_mini_batch_size * actor.rollout_n, actor.ppo_micro_batch_size_per_gpu or 0
    if actor.use_dynamic_bsz or micro * gpus < rows:
        raise InvalidValue(
            f"{method!r} needs a whole mini-batch at once, and verl would split it: set {ACTOR}use_dynamic_bsz=false "
            f"and {ACTOR}ppo_micro_batch_size_per_gpu={math.ceil(rows / gpus)}"
        )
    if actor.engine.get("pipeline_model_parallel_size", 1) > 1:
        raise InvalidValue(
            f"{method!r} has sums over all processes, and those of a pipeline have no loss: set "
            f"{ACTOR}megatron.pipeline_model_parallel_size=1"
        )


def share_of(mask: Tensor, mode: str, info: Mapping[str, Any]) -> Tensor:
    """What each token's loss counts for by verl's documentation of its averages.

    Args:
        mask: 1 for tokens that count.
        mode: verl's ``loss_agg_mode``.
        info: ``ActorConfig.global_batch_info``.
    """
    whole, name = info.get("batch_num_tokens" if mode == "token-mean" else "global_batch_size"), mode
    per_token = info.get("dp_size") or 1.0
    if mode == "token-sum":
        whole, name = None, "sum"
    elif mode == "seq-mean-token-sum-norm":
        name = "seq-mean-token-sum"
        per_token = per_token / (info.get("loss_scale_factor") or mask.shape[-1])
    return per_token * token_weights(lambda losses: aggregate(losses, mask, name, normalizer=whole), mask)


def state_of(method: Method, rows: int, config: ActorConfig) -> TrainingState:
    """What the method's sums run over: all processes, if it has sums.

    Args:
        method: The method.
        rows: How many sequences the loss was given.
        config: The actor's settings, which know how many a mini-batch has.

    Raises:
        ValueError: the loss was given a part of the mini-batch.
    """
    if not method.objective.whole_batch:
        return TrainingState()
    info = config.global_batch_info
    whole = (info.get("global_batch_size") or 0) / (info.get("dp_size") or 1)
    if rows < whole:
        raise InvalidValue(
            f"{method!r} needs a whole mini-batch at once, and got {rows} of its {whole:g} sequences on this process: "
            f"set {ACTOR}use_dynamic_bsz=false and {ACTOR}ppo_micro_batch_size_per_gpu={whole:g}"
        )
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
        """Watch the backward pass of one loss, if it is its turn.

        Args:
            loss: The loss that verl gets.
            logp: What it was computed from; verl may add terms of its own to other views.
            method, batch, share: As for `bandpo.certificate.compare`.
            blocked: Whether the method blocks a token of it.
            stop: Whether a mismatch ends the run; else it is a warning.

        Raises:
            RuntimeError: in the backward pass, if the gradient is not the method's.
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
