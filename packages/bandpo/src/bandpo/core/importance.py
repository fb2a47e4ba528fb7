"""Importance weights that correct for the difference between the rollout engine's policy and the trainer's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .batch import normalize_mask, validate_logps
from .errors import InvalidValue
from .layout import Packed, Rows, offsets, read_layout
from .sequences import Sequences

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = ["rollout_weights"]

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

LARGEST_LOG = 20.0
"""Largest absolute value of a log-ratio, as in verl. Beyond it the product over a sequence would overflow."""


@torch.no_grad()
def rollout_weights(
    logp_old: Float[Tensor, "batch time"],
    logp_rollout: Float[Tensor, "batch time"],
    mask: Tensor | None = None,
    *,
    mode: str = "token_truncate",
    lower: float = 0.0,
    upper: float = 2.0,
    layout: Rows | Packed | None = None,
) -> Float[Tensor, "batch time"]:
    """Compute the ratio of the trainer's old policy to the rollout engine's, truncated or masked, for each token.

    Pass the result as ``weights`` to `bandpo.policy_loss` if the clipped ratio refers to the trainer's own old
    log-probabilities. Trainers that compute such weights do not need it: TRL with ``vllm_importance_sampling_mode``,
    verl with ``rollout_correction.rollout_is``.

    | mode | the weight of a token | in verl |
    |---|---|---|
    | ``token_truncate`` | its own ratio within [lower, upper] | ``rollout_is: token`` |
    | ``token_mask`` | its own ratio; 0 outside of [lower, upper] | the same, with a threshold of ``lower_upper`` |
    | ``sequence_truncate`` | the product of its sequence's ratios within [lower, upper] | ``rollout_is: sequence`` |
    | ``sequence_mask`` | this product; 0 outside of [lower, upper] | the same, with ``lower_upper`` |

    Modes have TRL's names. verl's masks by divergence (``rollout_rs``) are `bandpo.core.objectives.SequenceMask`.

    Args:
        logp_old: Log-probabilities (nats) under the trainer's old policy.
        logp_rollout: Log-probabilities (nats) that the rollout engine reported.
        mask: 1 for tokens that count, 0 for padding. All tokens count if not given.
        mode: One of the modes of the table.
        lower: Lower limit, ≥ 0.
        upper: Upper limit; ``inf`` for none. verl uses 2 by default, TRL 3.
        layout: The layout of the batch, as for `bandpo.policy_loss`.

    Returns:
        One weight per token, in the form of ``logp_old``; 0 in the padding.

    Raises:
        TypeError: if a tensor is invalid, see `bandpo.core.batch.Batch.read`.
        ValueError: if a tensor is invalid, the mode is unknown, or the limits are in the wrong order.

    Source: TRL's ``vllm_importance_sampling_mode`` and verl's ``rollout_is``; masked per token, arXiv 2510.18855.

    >>> logp_old, logp_rollout = torch.tensor([[0.2, 0.3]]).log(), torch.tensor([[0.05, 0.3]]).log()
    >>> rollout_weights(logp_old, logp_rollout), rollout_weights(logp_old, logp_rollout, mode="sequence_mask")
    (tensor([[2., 1.]]), tensor([[0., 0.]]))
    """
    if mode not in MODES:
        names = ", ".join(map(repr, MODES[:-1]))
        raise InvalidValue(f"mode must be {names} or {MODES[-1]!r}, got {mode!r}")
    if not 0 <= lower <= upper:
        raise InvalidValue(f"0 <= lower <= upper must hold, got {lower!r} and {upper!r}")
    dense = read_layout({"logp_old": logp_old, "logp_rollout": logp_rollout, "mask": mask}, layout)
    counted = normalize_mask(dense.tensors["logp_old"], dense.tensors["mask"])
    sequences = Sequences.read(counted, dense.layout)
    logps = {name: dense.tensors[name] for name in ("logp_old", "logp_rollout")}
    old, rollout = validate_logps(logps, counted).values()

    log_ratio = old - rollout
    if mode.startswith("sequence"):
        log_ratio = sequences.at_tokens(sequences.sum(log_ratio)).to(log_ratio.dtype)
    ratio = log_ratio.clamp(-LARGEST_LOG, LARGEST_LOG).exp()
    if mode.endswith("truncate"):
        weights = ratio.clamp(lower, upper)
    else:
        weights = ratio.masked_fill((ratio < lower) | (ratio > upper), 0.0)
    weights = weights.masked_fill(counted == 0, 0.0)

    if logp_old.is_nested:
        return torch.nested.nested_tensor_from_jagged(weights.squeeze(0), offsets(logp_old))
    return weights.view(logp_old.shape)
