"""The audit in verl: a worker's losses report sums, and verl's driver makes rates of them.

verl averages what a policy loss reports, over micro-batches and ranks and then over mini-batches, and a mean of rates
is not the rate. So each loss reports sums over its tokens, and the driver adds them up before it reduces its metrics.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from verl.utils import metric

from bandpo.audit.metrics import COUNTERFACTUALS, Audit, logged
from bandpo.audit.online import RunWatch
from bandpo.batch import Batch
from bandpo.errors import InvalidValue
from bandpo.integrations._verl_announcement import begin_leg, logging_into
from bandpo.methods import Method
from bandpo.runs import Setup

if TYPE_CHECKING:
    from verl import DataProto
    from verl.workers.config import ActorConfig

    from bandpo.audit.recorder import Recorder

SUMS = "actor/audit_sums/"
"""What the names of the sums begin with, between a loss and the driver."""


@torch.no_grad()
def report(run: Method, batch: Batch, config: ActorConfig, poisoned: int = 0) -> dict[str, float]:
    """Return the sums of one loss as metrics, in its worker; under the same names also where no token counts.

    Args:
        run: The method that the loss is.
        batch: What it was given.
        config: The actor's settings.
        poisoned: How many tokens hold a value that no token can have. They do not count in ``batch``.
    """
    settings = config.policy_loss
    if not settings.get("audit", True):
        return {}
    audit = Audit.of(batch, run, run.tokens(batch))
    flat = torch.cat([x.flatten() for x in audit.sums.values()]).tolist()
    names = [f"{name}/{k}" for name, x in audit.sums.items() for k in range(x.numel())]
    sums = dict(zip(names, flat, strict=True))
    sums = sums if sums["counted/0"] else dict.fromkeys(sums, 0.0)
    sums["mini_batch_tokens"] = float(config.global_batch_info.get("batch_num_tokens") or 0.0)
    sums["detail"] = float(settings.get("audit_detail", False))
    sums["poisoned_tokens"] = float(poisoned)
    return {SUMS + name: value for name, value in sums.items()}


class Driver:
    """The driver's end: makes rates of the sums, records and tests each batch before it is trained on."""

    def __init__(self) -> None:
        self._batches = 0
        self._watch: RunWatch | None = None
        self._recorder: Recorder | None = None

    def prepare(self, config: Mapping[str, Any]) -> None:
        """Do from now on what verl's settings of the run ask for; nothing where its loss is not audited."""
        settings = config["actor_rollout_ref"]["actor"]["policy_loss"]
        if not str(settings.get("_target_")).startswith("bandpo."):
            return
        if (how := settings.get("watched", "warn")) != "off":
            if how not in ("warn", "stop"):
                raise InvalidValue(f"watched must be 'warn', 'stop' or 'off', got {how!r}")
            self._watch = RunWatch(Setup("verl"), stop_on="fix" if how == "stop" else None)
        if folder := settings.get("record"):
            import verl

            from bandpo.audit.recorder import Recorder

            rollout = config["actor_rollout_ref"]["rollout"]
            sampling = {name: rollout[name] for name in ("temperature", "top_p", "top_k") if name in rollout}
            told = {"framework": f"verl {verl.__version__}", "sampling": sampling}
            self._recorder = Recorder(folder, method=config.get("bandpo", {}).get("method"), **told)
        self._hook()

    def _hook(self) -> None:
        """Put `see` behind verl's advantages, of both of its trainers."""
        from verl.trainer.ppo import ray_trainer

        @instead_of(ray_trainer.compute_advantage)
        def compute_advantage(
            advantages: Callable[..., DataProto], *arguments: Any, **named: Any
        ) -> DataProto:
            data = advantages(*arguments, **named)
            self.see(data)
            return data

    def see(self, data: DataProto) -> None:
        """Record and test a batch whose advantages are known, before any update on it."""
        tensors, mask = data.batch, data.batch["response_mask"]
        parts: dict[str, Any] = {
            "logp_old": tensors["old_log_probs"],
            "logp_rollout": tensors.get("rollout_log_probs"),
            "advantages": tensors["advantages"],
            "mask": mask,
            "tokens": tensors.get("responses"),
            "reward": tensors["token_level_scores"].sum(-1),
            "truncated": mask.sum(-1) == mask.shape[-1],  # as verl's response_length/clip_ratio
            "generation": self._batches,
            "update": 0,
        }
        if (prompts := data.non_tensor_batch.get("uid")) is not None:
            parts["group"] = np.unique(prompts.astype(str), return_inverse=True)[1]
        if self._recorder is not None:
            self._recorder.add(**parts, step=data.meta_info.get("global_steps", self._batches + 1))
        if self._watch is not None:
            with np.errstate(invalid="ignore"):  # a log-probability of −∞, which a worker counts and names
                self._watch.check_batch(**parts)
        self._batches += 1

    def take(self, metrics: dict[str, Any]) -> dict[str, float]:
        """Take the sums out of an actor update's metrics, before verl reduces them; what is to be logged instead."""
        found = {name: metrics.pop(name) for name in [name for name in metrics if name.startswith(SUMS)]}
        if not found:
            return {}
        total = _added_up({name.removeprefix(SUMS): values for name, values in found.items()})
        sums = {
            name: torch.tensor([total[f"{name}/{k}"] for k in range(x.numel())]).view_as(x)
            for name, x in _template().sums.items()
        }
        metrics_of_tokens = Audit(tuple(COUNTERFACTUALS), sums).metrics() if total["counted/0"] else {}
        audit = logged(metrics_of_tokens, detail=bool(total["detail"]))
        if audit or total["poisoned_tokens"]:
            audit["audit/poisoned_tokens"] = total["poisoned_tokens"]
        return audit

    def install(self, examine: Callable[[dict[str, Any]], None]) -> None:
        """Put `take` before verl's reduction of metrics, `prepare` and the watch behind its log.

        Args:
            examine: What is to be done with the settings of a run, before anything is logged.
        """

        @instead_of(metric.reduce_metrics)
        def reduce_metrics(reduce: Callable[..., dict[str, Any]], metrics: dict[str, Any]) -> dict[str, Any]:
            audit = self.take(metrics)
            return reduce(metrics) | audit

        with contextlib.suppress(ImportError):  # a worker's node may lack what verl's loggers need
            from verl.utils.tracking import Tracking

            begin, log = Tracking.__init__, Tracking.log

            @functools.wraps(begin)
            def begin_and_prepare(tracking: Tracking, *arguments: Any, **named: Any) -> None:
                config = named.get("config") or {}
                examine(config)
                run = config.get("bandpo")
                if not run:
                    begin(tracking, *arguments, **named)
                else:
                    with logging_into(begin_leg(config)):
                        begin(tracking, *arguments, **named)
                    if "file" in tracking.logger:
                        tracking.logger["file"].log({"bandpo": {"method": run["method"]}}, step=0)
                if config:
                    self.prepare(config)

            @functools.wraps(log)
            def log_and_watch(
                tracking: Tracking, data: Mapping[str, Any], *arguments: Any, **named: Any
            ) -> None:
                log(tracking, data, *arguments, **named)
                if self._watch is not None:
                    self._watch(data)

            Tracking.__init__, Tracking.log = begin_and_prepare, log_and_watch  # pyright: ignore


def instead_of(old: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put a function, whose first argument is ``old``, in its place, also where it was imported before."""

    def put(new: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = functools.update_wrapper(functools.partial(new, old), old)
        for module in [*sys.modules.values()]:
            if getattr(module, "__dict__", {}).get(old.__name__) is old:
                module.__dict__[old.__name__] = wrapped
        return wrapped

    return put


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
    flags = {"detail"}  # the same in each loss, but 0 in one without tokens
    return {
        name: max(values) if name in flags else sum(n * x for n, x in zip(losses, values, strict=True))
        for name, values in columns.items()
    }
