"""Additions to verl's driver, which wrap the functions of `bandpo.integrations.verl.verl_names.WRAPPED`.

The driver is the process that verl's command starts, and the process of Ray in which a trainer runs. Workers import
this module too, with no effect.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bandpo._siblings import NOT_CHECKED, has_rlvet, require_rlvet
from bandpo.audit.closing_lines import describe_rare_winners, short_name
from bandpo.core.errors import InvalidValue, MissingPackage
from bandpo.core.text import as_method, as_text
from bandpo.integrations.verl.announcement import begin_leg, logging_into
from bandpo.integrations.verl.audit import pop_audit
from bandpo.integrations.verl.record import BATCHES, STRATEGIES, records_losses
from bandpo.integrations.verl.verl_names import wrap

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch import Tensor
    from verl import DataProto

    from bandpo.audit.metrics import Audit
    from bandpo.audit.recorder import Recorder
    from bandpo.core.methods import Method
    from bandpo.integrations.verl.rewards import RewardWatch
    from bandpo.watch import RunWatch


def _last_step(config: Mapping[str, Any]) -> int | None:
    """Return the last step of a run, under which verl logs its metrics; None if the config does not have it.

    verl writes the number of updates of the optimizer to the config before it opens the logs.
    """
    trainer = config.get("trainer", {})
    if trainer.get("total_training_steps"):
        return int(trainer["total_training_steps"])
    updates = config["actor_rollout_ref"]["actor"].get("optim", {}).get("total_training_steps") or -1
    v1 = trainer.get("v1") or {}
    updates_per_step = (v1.get(v1.get("trainer_mode")) or {}).get("parameter_sync_step", 1)
    return updates // updates_per_step if updates > 0 else None


def _copy_tokenizer(model: Mapping[str, Any], record: Path) -> None:
    """Copy the ``tokenizer.json`` of a run's model to its record, to decode ids later, if this machine has it.

    Args:
        model: The settings ``actor_rollout_ref.model``.
        record: The folder of the record.
    """
    name = str(model.get("tokenizer_path") or model.get("path") or "")
    file = Path(name) / "tokenizer.json"
    if name and not file.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        with contextlib.suppress(HFValidationError):  # of a path that is no name of a model
            file = Path(str(try_to_load_from_cache(name, "tokenizer.json") or file))
    if file.is_file():
        shutil.copyfile(file, record / file.name)


def _responses(batch: Any) -> Tensor:
    """Return the ids of the responses of a batch in verl's queue of tensors, (batch, time)."""
    queue: Any = sys.modules["verl.trainer.ppo.v1.trainer_base"].__dict__["tq"]
    data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["responses"])
    return data["responses"].to_padded_tensor(0)


