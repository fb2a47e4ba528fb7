"""Loss aggregation in verl: the one that the settings ask for, and the name of the one that a loss really applies.

The public setting is called ``average``; verl's own is called ``loss_agg_mode``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from bandpo.core.aggregation import aggregation_weights, canonical_aggregation
from bandpo.core.errors import InvalidValue
from bandpo.core.methods import Method
from bandpo.core.sequences import Sequences
from bandpo.integrations.verl.settings import ACTOR, POLICY_LOSS, overrides, refuse_if

if TYPE_CHECKING:
    from torch import Tensor
    from verl.workers.config import ActorConfig

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
"""verl's aggregation modes."""
DEFAULT = "token-mean"
"""verl's default of ``loss_agg_mode``."""
NO_MODE = "none of verl's"
"""The start of the name of an average that is none of `MODES`."""
NORM = "seq-mean-token-sum-norm"
"""The mode that divides by a length: ``loss_scale_factor``, or else the longest response of each micro-batch."""


def check_name(average: str | None) -> None:
    """Check that the setting ``average`` has an allowed value.

    Raises:
        ValueError: it is none of ``method``, ``framework`` and `MODES`.
    """
    if average not in (None, "method", "framework", *MODES):
        raise InvalidValue(
            f"{POLICY_LOSS}average must be method, framework or one of {', '.join(MODES)}, got {average!r}"
        )


def average_of(method: Method, average: str | None, loss_agg_mode: str) -> str:
    """Return the aggregation mode of a method's loss, one of `MODES`.

    Args:
        method: The method.
        average: The setting ``average``: ``method`` or None for the method's own mode, or ``loss_agg_mode`` if it is a
            clip rule alone, which has none; ``framework`` for ``loss_agg_mode``; or one of `MODES`.
        loss_agg_mode: verl's setting.

    >>> from bandpo.core.methods import GRPO
    >>> average_of(GRPO(), None, "token-mean"), average_of(GRPO(), "framework", "token-mean")
    ('seq-mean-token-mean', 'token-mean')
    """
    if average in (None, "method"):
        return _mode_of(method) or loss_agg_mode
    return loss_agg_mode if average == "framework" else average


def _mode_of(method: Method) -> str | None:
    """Return verl's name of the method's own aggregation mode; None if it has none."""
    if method.aggregation is None:
        return None
    name = canonical_aggregation(method.aggregation)
    return "token-sum" if name == "sum" else name


def check_average(method: Method, actor: ActorConfig) -> None:
    """Check that the user's ``loss_agg_mode`` does not contradict the method's own aggregation mode.

    A mode other than verl's default was set by the user. The default was set by the user if it is among hydra's
    overrides.

    Raises:
        ValueError: it does, and ``average`` does not choose between the two; the message names both settings.
    """
    mode = actor.loss_agg_mode
    method_mode = _mode_of(method)
    was_set = mode != DEFAULT or f"{ACTOR}loss_agg_mode" in overrides()
    contradicts = method_mode is not None and method_mode != mode
    refuse_if(
        actor.policy_loss.get("average") is None and contradicts and was_set,
        f"{ACTOR}loss_agg_mode={mode} contradicts {method}, whose own average is {method_mode}: set "
        f"{POLICY_LOSS}average=framework for {mode}, or {POLICY_LOSS}average=method for {method_mode}",
    )


def check_length_norm(actor: ActorConfig, average: str) -> None:
    """Check that a length is set if the aggregation mode divides by one.

    Without it verl divides by the longest response of each micro-batch, so the gradient depends on the split of a
    mini-batch into micro-batches.

    Args:
        actor: The actor's settings.
        average: The aggregation mode of a method's loss; empty for a loss of verl's own.

    Raises:
        ValueError: no length is set.
    """
    for setting, mode in ((f"{ACTOR}loss_agg_mode", actor.loss_agg_mode), (f"{POLICY_LOSS}average", average)):
        refuse_if(
            mode == NORM and actor.loss_scale_factor is None,
            f"{setting}={NORM}: without {ACTOR}loss_scale_factor verl divides by the longest response of each "
            f"micro-batch, so the gradient depends on the split: set {ACTOR}loss_scale_factor to one length for the "
            "whole run, such as that of data.max_response_length",
        )


def describe_average(method: Method, actor: ActorConfig) -> str:
    """Return a line about the aggregation mode of a method's loss, and the other terms that use ``loss_agg_mode``."""
    mode = actor.loss_agg_mode
    setting = actor.policy_loss.get("average")
    chosen_mode = average_of(method, setting, mode)
    method_mode = _mode_of(method)
    if chosen_mode == mode:
        if method_mode in (None, mode):
            return mode
        return f"{mode}, verl's loss_agg_mode, in place of the method's own {method_mode}"
    source = "the method's own" if setting in (None, "method") else f"by {POLICY_LOSS}average"
    return f"{chosen_mode}, {source}; loss_agg_mode={mode} is the average of the KL loss and of the entropy alone"


def token_shares(mask: Tensor, mode: str, info: Mapping[str, Any]) -> Tensor:
    """Return the factor of each token's loss in the aggregated loss, by verl's documentation of its modes.

    Args:
        mask: 1 for tokens that count; shape (sequences, tokens).
        mode: One of `MODES`.
        info: The sizes of the global batch, as verl passes them to its losses.

    Raises:
        ValueError: the mode divides by a length, and ``info`` has none.
    """
    name = mode
    normalizer = info.get("batch_num_tokens" if mode == "token-mean" else "global_batch_size")
    factor = info.get("dp_size") or 1.0
    if mode == "token-sum":
        name = "sum"
        normalizer = None
    elif mode == NORM:
        length = info.get("loss_scale_factor")
        if not length:
            raise InvalidValue(f"{NORM} needs {ACTOR}loss_scale_factor, one length for the whole run")
        name = "seq-mean-token-sum"
        factor = factor / length
    dtype = mask.dtype if mask.is_floating_point() else torch.float32
    return factor * aggregation_weights(Sequences(mask.to(dtype)), name, normalizer, dtype=dtype)


def name_average(shares: Tensor, mask: Tensor, mode: str, info: Mapping[str, Any]) -> str:
    """Return the name of the aggregation mode with these factors of tokens in the aggregated loss.

    Some of verl's losses ignore ``loss_agg_mode``.

    Args:
        shares: The factor of each token.
        mask: As for `token_shares`.
        mode: The configured mode, one of `MODES`.
        info: As for `token_shares`.
    """
    for name in (mode, *MODES):
        if torch.allclose(shares, token_shares(mask, name, info).to(shares), rtol=1e-3):
            return name if name == mode else f"{name}, whatever loss_agg_mode says"
    micro_batch_shares = token_shares(mask, "seq-mean-token-mean", {}).to(shares)
    quotient = (shares / micro_batch_shares)[mask > 0]
    if torch.allclose(quotient, quotient.mean(), rtol=1e-3):
        return "a mean over the sequences of each micro-batch, added up over micro-batches, whatever loss_agg_mode says"
    total = shares.sum().item()
    size = f"{total:.3g}" if math.isfinite(total) else "not finite"
    return f"{NO_MODE} (a gradient of {size} in sum on synthetic sequences of equal advantage)"
