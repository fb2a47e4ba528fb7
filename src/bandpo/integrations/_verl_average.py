"""The average of a loss in verl: which one is asked for, and which one a loss of verl's own really takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from bandpo.errors import InvalidValue
from bandpo.integrations._verl_settings import ACTOR, WHERE, overrides, refuse
from bandpo.loss import aggregation_weights, canonical_aggregation
from bandpo.methods import Method
from bandpo.sequences import Sequences

if TYPE_CHECKING:
    from torch import Tensor
    from verl.workers.config import ActorConfig

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
"""The names of verl's averages."""
DEFAULT = "token-mean"
"""verl's own ``loss_agg_mode``, where nobody sets one."""
NORM = "seq-mean-token-sum-norm"
"""The average that divides by a length: without ``loss_scale_factor`` the longest response of each micro-batch."""


def check_name(average: str | None) -> None:
    """Refuse a setting ``average`` that names no average.

    Raises:
        ValueError: it is none of ``method``, ``framework`` and `MODES`.
    """
    if average not in (None, "method", "framework", *MODES):
        raise InvalidValue(
            f"{WHERE}average must be method, framework or one of {', '.join(MODES)}, got {average!r}"
        )


def average_of(method: Method, average: str | None, loss_agg_mode: str) -> str:
    """Return the name, among `MODES`, of the average that a method's loss takes.

    Args:
        method: The method.
        average: The setting: ``method`` (also None) for the method's own, which a clip rule has not; ``framework`` for
            ``loss_agg_mode``; or a name.
        loss_agg_mode: verl's setting.

    >>> from bandpo.methods import GRPO
    >>> average_of(GRPO(), None, "token-mean"), average_of(GRPO(), "framework", "token-mean")
    ('seq-mean-token-mean', 'token-mean')
    """
    if average in (None, "method"):
        return _own(method) or loss_agg_mode
    return loss_agg_mode if average == "framework" else average


def _own(method: Method) -> str | None:
    """Return verl's name of the method's own average; None if it has none."""
    if method.aggregation is None:
        return None
    name = canonical_aggregation(method.aggregation)
    return "token-sum" if name == "sum" else name


def check_average(method: Method, actor: ActorConfig) -> None:
    """Refuse a ``loss_agg_mode`` that was set, contradicts the method's own average, and would be left out.

    A mode other than verl's default was set by somebody. The default was set if it stands among hydra's overrides.

    Raises:
        ValueError: it is so; the message names the settings that decide.
    """
    mode, own = actor.loss_agg_mode, _own(method)
    was_set = mode != DEFAULT or f"{ACTOR}loss_agg_mode" in overrides()
    contradicts = own is not None and own != mode
    refuse(
        actor.policy_loss.get("average") is None and contradicts and was_set,
        f"{ACTOR}loss_agg_mode={mode} contradicts {method}, whose own average is {own}: set "
        f"{WHERE}average=framework for {mode}, or {WHERE}average=method for {own}",
    )


def check_norm(actor: ActorConfig, average: str) -> None:
    """Refuse an average by a length where no length is set.

    verl then divides by the longest response of each micro-batch, so the gradient depends on how a mini-batch is split.

    Raises:
        ValueError: it is so.
    """
    for setting, mode in ((f"{ACTOR}loss_agg_mode", actor.loss_agg_mode), (f"{WHERE}average", average)):
        refuse(
            mode == NORM and actor.loss_scale_factor is None,
            f"{setting}={NORM}: without {ACTOR}loss_scale_factor verl divides by the longest response of each "
            f"micro-batch, so the gradient depends on the split: set {ACTOR}loss_scale_factor to one length for the "
            "whole run, such as that of data.max_response_length",
        )


def described(method: Method, actor: ActorConfig) -> str:
    """Return the average of a method's loss in words, and what else ``loss_agg_mode`` averages."""
    mode, setting = actor.loss_agg_mode, actor.policy_loss.get("average")
    chosen, own = average_of(method, setting, mode), _own(method)
    if chosen == mode:
        in_place_of = own not in (None, mode)
        return f"{mode}, verl's loss_agg_mode, in place of the method's own {own}" if in_place_of else mode
    source = "the method's own" if setting in (None, "method") else f"by {WHERE}average"
    return f"{chosen}, {source}; loss_agg_mode={mode} is the average of the KL loss and of the entropy alone"


def share_of(mask: Tensor, mode: str, info: Mapping[str, Any]) -> Tensor:
    """Return what each token's loss counts for by verl's documentation of its averages.

    Args:
        mask: 1 for tokens that count.
        mode: One of `MODES`.
        info: The sizes of the global batch, as verl hands them to its losses.

    Raises:
        ValueError: an average by a length, and ``info`` has none.
    """
    normalizer, name = info.get("batch_num_tokens" if mode == "token-mean" else "global_batch_size"), mode
    factor = info.get("dp_size") or 1.0
    if mode == "token-sum":
        normalizer, name = None, "sum"
    elif mode == NORM:
        length = info.get("loss_scale_factor")
        if not length:
            raise InvalidValue(f"{NORM} needs {ACTOR}loss_scale_factor, one length for the whole run")
        name = "seq-mean-token-sum"
        factor = factor / length
    return factor * aggregation_weights(Sequences(mask.float()), name, normalizer)


def measured_average(loss: Callable[..., Any], actor: ActorConfig) -> str:
    """Return the average that a loss of verl's really takes, found from its gradient on two sequences.

    Some of verl's losses read no ``loss_agg_mode``. At a ratio of 1 and an advantage of 1 each token's gradient is
    minus what the token counts for.

    Args:
        loss: The loss as verl's registry has it.
        actor: The settings under which it is called.
    """
    mask = torch.tensor([[True, False, False], [True, True, True]])
    # Sizes of a global batch that no average of this micro-batch alone has.
    sizes = {"dp_size": 1, "batch_num_tokens": 9, "global_batch_size": 5}
    sizes["loss_scale_factor"] = actor.loss_scale_factor or 7
    logp = torch.full(mask.shape, -1.0, requires_grad=True)
    before = dict(actor.global_batch_info)
    actor.global_batch_info.update(sizes)
    try:
        value, _ = loss(
            old_log_prob=logp.detach(),
            log_prob=logp,
            advantages=torch.ones(mask.shape),
            response_mask=mask,
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
        )
        (gradient,) = torch.autograd.grad(value, logp)
    except Exception:  # a plug-in's loss may refuse such a batch
        return f"{actor.loss_agg_mode}, if the loss reads loss_agg_mode, which could not be tried"
    finally:
        actor.global_batch_info.clear()
        actor.global_batch_info.update(before)
    for mode in (actor.loss_agg_mode, *MODES):
        if torch.allclose(-gradient, share_of(mask, mode, sizes), rtol=1e-3):
            return mode if mode == actor.loss_agg_mode else f"{mode}, whatever loss_agg_mode says"
    micro = share_of(mask, "seq-mean-token-mean", {})
    if torch.allclose(-gradient, micro, rtol=1e-3):
        return "a mean over the sequences of each micro-batch, added up over micro-batches, whatever loss_agg_mode says"
    total = gradient.sum().item()
    size = f"{total:.3g}" if math.isfinite(total) else "not finite"
    return f"none of verl's (a gradient of {size} in sum on two sequences of equal advantage)"


def announced(method: Method | None, loss: Callable[..., Any] | None, actor: ActorConfig) -> str:
    """Return the line about the average: of a loss of verl's own, where there is one, or of a method's loss."""
    if loss is not None:
        return measured_average(loss, actor)
    return described(method, actor) if method else actor.loss_agg_mode
