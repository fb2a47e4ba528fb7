"""Band, and every other method, as the custom loss of prime-rl: settings only, no code.

    [trainer.loss]
    type = "custom"
    import_path = "bandpo_prime_rl.loss"

    [trainer.loss.kwargs]
    method = "SAPO(1.0, 1.05)"
    record = "/runs/mine/tokens" # if wanted

Without ``method`` it is ``Band(KL(), 0.05)``.

Anchor: the sampler's log-probabilities (``inference_logprobs``), the only old ones that prime-rl has. The bounds
therefore cover the mismatch between sampler and trainer too. prime-rl's micro-batches do not say with which weights a
token was sampled.

prime-rl imports the path in the trainer process, so bandpo must be installed in that environment. Written for
prime-rl's custom-loss interface of 2026-08 (commit 559b447).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from bandpo import integrations
from bandpo.errors import InvalidValue
from bandpo.integrations import read_method
from bandpo.loss import LossOutputs, policy_loss

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class LossInputs(Protocol):
    """One sequence, as prime-rl's ``LossInputs`` holds it; further fields are not read."""

    trainer_logprobs: Float[Tensor, " seq"]
    inference_logprobs: Float[Tensor, " seq"]
    advantages: Float[Tensor, " seq"]
    loss_mask: Bool[Tensor, " seq"]
    loss_weights: Float[Tensor, " seq"] | None


def loss(
    inputs: LossInputs,
    *,
    method: str | None = None,
    kl_tau: float = 0.0,
    record: str | None = None,
) -> LossOutputs:
    """The loss of one sequence, summed over its counted tokens; prime-rl divides by the global count.

    So every method has a mean over tokens; one line says so of a method with another average. One that needs other
    sequences is refused.

    Args:
        inputs: prime-rl's ``LossInputs`` of one sequence.
        method: A clip rule or a method in its text form, see `bandpo.parse`; ``Band(KL(), 0.05)`` by default.
        kl_tau: Weight ≥ 0 of the penalty ``log_ratio²`` on every counted token. prime-rl's own default loss has one
            of 1e-3: give the same here to change the method and nothing else.
        record: Folder to which the tokens of every sequence are written, see `bandpo.Recorder`.

    Returns:
        An object with prime-rl's two fields, ``loss`` and ``metrics`` (those of `bandpo.policy_loss`).

    Raises:
        ValueError: a setting cannot be read, or a counted log-probability is out of range.
    """
    chosen = read_method("trainer.loss.kwargs.", method, aggregation="token-mean")
    if not kl_tau >= 0:
        raise InvalidValue(f"kl_tau must be at least 0, got {kl_tau!r}")
    logp, logp_old, mask = inputs.trainer_logprobs, inputs.inference_logprobs, inputs.loss_mask
    weights = getattr(inputs, "loss_weights", None)
    tensors = (logp, logp_old, inputs.advantages, mask)
    integrations.record(
        record, "prime-rl", chosen, *(x[None] for x in tensors), old_is_rollout=True, update=0
    )
    # prime-rl splits its packed rows and calls a loss once for each sequence.
    total, metrics = policy_loss(*tensors, method=chosen, weights=weights, aggregation="sum", packed=False)
    if kl_tau:
        penalty = kl_tau * (logp - logp_old)[mask].square()
        total = total + (penalty if weights is None else penalty * weights[mask]).sum()
    return LossOutputs(total, metrics)