class Driver:
    """The work of bandpo in verl's driver: it checks settings, records and checks batches, and computes the audit."""

    def __init__(self) -> None:
        self._batches = 0
        self._watch: RunWatch | None = None
        self._recorder: Recorder | None = None
        self._known: dict[str, Any] = {}
        self.logged_step = 0
        """The step of the last log."""
        self._audit: Audit | None = None
        self._method: Method | None = None
        self._folder = ""
        self._record = ""
        self._last_step: int | None = None
        self._rewards: RewardWatch | None = None

    def prepare(self, config: Mapping[str, Any]) -> None:
        """Start to check and record batches by the settings of a run; do nothing if its loss is not audited."""
        settings = config["actor_rollout_ref"]["actor"]["policy_loss"]
        if not str(settings.get("_target_")).startswith("bandpo."):
            return

        text = config.get("bandpo", {}).get("method")
        self._method = None if text is None else as_method(text)
        self._folder = str(config.get("trainer", {}).get("default_local_dir", ""))
        self._last_step = _last_step(config)
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
        if reaction != "off":
            from bandpo.integrations.verl.rewards import RewardWatch

            self._rewards = RewardWatch(config, reaction)

        folder = settings.get("record")
        if folder:
            import verl

            from bandpo.audit.recorder import Recorder

            actor, rollout = (config["actor_rollout_ref"][name] for name in ("actor", "rollout"))
            self._record = folder
            if records_losses(actor.get("strategy")):
                folder = str(Path(folder) / BATCHES)
            else:
                print(
                    f"bandpo: record      batches before their losses, so no rule can be replayed on it: workers of "
                    f"strategy={actor.get('strategy')} do not record, only those of {' and '.join(STRATEGIES)}",
                    flush=True,
                )
            correction = config.get("algorithm", {}).get("rollout_correction") or {}
            self._recorder = Recorder(
                folder,
                method=config.get("bandpo", {}).get("method"),
                # In this mode verl's old log-probabilities are the sampler's.
                anchor="rollout" if correction.get("bypass_mode") else "trainer",
                framework=f"verl {verl.__version__}",
                version_at="answer",
                sampling={
                    name: rollout[name] for name in ("temperature", "top_p", "top_k") if name in rollout
                },
            )
            _copy_tokenizer(config["actor_rollout_ref"].get("model") or {}, Path(self._record))
        self._wrap_advantages()

    def add_audit(self, audit: Audit | None) -> None:
        """Add the audit of a step to that of the run; None if the losses of the step were not audited."""
        if audit is not None:
            self._audit = audit if self._audit is None else self._audit + audit

    def announce_effect(self, *, has_log: bool) -> None:
        """Print once what the run's rule did to rare winners, what others would have, and the command for more.

        Nothing is printed if no loss was audited, or the level of the logger ``bandpo`` is above that of warnings.

        Args:
            has_log: True if the run writes verl's log to a file.
        """
        audit, self._audit = self._audit, None
        if audit is None or not logging.getLogger("bandpo").isEnabledFor(logging.WARNING):
            return
        name = "your loss" if self._method is None else short_name(as_text(self._method))
        lines = describe_rare_winners(audit, self._method, name)
        if self._record:
            lines.append(f"more: bandpo audit {shlex.quote(self._record)}")
        elif has_log and self._folder:
            lines.append(f"more: bandpo audit {shlex.quote(self._folder)}")
        else:
            lines.append("more: bandpo audit FOLDER, of a run with trainer.logger=[console,file]")
        for line in lines:
            print(f"bandpo: {line}", flush=True)

    def _wrap_advantages(self) -> None:
        """Call `add_batch` after verl's computation of advantages, which all of its trainers use."""

        @wrap("verl.trainer.ppo.ray_trainer.compute_advantage")
        def compute_advantage(
            verls_function: Callable[..., DataProto], *arguments: Any, **named: Any
        ) -> DataProto:
            data = verls_function(*arguments, **named)
            self.add_batch(data)
            return data

        # The trainers whose step and versions of the weights are known, each if this process has imported it.
        if "verl.trainer.ppo.v1.trainer_base" in sys.modules:

            @wrap("verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage")
            def of_v1(
                verls_method: Callable[..., Any], trainer: Any, batch: Any, *rest: Any, **named: Any
            ) -> Any:
                if self._rewards is not None:
                    self._rewards.check()
                versions = [tag.get("min_global_steps") for tag in batch.tags]
                step = trainer.global_steps
                # This trainer computes advantages without the ids of the responses.
                tokens = None if self._recorder is None else _responses(batch)
                with self.knowing(step, versions, current_version=step - 1, tokens=tokens):
                    return verls_method(trainer, batch, *rest, **named)

            @wrap("verl.trainer.ppo.v1.trainer_base.PPOTrainer.step")
            def make_step(verls_method: Callable[..., Any], trainer: Any, *rest: Any, **named: Any) -> Any:
                watching = (
                    contextlib.nullcontext() if self._rewards is None else self._rewards.watching(trainer)
                )
                with watching:
                    return verls_method(trainer, *rest, **named)

        if "verl.experimental.one_step_off_policy.ray_trainer" in sys.modules:

            @wrap("verl.experimental.separation.ray_trainer.SeparateRayPPOTrainer._fit_compute_advantage")
            def of_one_step_off(verls_method: Callable[..., Any], trainer: Any, batch: Any) -> Any:
                versions = batch.non_tensor_batch.get("min_global_steps", ())
                step = trainer.global_steps  # the weights were sent under this number before the step
                with self.knowing(step, versions, current_version=step):
                    return verls_method(trainer, batch)

    @contextlib.contextmanager
    def knowing(
        self,
        step: int,
        versions: Sequence[int | None],
        current_version: int,
        tokens: Tensor | None = None,
    ) -> Iterator[None]:
        """Record the step and the versions of the weights with the batches that are added meanwhile.

        Args:
            step: The trainer's step.
            versions: The version of the weights that began each response; None where verl does not know it.
            current_version: The version of the weights in training, as verl counts it when it sends them.
            tokens: The ids of the responses, (batch, time), if the batches lack them.
        """
        self._known = {"step": step} if tokens is None else {"step": step, "tokens": tokens}
        known = [version for version in versions if version is not None]
        if len(known) == len(versions):
            self._known |= {"version": torch.tensor(known), "current_version": current_version}
        try:
            yield
        finally:
            self._known = {}

    def _versions_of_queue(self, data: DataProto) -> dict[str, Any]:
        """Return step and versions of a batch of verl's fully asynchronous trainer; nothing for one of another trainer.

        Ray copies the methods of its trainer, so none can be wrapped. But the trainer logs under the version that it
        has sent last. Before its first log, all samples are of the version in training.
        """
        if "trajectory_param_versions" not in data.meta_info:
            return {}
        latest = max(map(int, data.meta_info["trajectory_param_versions"]))
        versions = [int(version) for version in data.non_tensor_batch["min_global_steps"]]
        current = max(self.logged_step, latest)
        # verl logs the updates of a version under the next one.
        return {"step": current + 1, "version": torch.tensor(versions), "current_version": current}

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
            known = {"step": data.meta_info.get("global_steps", self._batches + 1)}
            known |= self._known or self._versions_of_queue(data)
            # verl leaves out rows where an answer has several parts.
            if len(known.get("version", ())) != len(mask):
                known = {name: known[name] for name in known.keys() - {"version", "current_version"}}
            if "tokens" in known and known["tokens"].shape != mask.shape:
                del known["tokens"]
            self._recorder.add(**columns | known)
            # verl writes checkpoints in other processes, so every batch is on the disk before its update.
            self._recorder.flush()
        if self._watch is not None:
            with np.errstate(invalid="ignore"):  # for log-probabilities of −∞, which the workers report
                self._watch.check_batch(**columns)
        self._batches += 1

    def install(
        self, check_run: Callable[[DictConfig], None], check_late: Callable[[dict[str, Any]], None]
    ) -> None:
        """Wrap verl's functions.

        Args:
            check_run: A check of a run's config, before Ray starts.
            check_late: A check of the config of a trainer that does not call verl's ``auto_set_device``, such as one of
                another project, before anything is logged.
        """

        @wrap("verl.utils.device.auto_set_device")
        def auto_set_device(verls_function: Callable[[Any], None], config: Any) -> None:
            verls_function(config)
            # verl's trainers of supervised learning call it too.
            if "actor_rollout_ref" in config:
                check_run(config)

        @wrap("verl.utils.metric.reduce_metrics")
        def reduce_metrics(
            verls_function: Callable[..., dict[str, Any]],
            metrics: dict[str, Any],
            *arguments: Any,
            **named: Any,
        ) -> dict[str, Any]:
            audit_metrics, audit = pop_audit(metrics)
            self.add_audit(audit)
            return verls_function(metrics, *arguments, **named) | audit_metrics

        try:
            wrap_init = wrap("verl.utils.tracking.Tracking.__init__")
            wrap_log = wrap("verl.utils.tracking.Tracking.log")
        except MissingPackage:
            raise
        except ImportError:  # a worker's node may lack the packages of verl's loggers
            return

        @wrap_init
        def init_and_prepare(
            verls_init: Callable[..., None], tracking: Any, *arguments: Any, **named: Any
        ) -> None:
            config = named.get("config") or {}
            check_late(config)
            run = config.get("bandpo")
            with logging_into(begin_leg(config)) if run else contextlib.nullcontext():
                verls_init(tracking, *arguments, **named)
            if run and "file" in tracking.logger:
                tracking.logger["file"].log({"bandpo": {"method": run["method"]}}, step=0)
            if config:
                self.prepare(config)

        @wrap_log
        def log_and_watch(
            verls_log: Callable[..., None],
            tracking: Any,
            data: Mapping[str, Any],
            step: int,
            *arguments: Any,
            **named: Any,
        ) -> None:
            verls_log(tracking, data, step, *arguments, **named)
            self.logged_step = step
            if self._watch is not None:
                self._watch(data)
            if self._last_step is not None and step >= self._last_step:
                self.announce_effect(has_log="file" in tracking.logger)
