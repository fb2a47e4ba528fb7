"""The audit in verl: losses report sums in the workers, and verl's driver computes metrics from them.

verl averages the metrics of a policy loss over micro-batches and ranks and then over mini-batches, and a mean of rates
is not the rate over all tokens. So each loss reports sums over its tokens, and the driver adds them up before it
reduces its metrics.
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

from bandpo._siblings import NOT_CHECKED, has_rlvet, require_rlvet
from bandpo.audit.metrics import Audit, logged
from bandpo.core.batch import Batch
from bandpo.core.errors import InvalidValue
from bandpo.core.methods import Method
from bandpo.integrations.verl.announcement import begin_leg, logging_into

if TYPE_CHECKING:
    from verl import DataProto
    from verl.workers.config import ActorConfig

    from bandpo.audit.recorder import Recorder
    from bandpo.watch import RunWatch

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


class Driver:
    """The audit in verl's driver: computes metrics from the sums, and records and checks each batch before training."""

    def __init__(self) -> None:
        self._batches = 0
        self._watch: RunWatch | None = None
        self._recorder: Recorder | None = None

    def prepare(self, config: Mapping[str, Any]) -> None:
        """Start to check and record batches by the settings of a run; do nothing if its loss is not audited."""
        settings = config["actor_rollout_ref"]["actor"]["policy_loss"]
        if not str(settings.get("_target_")).startswith("bandpo."):
            return

        reaction = settings.get("watched", "warn")
        if reaction not in ("warn", "stop", "off"):
            raise InvalidValue(f"watched must be 'warn', 'stop' or 'off', got {reaction!r}")
        if reaction == "stop":
            require_rlvet("watched=stop")
        if reaction != "off" and not has_rlvet():
            print(f"bandpo: {NOT_CHECKED}", flush=True)
        elif reaction != "off":
            from bandpo.watch import RunWatch
            from rlvet.runs import Setup

            self._watch = RunWatch(Setup("verl"), stop_on="fix" if reaction == "stop" else None)

        folder = settings.get("record")
        if folder:
            import verl

            from bandpo.audit.recorder import Recorder

            rollout = config["actor_rollout_ref"]["rollout"]
            self._recorder = Recorder(
                folder,
                method=config.get("bandpo", {}).get("method"),
                framework=f"verl {verl.__version__}",
                sampling={
                    name: rollout[name] for name in ("temperature", "top_p", "top_k") if name in rollout
                },
            )
        self._hook()

    def _hook(self) -> None:
        """Call `add_batch` after verl's computation of advantages, which all of its trainers use."""
        from verl.trainer.ppo import ray_trainer

        @instead_of(ray_trainer.compute_advantage)
        def compute_advantage(
            verls_function: Callable[..., DataProto], *arguments: Any, **kwargs: Any
        ) -> DataProto:
            data = verls_function(*arguments, **kwargs)
            self.add_batch(data)
            return data

    def add_batch(self, data: DataProto) -> None:
        """Record and check a batch with advantages, before any update on it."""
        tensors = data.batch
        mask = tensors["response_mask"]
        columns: dict[str, Any] = {
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
        prompt_ids = data.non_tensor_batch.get("uid")
        if prompt_ids is not None:
            columns["group"] = np.unique(prompt_ids.astype(str), return_inverse=True)[1]

        if self._recorder is not None:
            self._recorder.add(**columns, step=data.meta_info.get("global_steps", self._batches + 1))
            # verl writes checkpoints in other processes, so every batch is on the disk before its update.
            self._recorder.flush()
        if self._watch is not None:
            with np.errstate(invalid="ignore"):  # for log-probabilities of −∞, which the workers report
                self._watch.check_batch(**columns)
        self._batches += 1

    def pop_metrics(self, metrics: dict[str, Any]) -> dict[str, float]:
        """Remove the sums from the metrics of an actor update, before verl reduces them; return the audit's metrics."""
        names = [name for name in metrics if name.startswith(SUMS)]
        if not names:
            return {}
        totals = _total_sums({name.removeprefix(SUMS): metrics.pop(name) for name in names})

        audit: dict[str, float] = {}
        if totals["counted/0"]:
            template = _template()
            sums = torch.tensor([totals[name] for name in _names_of_sums(template)])
            audit = logged(template.with_sums(sums).metrics(), detail=bool(totals["detail"]))
        if audit or totals["poisoned_tokens"]:
            audit["audit/poisoned_tokens"] = totals["poisoned_tokens"]
        return audit

    def install(self, examine: Callable[[dict[str, Any]], None]) -> None:
        """Patch verl's reduction of metrics and its `Tracking`, so that they call this object.

        Args:
            examine: A check of the run's config, called before anything is logged.
        """

        @instead_of(metric.reduce_metrics)
        def reduce_metrics(
            verls_function: Callable[..., dict[str, Any]], metrics: dict[str, Any]
        ) -> dict[str, Any]:
            audit = self.pop_metrics(metrics)
            return verls_function(metrics) | audit

        with contextlib.suppress(ImportError):  # a worker's node may lack the packages of verl's loggers
            from verl.utils.tracking import Tracking

            verls_init = Tracking.__init__
            verls_log = Tracking.log

            @functools.wraps(verls_init)
            def init_and_prepare(tracking: Tracking, *arguments: Any, **kwargs: Any) -> None:
                config = kwargs.get("config") or {}
                examine(config)
                run = config.get("bandpo")
                if not run:
                    verls_init(tracking, *arguments, **kwargs)
                else:
                    with logging_into(begin_leg(config)):
                        verls_init(tracking, *arguments, **kwargs)
                    if "file" in tracking.logger:
                        tracking.logger["file"].log({"bandpo": {"method": run["method"]}}, step=0)
                if config:
                    self.prepare(config)

            @functools.wraps(verls_log)
            def log_and_watch(
                tracking: Tracking, data: Mapping[str, Any], *arguments: Any, **kwargs: Any
            ) -> None:
                verls_log(tracking, data, *arguments, **kwargs)
                if self._watch is not None:
                    self._watch(data)

            Tracking.__init__ = init_and_prepare  # pyright: ignore
            Tracking.log = log_and_watch  # pyright: ignore


def instead_of(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that replaces a function in every module that has imported it.

    The decorated function gets the original function as its first argument.
    """

    def replace_original(function: Callable[..., Any]) -> Callable[..., Any]:
        replacement = functools.update_wrapper(functools.partial(function, original), original)
        for module in [*sys.modules.values()]:
            if getattr(module, "__dict__", {}).get(original.__name__) is original:
                module.__dict__[original.__name__] = replacement
        return replacement

    return replace_original


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
