"""What the gradient of a recorded call of the policy loss has to be, worked out again in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bandpo.integrations._verl_average import average_of
from bandpo.loss import policy_loss
from bandpo.methods import Method
from bandpo.objectives import DualClip, Surrogate
from bandpo.rules import Band, ClipRule, FixedClip, Unclipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOLERANCE = 1e-5
"""Of a gradient in float32, as a share of its largest entry; 2e-7 is usual."""
NEAR = 1e-4
"""A token this close to its bound, as a share of it, may be rounded to either side."""


@dataclass(frozen=True)
class Comparison:
    """Recorded calls beside their reference."""

    tokens: int
    """Counted tokens."""
    clipped: int
    """Those of them whose gradient the clip rule changes."""
    difference: float
    """Largest difference of the gradients, as a share of the largest entry."""
    independent: bool
    """Whether the reference is the formula below, or the library itself in float64."""


def save(call: dict[str, Any], path: Path) -> None:
    """Writes one call: its tensors, and what else it was told."""
    torch.save({k: part.detach() if isinstance(part, Tensor) else part for k, part in call.items()}, path)


def load(folder: Path) -> list[dict[str, Any]]:
    """The recorded calls of one training process, in their order."""
    paths = sorted(folder.glob("*.pt"))
    return [torch.load(path) for path in paths if path.name.split("-")[0] == paths[0].name.split("-")[0]]


def compare(calls: Sequence[dict[str, Any]], method: Method) -> Comparison:
    """Compares the gradients of all calls with the reference for a loss of a method."""
    difference = largest = 0.0
    tokens = clipped = 0
    for call in calls:
        mask = call["response_mask"].bool()
        wide = {name: call[name].double() for name in ("log_prob", "old_log_prob", "advantages")}
        weights = call.get("rollout_is_weights")
        counts = _counts(call, method) * (1.0 if weights is None else weights.double())
        if has_formula(method):
            dropped, clipped_out, sure = _dropped(method, **wide)
            ratio = (wide["log_prob"] - wide["old_log_prob"]).exp()
            expected = -torch.where(dropped, 0.0, ratio) * wide["advantages"] * counts
        else:
            expected, free = (
                _by_library(which, wide, mask, counts)
                for which in (method, replace(method, clip=Unclipped()))
            )
            clipped_out, sure = expected != free, torch.ones_like(mask)
        tokens += int(mask.sum())
        clipped += int((mask & clipped_out).sum())
        counted = mask & sure
        difference = max(difference, (call["gradient"].double() - expected)[counted].abs().max().item())
        largest = max(largest, expected[counted].abs().max().item())
    return Comparison(tokens, clipped, difference / largest if largest else math.nan, has_formula(method))


def sync_differences(
    calls: Sequence[dict[str, Any]], samples: Sequence[Sequence[float]], steps: int
) -> list[float]:
    """Compute by step how far trainer and sampler differ in a token's probability.

    In the first call of a step nothing has been learnt yet, so the trainer's probabilities are those of the weights
    that the sampler should have. Which sample a row of the call is, the call does not say: it is the one of its length
    that is nearest. With weights of an earlier step none is near.

    Args:
        calls: The recorded calls, in their order.
        samples: The log-probabilities of each response, as the sampler had them.
        steps: How many steps were made.

    Returns:
        The largest difference of each step; NaN where no response has the length of a row.
    """
    every = len(calls) // steps if len(calls) % steps == 0 else len(calls)
    return [max(_nearest(row, samples) for row in _rows(call)) for call in calls[::every]]


def _rows(call: dict[str, Any]) -> Iterator[Tensor]:
    """Return the log-probabilities of each sequence that has a counted token."""
    masks = call["response_mask"].bool()
    for log_prob, mask in zip(call["log_prob"], masks, strict=True):
        if mask.any():
            yield log_prob[mask]


def _nearest(log_prob: Tensor, samples: Sequence[Sequence[float]]) -> float:
    """Return the largest difference of a probability from the nearest sample of the same length; NaN without one."""
    same = [torch.tensor(sample) for sample in samples if len(sample) == len(log_prob)]
    return min(((sample.exp() - log_prob.exp()).abs().max().item() for sample in same), default=math.nan)


def has_formula(method: Method) -> bool:
    """Whether the loss is PPO's surrogate, with or without a dual clip, under a rule of `_spent`."""
    objective = method.objective.objective if isinstance(method.objective, DualClip) else method.objective
    plain = isinstance(method.clip, FixedClip | Unclipped) or (
        isinstance(method.clip, Band) and isinstance(method.clip.radius, float | int)
    )
    return plain and objective == Surrogate() and method.level == "token"


def _by_library(method: Method, call: dict[str, Tensor], mask: Tensor, counts: Tensor) -> Tensor:
    """The gradient as `bandpo.policy_loss` has it in float64."""
    logp = call["log_prob"].clone().requires_grad_()
    loss = policy_loss(
        logp,
        call["old_log_prob"],
        call["advantages"],
        mask,
        method=method,
        aggregation=lambda losses: (losses * counts).sum(),
        packed=False,  # verl hands over one sequence a row
    ).loss
    return torch.autograd.grad(loss, logp)[0]


def _dropped(
    method: Method, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens have no gradient, which of them by the rule, and where that is sure beyond rounding.

    A token is dropped where the advantage pushes its ratio further beyond the rule's limit. Band needs no bounds for
    that: the divergence that the ratio costs is compared with the radius.
    """
    ratio = (log_prob - old_log_prob).exp()
    excess = _excess(method.clip, ratio, old_log_prob)
    by_rule = torch.where(advantages > 0, ratio > 1, ratio < 1) & (advantages != 0) & (excess > 0)
    if not isinstance(method.objective, DualClip):
        return by_rule, by_rule, excess.abs() > NEAR
    over = ratio / method.objective.max_ratio - 1
    by_dual = (advantages < 0) & (over > 0)
    return by_rule | by_dual, by_rule, torch.minimum(excess.abs(), over.abs()) > NEAR


def _excess(rule: ClipRule, ratio: Tensor, old_log_prob: Tensor) -> Tensor:
    """By what share of it the rule's limit is exceeded, < 0 inside."""
    if isinstance(rule, FixedClip):
        return torch.where(ratio > 1, ratio / (1 + rule.high) - 1, (1 - ratio) / max(rule.low, 1e-300) - 1)
    if not isinstance(rule, Band):
        return torch.full_like(ratio, -1.0)
    p = old_log_prob.exp()
    rest = -torch.expm1(old_log_prob)
    f = rule.divergence.f
    spent = p * f(ratio.log()) + rest * f(torch.log((1 - p * ratio).clamp(min=0) / rest))
    spent = torch.where(rest > 0, spent, 0.0)
    assert isinstance(rule.radius, float | int)
    return torch.maximum(spent / rule.radius - 1, torch.where(ratio > 1, ratio / rule.max_ratio - 1, -1.0))


def _counts(call: dict[str, Any], method: Method) -> Tensor:
    """Compute what each token's loss counts for in verl's average."""
    from verl.trainer.ppo.core_algos import agg_loss

    mode = average_of(method, call["average_setting"], call["loss_agg_mode"])
    probe = torch.zeros_like(call["log_prob"], dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        total = agg_loss(probe, call["response_mask"], mode, **call["average"])
        (counts,) = torch.autograd.grad(total, probe)
    return counts
