"""Which log-probabilities the ratio refers to in each framework and mode, with the line of its code that says so.

`PYTHONPATH=scripts python packages/bandpo/tests/integrations/anchors.py` writes the table of docs/frameworks.md, which
has no lines. `test_anchors.py` compares the lines with the code of each framework that is here.
"""

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[4] / "docs/frameworks.md"

TRAINERS = "the trainer's"
SAMPLERS = "the sampler's"
LAST_SYNC = "those of the trainer's weights at the last sync"
METHOD = "`Method(…, old_policy='rollout')`"


@dataclass(frozen=True)
class Anchor:
    """The log-probabilities of the ratio in one mode of a framework.

    Attributes:
        framework: Its name and version.
        mode: The mode.
        policy: The log-probabilities by default.
        package: The package of the code.
        clone: The name of its repository, for frameworks that are not on the package index.
        file: The file of the code, relative to the repository or to the folder of packages.
        line: The number of the line.
        code: A part of the line.
        setting: The setting that makes them the sampler's; empty if they are.
    """

    framework: str
    mode: str
    policy: str
    package: str
    clone: str
    file: str
    line: int
    code: str
    setting: str = ""


VERL = ("verl 0.9.1", "verl", "")
ONE_VERL = "verl/trainer/ppo/v1/trainer_base.py"
BYPASS = (
    "`algorithm.rollout_correction.bypass_mode=true`, `actor_rollout_ref.rollout.calculate_log_probs=true`"
)


def _row(framework, mode, policy, file, line, code, setting=""):
    name, package, clone = framework
    return Anchor(name, mode, policy, package, clone, file, line, code, setting)


