"""The audit in verl: a worker's losses report sums, and verl's driver makes rates of them.

verl averages what a policy loss reports, over micro-batches and data-parallel ranks and then over mini-batches, and a
mean of rates is not the rate. So each loss reports sums over its tokens as plain numbers. Where the driver reduces the
metrics they are added up. What is logged are the metrics of `Audit.metrics`, over all tokens of the step.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from verl.utils import metric

from bandpo.audit.logs import named_rows
from bandpo.audit.metrics import COUNTERFACTUALS, Audit, logged
from bandpo.audit.watch import Watch
from bandpo.batch import Batch, Tokens
from bandpo.divergences import KL, Divergence, TotalVariation
from bandpo.integrations._adapt import token_weights
from bandpo.methods import CISPO, GPG, GSPO, SAPO, Method
from bandpo.objectives import DualClip, GeometricMean, Masked, Objective
from bandpo.rules import Band, FixedClip, Sides, Unclipped

if TYPE_CHECKING:
    from torch import Tensor
    from verl.workers.config import ActorConfig, PolicyLossConfig

    from bandpo.audit.recorder import Recorder

SUMS = "actor/audit_sums/"
"""What the names of the sums begin with, between a loss and the driver."""


def method_of(name: str, config: ActorConfig) -> Method | None:
    """The method that a loss of verl's own is under its settings; None for a loss that is none of bandpo's methods.

    Args:
        name: verl's ``loss_mode``.
        config: The actor's settings, which hold ``clip_ratio`` and the rest.
    """
    make = _METHODS.get(name)
    return make and make(config)


def _sides(config: ActorConfig) -> tuple[float, float]:
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return config.clip_ratio if low is None else low, config.clip_ratio if high is None else high


def _vanilla(config: ActorConfig) -> Method:
    low, high = _sides(config)
    return Method(FixedClip(min(low, 1.0), high), DualClip(config.clip_ratio_c))


def _dppo(divergence: Divergence) -> Callable[[ActorConfig], Method]:
    def method(config: ActorConfig) -> Method:
        lower, upper = (Band(divergence, radius, math.inf) for radius in _sides(config))
        return Method(lower if lower == upper else Sides(lower, upper), Masked(config.clip_ratio_c))

    return method


def _geo_mean(config: ActorConfig) -> Method:
    low, high = _sides(config)  # distances of log r from 0
    return Method(FixedClip(-math.expm1(-low), math.expm1(high)), GeometricMean())


_METHODS: Mapping[str, Callable[[ActorConfig], Method]] = {
    "vanilla": _vanilla,
    "dppo_tv": _dppo(TotalVariation()),
    "dppo_kl": _dppo(KL()),
    "gspo": lambda config: GSPO(*_sides(config)),
    "sapo": lambda config: SAPO(config.tau_pos, config.tau_neg),
    "gpg": lambda config: GPG(),
    "geo_mean": _geo_mean,
    "cispo": lambda config: CISPO(*_sides(config)),
}


@dataclass(frozen=True, eq=False)
class Measured(Objective):
    """The weights that a loss was seen to give its tokens: its gradient, over what one token with A = 1 counts for."""

    weights: Tensor

    def weight(self, tokens: Tokens) -> Tensor:
        return self.weights


def measured(
    gradient: Tensor, batch: Batch, reduce: Callable[[Tensor], Tensor], weights: Tensor | None
) -> Method:
    """Any loss as a method without a clip rule, with the weights of its own gradient.

    A loss that averages in another way than ``loss_agg_mode`` has its weights scaled; which of them are 0 or negative
    does not depend on that.

    Args:
        gradient: The loss's, by the log-probabilities.
        batch: What it was computed from.
        reduce: How verl averages values of tokens.
        weights: Importance weights that verl handed to the loss.
    """
    with torch.no_grad():
        each = batch.advantages * token_weights(reduce, batch.mask)
        if weights is not None:
            each = each * weights
        silent = (batch.mask == 0) | (each == 0)  # where no method could have a gradient
        ratio = batch.log_ratio.exp()
        return Method(Unclipped(), Measured(torch.where(silent, ratio, -gradient / each).float()))


def check_recorder(settings: PolicyLossConfig) -> None:
    """Refuse to record where what writes a record is not installed, before anything runs."""
    if settings.get("record"):
        from bandpo.audit.recorder import pyarrow

        pyarrow()


class Reporter:
    """The worker's end: writes a loss's tokens to the record, and makes sums of them that verl can average."""

    def __init__(self) -> None:
        self._moved = False
        self._recorders: dict[str, Recorder] = {}

    @torch.no_grad()
    def __call__(self, run: Method, batch: Batch, config: ActorConfig) -> dict[str, float]:
        """What the settings ask for of one loss: its record, and its sums as metrics.

        Args:
            run: The method that the loss is.
            batch: What verl has called the loss with.
            config: The actor's settings.
        """
        settings = config.policy_loss
        if folder := settings.get("record"):
            self._recorder(folder, run).add(
                logp=batch.logp_old + batch.log_ratio,
                logp_old=batch.logp_old,
                advantages=batch.advantages,
                mask=batch.mask,
            )
        if not settings.get("audit", True):
            return {}
        sums = self.sums(run, batch)
        sums["mini_batch_tokens"] = float(config.global_batch_info.get("batch_num_tokens") or 0.0)
        sums["detail"] = float(settings.get("audit_detail", False))
        return {SUMS + name: value for name, value in sums.items()}

    def _recorder(self, folder: str, run: Method) -> Recorder:
        """This process's, opened at its first loss."""
        if folder not in self._recorders:
            import verl

            from bandpo.audit.recorder import Recorder

            # A measured objective has no text form.
            known = None if isinstance(run.objective, Measured) else run
            self._recorders[folder] = Recorder(folder, method=known, framework=f"verl {verl.__version__}")
        return self._recorders[folder]

    def sums(self, run: Method, batch: Batch) -> dict[str, float]:
        """The sums of one loss, always under the same names; all are 0 where no token counts."""
        audit = Audit.of(batch, run, run.tokens(batch))
        flat = torch.cat([x.flatten() for x in audit.sums.values()]).tolist()
        names = [f"{name}/{k}" for name, x in audit.sums.items() for k in range(x.numel())]
        found = dict(zip(names, flat, strict=True)) | {"clips": float(not isinstance(run.clip, Unclipped))}
        if not found["counted/0"]:
            found = dict.fromkeys(found, 0.0)
        first = 0.0 if self._moved else 1.0
        self._moved = True
        for name in ("counted", *_FIRST):
            found[f"first/{name}"] = first * found[f"{name}/0"]
        return found


