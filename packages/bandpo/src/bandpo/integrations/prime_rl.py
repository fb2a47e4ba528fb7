"""Any method as the custom loss of prime-rl, by its settings alone.

The settings are:

    [trainer.loss]
    type = "custom"
    import_path = "bandpo.integrations.prime_rl.loss"

    [trainer.loss.kwargs]
    method = "SAPO(1.0, 1.05)"
    record = "/runs/mine/tokens" # optional: the folder of a record of tokens

The default ``method`` is ``Band(KL(), 0.05)``.

The old log-probabilities are the sampler's (``inference_logprobs``), as prime-rl has no others. So the bounds also
limit the mismatch between sampler and trainer. prime-rl's micro-batches have no version of the weights that sampled a
token.

prime-rl imports the path in the trainer process, so bandpo must be installed in that environment. This module imports
nothing of prime-rl. Written for its custom-loss interface of 2026-08 (commit 559b447).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from bandpo.core.errors import InvalidValue
from bandpo.core.layout import Rows
from bandpo.core.loss import LossOutputs, policy_loss
from bandpo.integrations._adapt import read_method
from bandpo.integrations._adapt import record as write_record

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class LossInputs(Protocol):
    """The fields of prime-rl's ``LossInputs``, one sequence, that `loss` reads."""

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
    """Compute the loss of one sequence, summed over its counted tokens.

    prime-rl divides the sum by the number of tokens of all sequences. This mean over tokens replaces the loss
    aggregation of a method with another one, with a warning in the log. A method that needs other sequences raises an
    error.

    Args:
        inputs: prime-rl's ``LossInputs`` of one sequence.
        method: A clip rule or a method in its text form, see `bandpo.parse`; ``Band(KL(), 0.05)`` by default.
        kl_tau: Weight ≥ 0 of the penalty ``log_ratio²`` on every counted token. prime-rl's own default loss had one
            of 1e-3 until 18 September 2026, and has none since; use the same value here to change only the method.
        record: Folder to which the tokens of every sequence are written, see `bandpo.audit.Recorder`.

    Returns:
        An object with prime-rl's two fields, ``loss`` and ``metrics`` (those of `bandpo.policy_loss`).

    Raises:
        ValueError: a setting cannot be read, or a counted log-probability is out of range.
    """
    chosen_method = read_method("trainer.loss.kwargs.", method, aggregation="token-mean")
    if not kl_tau >= 0:
        raise InvalidValue(f"kl_tau must be at least 0, got {kl_tau!r}")

    logp = inputs.trainer_logprobs
    logp_old = inputs.inference_logprobs
    mask = inputs.loss_mask
    weights = getattr(inputs, "loss_weights", None)
    tensors = (logp, logp_old, inputs.advantages, mask)
    # A record has a dimension of sequences.
    rows = [x[None] for x in tensors]
    write_record(record, "prime-rl", chosen_method, *rows, old_is_rollout=True, update=0)

    # prime-rl splits its packed rows and calls the loss once per sequence.
    total, metrics = policy_loss(
        *tensors, method=chosen_method, weights=weights, aggregation="sum", layout=Rows()
    )
    if kl_tau:
        penalty = kl_tau * (logp - logp_old)[mask].square()
        if weights is not None:
            penalty = penalty * weights[mask]
        total = total + penalty.sum()
    return LossOutputs(total, metrics)