TRL = ("TRL 1.16.0", "trl", "")
SLIME = ("slime 624b824", "slime", "slime")
MILES = ("miles 31f1ca9", "miles", "miles")
NEMO = ("NeMo-RL 7ea279a", "nemo_rl", "RL")
ROLL = ("ROLL 8eb27cc", "roll", "ROLL")
AREAL = ("AReaL 1.0.4", "areal", "")
RLLM = ("rLLM 9beb6e0", "rllm", "rllm")
COMPUTED = "self.actor_rollout_wg.compute_log_prob(batch)"
AREALS = "`actor.use_decoupled_loss=false`, `actor.recompute_logprob=false`"
RLLMS = "`rllm.algorithm.rollout_correction.bypass_mode=true`"
ANCHORS = (
    _row(TRL, "GRPOTrainer", TRAINERS, "trl/trainer/grpo_trainer.py", 2907, 'output["old_per_token_logps"]', METHOD),
    _row(
        TRL, "AsyncGRPOTrainer", SAMPLERS, "trl/experimental/async_grpo/async_grpo_trainer.py", 1504,
        'old_log_probs = inputs["old_log_probs"]',
    ),
    _row(VERL, "sync", TRAINERS, ONE_VERL, 1658, COMPUTED, BYPASS),
    _row(VERL, "colocate_async", TRAINERS, ONE_VERL, 1658, COMPUTED, BYPASS),
    _row(
        VERL, "separate_async", LAST_SYNC, "verl/trainer/ppo/v1/trainer_separate_async.py", 207,
        "self.actor_rollout_wg.restore_model_from_cpu(0)", BYPASS,
    ),
    _row(
        VERL, "fully_async", SAMPLERS, "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml", 98,
        "bypass_mode: True",
    ),
    _row(
        VERL, "one_step_off", SAMPLERS, "verl/experimental/one_step_off_policy/config/one_step_off_ppo_trainer.yaml",
        31, "bypass_mode: True",
    ),
    _row(
        ("SkyRL 0.3.0", "skyrl", ""), "synchronous", TRAINERS, "skyrl/train/trainer.py", 1335,
        "action_log_probs = self._execute_forward_pass", METHOD,
    ),
    _row(
        ("SkyRL 0.3.0", "skyrl", ""), "`trainer.fully_async.enabled`", SAMPLERS, "skyrl/train/fully_async_trainer.py",
        378, "policy_loss_type not in LOSSES_WITH_OLD_LOGPROBS",
    ),
    _row(
        ("prime-rl 559b447", "prime_rl", "prime-rl"), "all", SAMPLERS, "src/prime_rl/trainer/rl/loss.py", 103,
        "log_importance_ratio = trainer_logprobs - inference_logprobs",
    ),
    _row(
        SLIME, "`train.py`, `train_async.py`", TRAINERS, "slime/backends/megatron_utils/loss.py", 965,
        'batch["rollout_log_probs"] if args.use_rollout_logprobs else', "`--use-rollout-logprobs`",
    ),
    _row(
        MILES, "`train.py`, `train_async.py`", TRAINERS, "miles/backends/training_utils/loss_hub/losses.py", 133,
        "if args.use_rollout_logprobs:", "`--use-rollout-logprobs`",
    ),
    _row(
        ("OpenRLHF 0.11.2", "openrlhf", ""), "synchronous, `--train.async_enable`", TRAINERS,
        "openrlhf/trainer/ppo_utils/experience_maker.py", 222, "samples.action_log_probs = action_log_probs",
        METHOD + ", `--algo.advantage.is_correction_level token`",
    ),
    _row(
        NEMO, "synchronous", TRAINERS, "nemo_rl/algorithms/grpo.py", 3239,
        'train_data["prev_logprobs"] = policy.get_logprobs', METHOD,
    ),
    _row(
        NEMO, "`grpo.async_grpo.enabled`", TRAINERS, "nemo_rl/algorithms/grpo.py", 4785,
        'train_data["prev_logprobs"] = policy.get_logprobs', METHOD,
    ),
    _row(
        ROLL, "synchronous, `async_generation_ratio` above 0", TRAINERS, "roll/pipeline/base_worker.py", 190,
        'return data.batch["old_log_probs"]', METHOD,
    ),
    _row(AREAL, "default", SAMPLERS, "areal/trainer/ppo/actor.py", 191, 'data["prox_logp"] = old_logp'),
    _row(
        AREAL, "`actor.use_decoupled_loss` or `actor.recompute_logprob`", TRAINERS, "areal/trainer/rl_trainer.py", 691,
        'traj["prox_logp"] = logp', AREALS,
    ),
    _row(
        RLLM, "verl backend", TRAINERS, "rllm/trainer/config/rllm/backend/verl.yaml", 35, "bypass_mode: false", RLLMS,
    ),
    _row(RLLM, "Tinker backend", SAMPLERS, "rllm/trainer/config/rllm/backend/tinker.yaml", 76, "bypass_mode: true"),
    _row(
        RLLM, "Fireworks backend", TRAINERS, "rllm/trainer/config/rllm/backend/fireworks.yaml", 79,
        "bypass_mode: false", RLLMS,
    ),
    _row(
        ("ms-swift 4.6.0", "swift", ""), "synchronous, `--async_generate`", TRAINERS,
        "swift/rlhf_trainers/grpo_trainer.py", 761, "grpo_batch.old_per_token_logps = (", METHOD,
    ),
)  # fmt: skip
"""The rows of the table. Tinker has none, as the client passes the sampler's log-probabilities itself."""


def table() -> list[str]:
    """Return the lines of the table: a row for the modes of a framework that have the same default and setting."""
    modes: dict[tuple[str, str, str], list[str]] = {}
    for row in ANCHORS:
        modes.setdefault((row.framework, row.policy, row.setting), []).append(row.mode)
    lines = ["| framework and mode | log-probabilities by default | for the sampler's |", "|---|---|---|"]
    for (framework, policy, setting), names in modes.items():
        lines.append(f"| {framework}: {', '.join(names)} | {policy} | {setting or 'nothing to set'} |")
    return lines


if __name__ == "__main__":
    from marked import write_between_marks

    write_between_marks(PAGE, "anchors", table())
