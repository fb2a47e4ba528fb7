"""What a run was trained with: its method, and its framework, with the names of the settings that a verdict advises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo.audit.logs import Row
from bandpo.audit.record import metadata, told_method
from bandpo.audit.recorder import record_files
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.rules import ClipRule
from bandpo.text import as_method

_ACTOR = "actor_rollout_ref.actor."

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "trl": {
        "updates": "num_iterations, steps_per_generation",
        "several updates": "num_iterations above 1, or steps_per_generation above gradient_accumulation_steps",
        "learning rate": "learning_rate",
        "clip": "epsilon, epsilon_high",
        "entropy bonus": "entropy_coef",
        "sampling": "temperature, top_p, top_k",
        "band": "BandGRPOTrainer with clip='Band(KL(), 0.05)'",
        "audit": "AuditedGRPOTrainer in place of GRPOTrainer",
    },
    "verl": {
        "updates": f"{_ACTOR}ppo_epochs, {_ACTOR}ppo_mini_batch_size",
        "several updates": f"{_ACTOR}ppo_mini_batch_size below data.train_batch_size, or {_ACTOR}ppo_epochs above 1",
        "learning rate": f"{_ACTOR}optim.lr",
        "clip": f"{_ACTOR}clip_ratio_low, {_ACTOR}clip_ratio_high",
        "entropy bonus": f"{_ACTOR}entropy_coeff",
        "sampling": "actor_rollout_ref.rollout.temperature, .top_p, .top_k",
        "anchor": "algorithm.rollout_correction.bypass_mode",
        "age": "async_training.staleness_threshold",
        "band": f"{_ACTOR}policy_loss._target_=bandpo.integrations.verl.BandPolicyLossConfig",
        "audit": f"{_ACTOR}policy_loss._target_=bandpo.integrations.verl.AuditedPolicyLossConfig",
    },
    "prime-rl": {
        "learning rate": "lr under [trainer.optim]",
        "age": "max_off_policy_steps under [orchestrator]",
        "band": 'import_path = "bandpo_prime_rl.loss" under [trainer.loss]',
    },
    "skyrl": {
        "updates": "trainer.update_epochs_per_batch, trainer.policy_mini_batch_size",
        "several updates": "trainer.policy_mini_batch_size below trainer.train_batch_size, or "
        "trainer.update_epochs_per_batch above 1",
        "learning rate": "trainer.policy.optimizer_config.lr",
        "clip": "trainer.algorithm.eps_clip_low, trainer.algorithm.eps_clip_high",
        "entropy bonus": "trainer.algorithm.use_entropy_loss, trainer.algorithm.entropy_loss_coef",
        "sampling": "generator.sampling_params.temperature, .top_p",
        "band": "trainer.override_entrypoint=bandpo.integrations.skyrl",
    },
    "slime": {
        "updates": "--num-steps-per-rollout",
        "several updates": "--num-steps-per-rollout above 1",
        "learning rate": "--lr",
        "clip": "--eps-clip, --eps-clip-high",
        "entropy bonus": "--entropy-coef",
        "sampling": "--rollout-temperature, --rollout-top-p, --rollout-top-k",
        "anchor": "--use-rollout-logprobs",
        "band": "--custom-loss-function-path bandpo_slime.policy_loss",
    },
}
"""By framework and what is set. Those of TRL 1.16 and verl 0.9.1 are tested, the others are from public configs."""


@dataclass(frozen=True)
class Setup:
    """What a run was trained with, as far as that is known.

    >>> "use a smaller learning rate" + Setup("verl").named("learning rate")
    'use a smaller learning rate (actor_rollout_ref.actor.optim.lr)'
    >>> Setup().named("learning rate")
    ''
    """

    framework: str | None = None
    """A key of `SETTINGS`."""
    method: Method | None = None

    @classmethod
    def of_log(
        cls,
        path: Path,
        rows: Sequence[Row],
        *,
        framework: str | None = None,
        method: Method | ClipRule | str | None = None,
    ) -> Setup:
        """That of a run with a log: the method that its config.yaml tells, or what is given; its framework.

        Nothing that the folder names is imported.

        Args:
            path: The run folder of `bandpo train`, or any other log.
            rows: Its log, whose keys may tell the framework.
            framework: Its framework, if that is to be said.
            method: What it was trained with, where no config.yaml says so, e.g. ``"GSPO()"``.

        Raises:
            ValueError: an unknown framework, or a method that cannot be read.

        >>> Setup.of_log(Path("steps.jsonl"), [{"step": 1, "actor/pg_clipfrac": 0.4}], method="GSPO()").framework
        'verl'
        """
        if framework is not None and framework not in SETTINGS:
            raise InvalidValue(f"framework {framework!r} is none of {', '.join(SETTINGS)}")
        given = None if method is None else as_method(method)
        told = _told_by(path / "config.yaml", quiet=given is not None)
        return cls(framework or framework_of(rows), told or given)

    @classmethod
    def of_record(cls, path: Path, *, method: Method | ClipRule | str | None = None) -> Setup:
        """That of a record's run.

        Args:
            path: The folder that `bandpo.Recorder` wrote, or one file of it.
            method: What it was trained with, where the record does not say so.
        """
        said = metadata(record_files(path)[0])
        framework = next((name for name in SETTINGS if said["framework"].startswith(name)), None)
        given = None if method is None else as_method(method)
        return cls(framework, told_method(said["method"], path, quiet=True) or given)

    def named(self, what: str) -> str:
        """The framework's name for a setting, in brackets behind a space; nothing where it is not known.

        Args:
            what: A key of the inner tables of `SETTINGS`.
        """
        name = SETTINGS[self.framework].get(what) if self.framework else None
        return f" ({name})" if name else ""


def _told_by(config: Path, quiet: bool) -> Method | None:
    import yaml

    try:
        said: Any = yaml.safe_load(config.read_text())["arguments"]
        written = {name: said.get(name) for name in ("method", "clip", "objective")}
        written["level"] = said["importance_sampling_level"]
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError):
        return None  # there is none, or it is another program's
    return told_method(written, config, quiet)


def framework_of(rows: Sequence[Row]) -> str | None:
    """Whose log these rows are, told from keys that no other framework has; None if there are none of them."""
    keys = {key for row in rows for key in row}
    if "actor/pg_clipfrac" in keys or "actor/pg_loss" in keys:
        return "verl"
    if "clip_ratio/region_mean" in keys or "completions/mean_length" in keys:
        return "trl"
    return None
