"""Band, and nearly every other method, as a registered loss of rLLM, on its verl, Tinker and Fireworks backends.

    algorithm:
      loss_plugins: ["bandpo_rllm"]
      loss_fn: bandpo_seq_mean_token_mean
      loss_params: {method: "SAPO(1.0, 1.05)"}

Without ``method`` it is ``Band(KL(), 0.05)``. rLLM knows the average of a loss by its name: ``bandpo_token_mean``,
``bandpo_seq_mean_token_mean`` and ``bandpo_seq_mean_token_sum`` are the same loss under each. A method that has another
average than its loss's name is refused. ``loss_params`` may hold ``record``, a folder for the tokens of every loss, see
`bandpo.Recorder`. Methods that need all of an update are refused.

Anchor: ``logp_old``; for methods that refer to the sampler, such as ``DPPO()``, ``logp_rollout``. rLLM adds no KL
penalty and no entropy bonus to a registered loss, and does not tell it with which weights a token was sampled.

Written for the branch ``terminal-rl`` (commit a5fa9aa) of rLLM, which has `register_loss`; its main branch has not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rllm

from bandpo import policy_loss
from bandpo.errors import InvalidValue
from bandpo.integrations import check_settings, read_method, record
from bandpo.loss import known_aggregation

AVERAGES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
"""The averages of methods that rLLM has."""


def _name(average: str) -> str:
    """Return the ``loss_fn`` of an average."""
    return f"bandpo_{average.replace('-', '_')}"


def loss_of(average: str) -> Callable[[Any], tuple[Any, dict[str, float]]]:
    """Return the loss that rLLM averages in one way."""
    name = _name(average)

    def loss(ctx: Any) -> tuple[Any, dict[str, float]]:
        """Compute a method's loss of a batch (verl) or of one sequence (Tinker, Fireworks).

        Raises:
            ValueError: a setting cannot be read or is refused, the method has another average, it refers to the
                sampler's log-probabilities and there are none, or a counted log-probability is out of range.
        """
        method = read_method("algorithm.loss_params.", ctx.params.get("method"))
        check_settings("rLLM", ctx.params, method)
        if method.aggregation and known_aggregation(method.aggregation) != average:
            raise InvalidValue(
                f"algorithm.loss_fn={name} averages by {average}, and {method!r} by {method.aggregation}; use the "
                f"loss of that average, one of {', '.join(map(_name, AVERAGES))}"
            )
        sampler = method.old_policy == "rollout"
        logp_old = ctx.logp_rollout if sampler else ctx.logp_old
        if logp_old is None:
            raise InvalidValue(
                f"algorithm.loss_params.method={method!r} refers to the sampler's log-probabilities, which are not in "
                "the batch; set actor_rollout_ref.rollout.calculate_log_probs=true"
            )
        tensors = (ctx.logp_curr, logp_old, ctx.advantages, ctx.action_mask)
        # On Tinker and Fireworks a loss gets one sequence at a time.
        rows = [x if x.dim() == 2 else x[None] for x in tensors]
        rollout = ctx.logp_rollout
        if rollout is not None and rollout.dim() == 1:
            rollout = rollout[None]
        record(ctx.params.get("record"), "rllm", method, *rows, logp_rollout=rollout, old_is_rollout=sampler)

        def reduce(values: Any) -> Any:
            return ctx.aggregate(values, ctx.action_mask)

        total, metrics = policy_loss(*tensors, method=method, aggregation=reduce, packed=False)
        return total, {f"bandpo/{key}": value.item() for key, value in metrics.items()}

    rllm.register_loss(name, agg_mode=average)(loss)
    return loss


LOSSES = {average: loss_of(average) for average in AVERAGES}