class Driver:
    """The driver's end: makes rates of the sums, and warns of what wastes a run, each trouble once."""

    def __init__(self) -> None:
        self._watch: Watch | None = None
        self._unseen: tuple[Mapping[str, float], Mapping[str, float]] | None = None

    def take(self, metrics: dict[str, Any]) -> dict[str, float]:
        """Take the sums out of an actor update's metrics, before verl reduces them.

        Args:
            metrics: For each name what verl's reduction gets: one value for each mini-batch (the mean over its
                micro-batches and ranks), or a `Metric` with one for each micro-batch.

        Returns:
            The ``audit/…`` metrics to log; none if there were no sums.
        """
        found = {name: metrics.pop(name) for name in [name for name in metrics if name.startswith(SUMS)]}
        if not found:
            return {}
        total = _added_up({name.removeprefix(SUMS): values for name, values in found.items()})
        sums = {
            name: torch.tensor([total[f"{name}/{k}"] for k in range(x.numel())]).view_as(x)
            for name, x in _template().sums.items()
        }
        seen = Audit(tuple(COUNTERFACTUALS), sums).metrics() if total["counted/0"] else {}
        if seen:
            if self._watch is None:  # one step of verl's is one batch
                self._watch = Watch(
                    FixedClip() if total["clips"] else Unclipped(), seen["calls"], framework="verl"
                )
            first = total["first/counted"]
            means = {name: total[f"first/{name}"] / first for name in _FIRST if first}
            self._unseen = means, seen
        return logged(seen, detail=bool(total["detail"]))

    def look(self, data: Mapping[str, Any]) -> None:
        """Warn of what wastes the run, once its step is logged.

        Args:
            data: What verl logs, entropy and reward among it.
        """
        if self._unseen is None or self._watch is None:
            return
        (first, seen), self._unseen = self._unseen, None
        self._watch.before_update(first)
        row = next(iter(named_rows([{**data, "step": 0}])), {})
        self._watch(seen, entropy=row.get("entropy"), reward=row.get("reward"))

    def install(self) -> None:
        """Put `take` before verl's reduction of metrics, and `look` behind its log. Without sums both do nothing."""
        reduce = metric.reduce_metrics

        @functools.wraps(reduce)
        def reduce_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
            audit = self.take(metrics)
            return reduce(metrics) | audit

        replace_everywhere("reduce_metrics", reduce, reduce_metrics)
        with contextlib.suppress(ImportError):  # a worker's node may lack what verl's loggers need
            from verl.utils.tracking import Tracking

            log = Tracking.log

            @functools.wraps(log)
            def log_and_look(
                tracking: Tracking, data: Mapping[str, Any], *arguments: Any, **named: Any
            ) -> None:
                log(tracking, data, *arguments, **named)
                self.look(data)

            Tracking.log = log_and_look  # pyright: ignore[reportAttributeAccessIssue]


def replace_everywhere(name: str, old: object, new: object) -> None:
    """Put one function of verl in another's place, also where it was imported before."""
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(name) is old:
            module.__dict__[name] = new


_FIRST = ("ratio_mean", "log_ratio_abs")
"""The means that are told of the first loss of each process."""


@functools.cache
def _template() -> Audit:
    """An audit of one token, for the names and shapes of the sums."""
    token = torch.full((1, 1), -1.0)
    return Audit.from_batch(token, token, torch.ones(1))


def _added_up(means: Mapping[str, Sequence[float] | metric.Metric]) -> dict[str, float]:
    """The sums over a step.

    Of each mini-batch verl has taken the mean over micro-batches and ranks. How many these were it does not say; the
    mini-batch's number of tokens, which each loss knows, over the mean number of tokens does.
    """
    columns = {
        name: values.values if isinstance(values, metric.Metric) else values for name, values in means.items()
    }
    counted = columns["counted/0"]
    losses = [1.0] * len(counted)
    if not isinstance(means["counted/0"], metric.Metric):
        known = columns["mini_batch_tokens"]
        losses = [a / b if a and b else 1.0 for a, b in zip(known, counted, strict=True)]
    flags = {"clips", "detail"}  # the same in each loss, but 0 in one without tokens
    return {
        name: max(values) if name in flags else sum(n * x for n, x in zip(losses, values, strict=True))
        for name, values in columns.items()
    }
