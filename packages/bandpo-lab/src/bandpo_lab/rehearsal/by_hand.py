"""Reference gradients in float64 for the recorded calls of a policy loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bandpo.core.layout import Rows
from bandpo.core.loss import policy_loss
from bandpo.core.methods import Method
from bandpo.core.objectives import DualClip, Surrogate
from bandpo.core.rules import Band, ClipRule, FixedClip, Unclipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOLERANCE = 1e-5
"""The largest accepted error of a float32 gradient, as a share of its largest entry; 2e-7 is usual."""
ROUNDING_MARGIN = 1e-4
"""The relative distance from a bound within which float32 rounding may put a token on either side of it."""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing the recorded gradients of a loss with their reference."""

    tokens: int
    """The number of unmasked tokens."""
    clipped: int
    """The number of unmasked tokens whose gradient the clip rule changes."""
    difference: float
    """The largest difference of the gradients, as a share of the largest entry of the reference."""
    independent: bool
    """True if the reference is the formula in this file; False if it is `bandpo.policy_loss` in float64."""


def save(call: dict[str, Any], path: Path) -> None:
    """Write the arguments and the gradient of one call, with all tensors detached."""
    record = {name: value.detach() if isinstance(value, Tensor) else value for name, value in call.items()}
    torch.save(record, path)


