"""The audit in verl: losses report sums in the workers, and verl's driver computes metrics from them.

verl averages the metrics of a policy loss over micro-batches and ranks and then over mini-batches, and a mean of rates
is not the rate over all tokens. So each loss reports sums over its tokens, and the driver adds them up before it
reduces its metrics, see `bandpo.integrations.verl.driver`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from verl.utils import metric

from bandpo.audit.metrics import Audit, logged
from bandpo.core.batch import Batch
from bandpo.core.methods import Method

if TYPE_CHECKING:
    from verl.workers.config import ActorConfig

SUMS = "actor/audit_sums/"
"""The prefix of the sums among the metrics of a loss."""


@torch.no_grad()
def report_sums(
    method: Method, batch: Batch, config: ActorConfig, invalid_tokens: int = 0
) -> dict[str, float]:
    """Return the audit's sums of one loss as metrics, in its worker.

    The names are always the same, also for a micro-batch without tokens.

    Args:
        method: The method of the loss.
        batch: The tokens of the loss.
        config: The actor's settings.
        invalid_tokens: The number of tokens with an invalid value. They do not count in ``batch``.
    """
    settings = config.policy_loss
    if not settings.get("audit", True):
        return {}
    audit = Audit.of(batch, method, method.tokens(batch))
    sums = dict(zip(_names_of_sums(audit), audit.flat_sums.tolist(), strict=True))
    if not sums["counted/0"]:
        # The sums of no tokens may be NaN.
        sums = dict.fromkeys(sums, 0.0)

    sums["mini_batch_tokens"] = float(config.global_batch_info.get("batch_num_tokens") or 0.0)
    sums["detail"] = float(settings.get("audit_detail", False))
    sums["poisoned_tokens"] = float(invalid_tokens)
    return {SUMS + name: value for name, value in sums.items()}


def _names_of_sums(audit: Audit) -> list[str]:
    """Return the names of the numbers in ``audit.flat_sums``, such as ``counted/0``."""
    names: list[str] = []
    for name, values in audit.sums.items():
        names += [f"{name}/{index}" for index in range(values.numel())]
    return names


def pop_audit(metrics: dict[str, Any]) -> tuple[dict[str, float], Audit | None]:
    """Remove the sums from the metrics of an actor update, before verl reduces them.

    Args:
        metrics: The metrics, from which the sums are removed.

    Returns:
        The audit's metrics, as they are logged, and the audit; none and None if the losses were not audited.
    """
    names = [name for name in metrics if name.startswith(SUMS)]
    if not names:
        return {}, None
    totals = _total_sums({name.removeprefix(SUMS): metrics.pop(name) for name in names})

    logged_metrics: dict[str, float] = {}
    audit: Audit | None = None
    if totals["counted/0"]:
        template = _template()
        audit = template.with_sums(torch.tensor([totals[name] for name in _names_of_sums(template)]))
        logged_metrics = logged(audit.metrics(), detail=bool(totals["detail"]))
    if logged_metrics or totals["poisoned_tokens"]:
        logged_metrics["audit/poisoned_tokens"] = totals["poisoned_tokens"]
    return logged_metrics, audit


@functools.cache
def _template() -> Audit:
    """Return an audit of one token, for the names and shapes of the sums."""
    token = torch.full((1, 1), -1.0)
    return Audit.from_batch(Batch.read(token, token, torch.ones(1)))


def _total_sums(means: Mapping[str, Sequence[float] | metric.Metric]) -> dict[str, float]:
    """Return the sums over all losses of a step, from verl's metrics of its mini-batches.

    For each mini-batch verl reports the mean over micro-batches and ranks, but not their number. The number is the
    mini-batch's number of tokens, which each loss reports, divided by the mean number of tokens per loss.
    """
    columns = {
        name: values.values if isinstance(values, metric.Metric) else values for name, values in means.items()
    }
    counted = columns["counted/0"]
    if isinstance(means["counted/0"], metric.Metric):
        # Not reduced yet: one value per loss.
        numbers_of_losses = [1.0] * len(counted)
    else:
        tokens = columns["mini_batch_tokens"]
        numbers_of_losses = [
            total / mean if total and mean else 1.0 for total, mean in zip(tokens, counted, strict=True)
        ]

    totals: dict[str, float] = {}
    for name, values in columns.items():
        if name == "detail":
            # A flag, which is the same in each loss, but 0 in one without tokens.
            totals[name] = max(values)
        else:
            totals[name] = sum(n * x for n, x in zip(numbers_of_losses, values, strict=True))
    return totals
