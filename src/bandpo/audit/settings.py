"""What each framework calls the settings that a verdict asks the reader to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bandpo.audit.logs import Row

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


def setting(what: str, framework: str | None) -> str:
    """The framework's name for a setting, in brackets behind a space; nothing where there is none or it is unknown.

    Args:
        what: A key of the inner tables of `SETTINGS`.
        framework: A key of `SETTINGS`; None if it is not known.

    >>> "use a smaller learning rate" + setting("learning rate", "verl")
    'use a smaller learning rate (actor_rollout_ref.actor.optim.lr)'
    >>> setting("learning rate", None)
    ''
    """
    name = SETTINGS[framework].get(what) if framework else None
    return f" ({name})" if name else ""


def framework_of(rows: Sequence[Row]) -> str | None:
    """Whose log these rows are, told from keys that no other framework has; None if there are none of them."""
    keys = {key for row in rows for key in row}
    if "actor/pg_clipfrac" in keys or "actor/pg_loss" in keys:
        return "verl"
    if "clip_ratio/region_mean" in keys or "completions/mean_length" in keys:
        return "trl"
    return None