def load(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded calls of one training process, in their order."""
    paths = sorted(folder.glob("*.pt"))
    # A file is named "<process id>-<number of the call>.pt"; one process is enough.
    return [torch.load(path) for path in paths if path.name.split("-")[0] == paths[0].name.split("-")[0]]


def compare(calls: Sequence[dict[str, Any]], method: Method) -> Comparison:
    """Compare the gradients of recorded calls with the reference for a method's loss.

    Args:
        calls: The recorded calls, as `load` returns them.
        method: The method whose loss the calls are expected to compute.
    """
    independent = has_formula(method)
    tokens = 0
    clipped = 0
    difference = 0.0
    largest = 0.0
    for call in calls:
        mask = call["response_mask"].bool()
        batch = {name: call[name].double() for name in ("log_prob", "old_log_prob", "advantages")}
        token_weights = _token_weights(call, method)
        if call.get("rollout_is_weights") is not None:
            token_weights = token_weights * call["rollout_is_weights"].double()

        # Each tensor has the shape of the batch, (sequences, tokens).
        if independent:
            expected, is_clipped, is_certain = _by_formula(method, batch, token_weights)
        else:
            expected = _by_library(method, batch, mask, token_weights)
            unclipped = _by_library(replace(method, clip=Unclipped()), batch, mask, token_weights)
            is_clipped = expected != unclipped
            is_certain = torch.ones_like(mask)

        tokens += int(mask.sum())
        clipped += int((mask & is_clipped).sum())
        compared = mask & is_certain
        errors = (call["gradient"].double() - expected)[compared].abs()
        difference = max(difference, errors.max().item())
        largest = max(largest, expected[compared].abs().max().item())
    relative = difference / largest if largest else math.nan
    return Comparison(tokens, clipped, relative, independent)


def calls_by_step(calls: Sequence[dict[str, Any]], steps: int) -> list[Sequence[dict[str, Any]]]:
    """Return the recorded calls of each step; all calls as one step if they cannot be split evenly."""
    per_step = len(calls) // steps if len(calls) % steps == 0 else len(calls)
    return [calls[start : start + per_step] for start in range(0, len(calls), per_step)]


def sync_difference(call: dict[str, Any], scores: Sequence[Sequence[float]]) -> float:
    """Compute the largest difference of a token's probability between trainer and sampler.

    A recorded call does not say which response each of its rows is, so each row is compared with the nearest response
    of the same length. If the sampler has other weights, no response is near.

    Args:
        call: The first call of a step, in which the trainer has the weights that the step begins with.
        scores: The log-probabilities of each response under the sampler's weights of the same version.

    Returns:
        The largest difference; NaN if no response has the length of a row.
    """
    return max(_nearest(row, scores) for row in rows(call, "log_prob"))


def rows(call: dict[str, Any], name: str) -> Iterator[Tensor]:
    """Yield the values of a recorded tensor for each sequence that has an unmasked token, of shape (tokens,).

    Args:
        call: A recorded call.
        name: The name of the tensor: ``log_prob`` or ``old_log_prob``.
    """
    masks = call["response_mask"].bool()
    for values, mask in zip(call[name], masks, strict=True):
        if mask.any():
            yield values[mask]


def _nearest(log_prob: Tensor, samples: Sequence[Sequence[float]]) -> float:
    """Return the largest probability difference from the nearest sample of the same length; NaN if there is none."""
    differences = []
    for sample in samples:
        if len(sample) == len(log_prob):
            probability_difference = torch.tensor(sample).exp() - log_prob.exp()
            differences.append(probability_difference.abs().max().item())
    return min(differences, default=math.nan)


def has_formula(method: Method) -> bool:
    """Return True if `_by_formula` covers the method.

    It covers PPO's surrogate per token, with or without a dual clip, under `FixedClip`, `Unclipped` or a `Band` of
    constant radius.
    """
    objective = method.objective.objective if isinstance(method.objective, DualClip) else method.objective
    rule_has_formula = isinstance(method.clip, FixedClip | Unclipped) or (
        isinstance(method.clip, Band) and isinstance(method.clip.radius, float | int)
    )
    return rule_has_formula and objective == Surrogate() and method.level == "token"


def _by_library(method: Method, batch: dict[str, Tensor], mask: Tensor, token_weights: Tensor) -> Tensor:
    """Compute the gradient with `bandpo.policy_loss` in float64."""
    logp = batch["log_prob"].clone().requires_grad_()
    loss = policy_loss(
        logp,
        batch["old_log_prob"],
        batch["advantages"],
        mask,
        method=method,
        aggregation=lambda losses: (losses * token_weights).sum(),
        layout=Rows(),  # verl passes one sequence per row
    ).loss
    return torch.autograd.grad(loss, logp)[0]


def _by_formula(
    method: Method, batch: dict[str, Tensor], token_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradient by PPO's formula, without the code of `bandpo.policy_loss`.

    A token has no gradient if its ratio is beyond the rule's limit and its advantage pushes it further. For `Band`, no
    bounds are needed: the divergence at the ratio is compared with the radius.

    Returns:
        The gradient; a mask of the tokens that the rule clips; and a mask of the tokens that are far enough from
        every limit for float32 rounding not to matter. Each has the shape of the batch.
    """
    advantages = batch["advantages"]
    ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()
    excess = _excess(method.clip, ratio, batch["old_log_prob"])
    is_clipped = torch.where(advantages > 0, ratio > 1, ratio < 1) & (advantages != 0) & (excess > 0)
    has_no_gradient = is_clipped
    distance = excess.abs()

    # A dual clip drops tokens of negative advantage above its own limit as well.
    if isinstance(method.objective, DualClip):
        dual_excess = ratio / method.objective.max_ratio - 1
        has_no_gradient = is_clipped | ((advantages < 0) & (dual_excess > 0))
        distance = torch.minimum(distance, dual_excess.abs())

    gradient = -torch.where(has_no_gradient, 0.0, ratio) * advantages * token_weights
    return gradient, is_clipped, distance > ROUNDING_MARGIN


def _excess(rule: ClipRule, ratio: Tensor, old_log_prob: Tensor) -> Tensor:
    """Compute how far each ratio exceeds the rule's limit, as a share of the limit; negative inside it."""
    if isinstance(rule, FixedClip):
        return torch.where(ratio > 1, ratio / (1 + rule.high) - 1, (1 - ratio) / max(rule.low, 1e-300) - 1)
    if not isinstance(rule, Band):
        return torch.full_like(ratio, -1.0)

    # The f-divergence of the two-point distributions (token, all other tokens).
    p = old_log_prob.exp()
    p_others = -torch.expm1(old_log_prob)
    f = rule.divergence.f
    divergence = p * f(ratio.log()) + p_others * f(torch.log((1 - p * ratio).clamp(min=0) / p_others))
    divergence = torch.where(p_others > 0, divergence, 0.0)
    assert isinstance(rule.radius, float | int)
    ratio_excess = torch.where(ratio > 1, ratio / rule.max_ratio - 1, -1.0)
    return torch.maximum(divergence / rule.radius - 1, ratio_excess)


def _token_weights(call: dict[str, Any], method: Method) -> Tensor:
    """Compute the weight of each token's loss in verl's average, as the gradient of that average."""
    # These import verl's trainer, which chooses a platform, and `cpu` registers one after it imported this module.
    from verl.trainer.ppo.core_algos import agg_loss

    from bandpo.integrations.verl.average import average_of

    mode = average_of(method, call["average_setting"], call["loss_agg_mode"])
    losses = torch.zeros_like(call["log_prob"], dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        average = agg_loss(losses, call["response_mask"], mode, **call["average"])
        (weights,) = torch.autograd.grad(average, losses)
    return weights
