"""The keys of each framework, as its own source writes them, and which quantity each is read as."""

import importlib.util
from pathlib import Path

import pytest

from rlvet.runs.keys import framework_of
from rlvet.runs.logs import Log
from rlvet.runs.quantities import Source, component_name, named_rows, sources

KEYS = {
    # trl/trainer/grpo_trainer.py
    "trl": {
        "reward": "reward",
        "reward_std": "reward_std",
        "frac_reward_zero_std": "dead",
        "entropy": "entropy",
        "kl": "kl",
        "clip_ratio/low_mean": "clip_low",
        "clip_ratio/high_mean": "clip_high",
        "clip_ratio/region_mean": "clip",
        "completions/mean_length": "length",
        "completions/max_length": "length_max",
        "completions/mean_terminated_length": "length_finished",
        "completions/clipped_ratio": "cut",
        "sampling/sampling_logp_difference/mean": "mismatch",
        "sampling/importance_sampling_ratio/mean": "importance_weight",
    },
    # swift/…/grpo_trainer.py
    "ms-swift": {
        "reward": "reward",
        "entropy/mean": "entropy",
        "frac_reward_zero_std": "dead",
        "clip_ratio/region_mean": "clip",
        "completions/clipped_ratio": "cut",
        "rollout_correction/k3_kl": "mismatch_kl",
        "rollout_correction/is_weight_mean": "importance_weight",
        "memory(GiB)": "memory",
    },
    # verl/trainer/ppo/metric_utils.py, core_algos.py, rollout_corr_helper.py, utils/debug/metrics.py
    "verl": {
        "critic/score/mean": "reward",
        "actor/entropy": "entropy",
        "actor/pg_clipfrac": "clip",
        "actor/ppo_kl": "kl_old",
        "actor/kl_loss": "kl",
        "actor/grad_norm": "grad_norm",
        "actor/lr": "learning_rate",
        "response_length/mean": "length",
        "response_length/max": "length_max",
        "response_length/clip_ratio": "cut",
        "rollout_corr/k3_kl": "mismatch_kl",
        "rollout_corr/rollout_is_mean": "importance_weight",
        "training/rollout_probs_diff_mean": "mismatch_probs",
        "perf/max_memory_allocated_gb": "memory",
        "perf/time_per_step": "step_time",
        "val-core/openai/gsm8k/acc/mean@1": "evaluation",
    },
    # skyrl/train/trainer.py, skyrl/backends/skyrl_train/workers/worker.py
    "skyrl": {
        "reward/avg_raw_reward": "reward",
        "policy/policy_entropy": "entropy",
        "policy/policy_kl": "kl",
        "policy/loss_metrics/clip_ratio": "clip",
        "policy/policy_lr": "learning_rate",
        "policy/grad_norm": "grad_norm",
        "policy/rollout_train_logprobs_abs_diff_mean": "mismatch",
        "async/staleness_mean": "staleness",
        "generate/avg_num_tokens": "length",
        "eval/all/avg_score": "evaluation",
    },
    # prime_rl/trainer/rl/train.py, loss.py, orchestrator/metrics.py, orchestrator.py
    "prime-rl": {
        "train/all/policy/reward/mean": "reward",
        "entropy/all/mean": "entropy",
        "mismatch_kl/all/mean": "mismatch_kl",
        "is_masked_high/mean": "clip_high",
        "is_masked_low/mean": "clip_low",
        "train/all/policy/is_truncated/mean": "cut",
        "train/all/policy/num_output_tokens/mean": "length",
        "train/all/policy/solved_some": "dead",
        "off_policy/mean": "staleness",
        "off_policy/max": "staleness_max",
        "optim/lr": "learning_rate",
        "optim/grad_norm": "grad_norm",
        "perf/peak_memory": "memory",
        "time/step": "step_time",
    },
    # slime/backends/megatron_utils/loss.py, model.py, slime/observability/rollout_metrics.py
    "slime": {
        "rollout/raw_reward": "reward",
        "train/entropy_loss": "entropy",
        "train/pg_clipfrac": "clip",
        "train/ppo_kl": "kl_old",
        "train/kl_loss": "kl",
        "train/train_rollout_logprob_abs_diff": "mismatch",
        "train/ois": "importance_weight",
        "train/grad_norm": "grad_norm",
        "train/lr-pg_0": "learning_rate",
        "rollout/response_len/mean": "length",
        "rollout/truncated_ratio": "cut",
        "perf/step_time": "step_time",
    },
    # openrlhf/trainer/ray/ppo_actor.py, trainer/ppo_utils/experience_maker.py, trainer/ppo_trainer.py
    "openrlhf": {
        "train/reward": "reward",
        "train/group_reward_std": "reward_std",
        "train/ppo_clip_ratio": "clip",
        "train/ppo_kl": "kl_old",
        "train/kl": "kl",
        "train/vllm_kl": "mismatch_kl",
        "train/actor_lr": "learning_rate",
        "train/actor_grad_norm": "grad_norm",
        "train/response_length": "length",
        "train/entropy_loss": "entropy",
        "train/timing/step_total": "step_time",
    },
    # roll/pipeline/rlvr/actor_worker.py, roll/utils/metrics
    "roll": {
        "rollout/score/mean": "reward",
        "critic/entropy/mean": "entropy",
        "actor/clipfrac": "clip",
        "actor/approxkl": "kl_old",
        "actor/kl_loss": "kl",
        "actor/lr": "learning_rate",
        "actor/train_infer_ratio_mean": "importance_weight",
        "actor/train_infer_diff_mean": "mismatch_probs",
        "token/response_length/mean": "length",
        "group/mixed_groups_ratio": "dead",
    },
    # areal/trainer/ppo/actor.py, whose scopes stand before the keys
    "areal": {
        "ppo_actor/task_reward/avg": "reward",
        "ppo_actor/update/entropy/avg": "entropy",
        "ppo_actor/update/clip_ratio/avg": "clip",
        "ppo_actor/update/approx_kl/avg": "kl_old",
        "ppo_actor/update/behave_approx_kl/avg": "mismatch_kl",
        "ppo_actor/update/behave_imp_weight/avg": "importance_weight",
        "ppo_actor/seq_len/avg": "length",
        "ppo_actor/update/grad_norm": "grad_norm",
        "ppo_actor/update/lr": "learning_rate",
        "ppo_actor/update/version_stats/sample_staleness_theta_avg": "staleness",
    },
    # nemo_rl/algorithms/loss/loss_functions.py, grpo.py, experience/rollouts.py
    "nemo-rl": {
        "train/reward": "reward",
        "train/approx_entropy": "entropy",
        "train/gen_kl_error": "mismatch_kl",
        "train/kl_penalty": "kl",
        "train/sampling_importance_ratio": "importance_weight",
        "train/mean_gen_tokens_per_sample": "length",
        "train/truncation_rate": "cut",
        "train/baseline_reward/pct_mixed": "dead",
        "train/grad_norm": "grad_norm",
        "train/lr": "learning_rate",
        "validation/accuracy": "evaluation",
    },
    # tinker_cookbook/rl/metric_util.py, metrics.py, train.py
    "tinker": {
        "env/all/reward/total": "reward",
        "env/all/by_group/frac_mixed": "dead",
        "env/all/ac_tokens_per_turn": "length",
        "optim/kl_sample_train_v2": "mismatch_kl",
        "optim/entropy": "entropy",
        "optim/lr": "learning_rate",
        "test/env/all/reward/total": "evaluation",
    },
    # torchtitan/experiments/rl
    "torchtitan": {
        "rollout_reward/_mean": "reward",
        "rollout_reward/group_zero_std_frac/mean": "dead",
        "trainer/entropy/mean": "entropy",
        "trainer/grad_norm/mean": "grad_norm",
        "trainer/lr": "learning_rate",
        "bit_wise/logprob_diff/mean": "mismatch_kl",
        "train_batch/policy_age/mean": "staleness",
        "train_batch/policy_age_max": "staleness_max",
        "timing/step/total": "step_time",
    },
    # open_instruct/grpo_fast.py
    "open-instruct": {
        "policy/entropy_avg": "entropy",
        "policy/clipfrac_avg": "clip",
        "objective/kl2_avg": "kl",
        "optim/grad_norm": "grad_norm",
        "val/sequence_lengths": "length",
        "val/stop_rate": "cut",
        "debug/vllm_vs_local_logprob_diff_mean": "mismatch",
        "eval/scores": "evaluation",
    },
    # rllm/trainer, rllm/experimental
    "rllm": {
        "reward/mean": "reward",
        "actor/entropy": "entropy",
        "batch/solve_partial": "dead",
        "batch/step_response_length/mean": "length",
        "offpolicy/k3_kl": "mismatch_kl",
        "offpolicy/ratio/mean": "importance_weight",
        "async/staleness_mean": "staleness",
        "optim/lr": "learning_rate",
    },
    # Loops of people's own, which share no source.
    "your own": {
        "mean_reward": "reward",
        "std_reward": "reward_std",
        "kl_ref": "kl",
        "mean_entropy": "entropy",
        "avg_response_len": "length",
    },
}
"""For each framework keys of its log, with the files of its source that write them, and their quantities."""


@pytest.mark.parametrize("framework", KEYS)
def test_the_keys_of_a_framework_are_read(framework):
    """Together, as they stand in one row, and each by itself."""
    keys = KEYS[framework]
    read = {source.quantity: source.key for source in sources(("step", *keys))}
    expected = {quantity: key for key, quantity in keys.items()}
    assert read == expected
    for key, quantity in keys.items():
        assert [(source.quantity, source.key) for source in sources(("step", key))] == [(quantity, key)]


@pytest.mark.parametrize(
    ("key", "quantity"),
    [
        ("avg_reward", "reward"),
        ("train/reward_mean", "reward"),
        ("average_reward", "reward"),
        ("rewards_avg", "reward"),
        ("kl_avg", "kl"),
        ("mean_kl", "kl"),
    ],
)
def test_names_of_means_in_loops_of_one_s_own(key, quantity):
    (row,) = named_rows([{"step": 1, key: 0.5}])
    assert row[quantity] == 0.5


@pytest.mark.parametrize(
    ("key", "quantity"),
    [
        ("Reward", "reward"),
        ("Train/Reward", "reward"),
        ("Completion Length", "length"),
        ("Completions / Mean Length", "length"),
        ("KL", "kl"),
        ("KL Divergence", "kl"),
        ("Grad Norm", "grad_norm"),
        ("Eval Accuracy", "evaluation"),
        ("eval/aime24/avg@8", "evaluation"),
        ("evaluation/accuracy", "evaluation"),
        ("mismatch/rollout_is_eff_sample_size", "effective_samples"),
        ("mismatch/mismatch_k3_kl", "mismatch_kl"),
        ("mismatch/rollout_is_mean", "importance_weight"),
        ("filters/all/zero_advantage", "dead"),
    ],
)
def test_keys_in_other_letters_and_of_other_versions(key, quantity):
    assert [(source.quantity, source.key) for source in sources(("step", key))] == [(quantity, key)]


def test_a_key_in_other_letters_comes_after_the_exact_one():
    read = {source.quantity: source.key for source in sources(("Reward", "reward", "KL"))}
    assert read == {"reward": "reward", "kl": "KL"}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("rewards/format/mean", "format"),
        ("Rewards / Format / Mean".replace(" / ", "/"), "Format"),
        ("train/format_reward", "format"),
        ("format_reward_mean", "format"),
        ("reward_components/format", "format"),
        ("reward", None),
        ("avg_reward", None),
        ("eval/format_reward", None),
        ("val_reward", None),
        ("rewards/format/std", None),
    ],
)
def test_names_of_components_of_the_reward(key, name):
    assert component_name(key) == name


def test_a_key_is_read_or_unread_or_replaced_and_never_two_of_them():
    row = {"step": 1, "reward": 0.5, "entropy": 0.4, "audit/entropy": 0.3, "audit/tokens": 9.0, "other": 1.0}
    log = Log.of([row])
    assert log.read["entropy"] == ("audit/entropy",)
    assert log.replaced == {"entropy": "audit/entropy"}
    assert log.unread == ("other",)
    assert log.counters == ("step", "audit/tokens")
    assert log.keys_of_learning == 4


@pytest.mark.parametrize(
    ("package", "files", "not_in_it"),
    [
        ("trl", ["trainer/grpo_trainer.py"], ()),
        (
            "verl",
            [
                "trainer/ppo/metric_utils.py",
                "trainer/ppo/ray_trainer.py",
                "trainer/ppo/core_algos.py",
                "trainer/ppo/rollout_corr_helper.py",
                "utils/debug/metrics.py",
                "workers/utils/losses.py",
                "workers/engine_workers.py",
            ],
            ("val-core/openai/gsm8k/acc/mean@1",),
        ),
    ],
)
def test_the_keys_are_in_the_installed_framework(package, files, not_in_it):
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    folder = Path(found.origin).parent
    text = "".join((folder / file).read_text() for file in files if (folder / file).exists())
    for key in KEYS[package]:
        # verl puts the prefix before the name of a metric elsewhere.
        name = key if package == "trl" else key.rpartition("/")[2]
        if key not in not_in_it:
            assert f'{name}"' in text or f"{name}'" in text, key


def test_keys_of_other_models_and_of_evaluations_are_not_the_policy_s():
    row = {
        "step": 1,
        "critic/entropy": 9.0,
        "ref/entropy": 3.0,
        "eval/entropy": 2.0,
        "prompt_length/clip_ratio": 0.0,
    }
    assert named_rows([row]) == []
    read = sources(("critic/grad_norm", "actor/grad_norm", "response_length/clip_ratio", "eval_reward"))
    assert {source.quantity: source.key for source in read} == {
        "critic_grad_norm": "critic/grad_norm",
        "grad_norm": "actor/grad_norm",
        "cut": "response_length/clip_ratio",
        "evaluation": "eval_reward",
    }


def test_shares_are_turned_round():
    (named,) = named_rows([{"step": 1, "baseline_reward/pct_mixed": 70.0}])
    assert named["dead"] == pytest.approx(0.3)
    (named,) = named_rows([{"step": 1, "val/stop_rate": 0.9}])
    assert named["cut"] == pytest.approx(0.1)
    (named,) = named_rows([{"step": 1, "bit_wise/logprob_diff/mean": -0.25}])
    assert named["mismatch_kl"] == 0.25
    assert Source("dead", "x", complement=True, percent=True).value({"x": 25.0}) == 0.75


def test_a_user_s_own_names_come_first():
    rows = [{"step": 1, "iteration_reward": 0.5, "reward": 9.0}]
    assert named_rows(rows, {"reward": "iteration_reward"})[0]["reward"] == 0.5
    with pytest.raises(
        ValueError, match=r"'rewrd' is no quantity of a run; did you mean reward\?; there are reward, "
    ):
        named_rows(rows, {"rewrd": "iteration_reward"})


def test_components_and_keys_that_are_not_read_are_listed():
    log = Log.of(
        [
            {
                "step": 1,
                "reward": 0.5,
                "rewards/format/mean": 1.0,
                "my/score": 0.1,
                "timing_s/gen": 2.0,
                "epoch": 1,
            }
        ]
    )
    assert log.read == {"reward": ("reward",), "rewards/format": ("rewards/format/mean",)}
    assert (log.unread, log.keys_of_learning) == (("my/score",), 3)
    assert component_name("rewards/margins") is None


def test_an_integer_beyond_all_floats_is_no_number():
    rows = named_rows([{"step": 1, "reward": 10**400, "kl": 0.1}, {"step": 2, "reward": 0.5, "note": ["a"]}])
    assert "reward" not in rows[0]
    assert rows[0]["not_finite"] == 1.0
    assert rows[1] == {"step": 2.0, "reward": 0.5}


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_sums_of_trl_s_ppo_trainer_are_no_means(prefix):
    """trl/trainer/ppo_trainer.py: sums over an answer, beside means over its tokens."""
    keys = (
        "objective/kl",
        "objective/entropy",
        "objective/scores",
        "policy/entropy_avg",
        "policy/clipfrac_avg",
    )
    read = {source.quantity: source.key for source in sources(tuple(prefix + key for key in keys))}
    assert "kl" not in read
    assert read == {
        "reward": f"{prefix}objective/scores",
        "entropy": f"{prefix}policy/entropy_avg",
        "clip": f"{prefix}policy/clipfrac_avg",
    }


def test_a_step_that_never_rises_is_replaced_by_one_that_does():
    """TRL's global step, which a loop of one's own logs but never raises, beside the counter of wandb."""
    raw = [{"train/global_step": 0, "_step": 2 + 8 * row, "reward": 0.1 * row} for row in range(7)]
    assert [row["step"] for row in named_rows(raw)] == [2, 10, 18, 26, 34, 42, 50]
    same = [row | {"_step": 5} for row in raw]
    assert [row["step"] for row in named_rows(same)] == [0] * 7
    rising = [row | {"train/global_step": row["_step"] // 2} for row in raw]
    assert [row["step"] for row in named_rows(rising)] == [1, 5, 9, 13, 17, 21, 25]


def test_columns_with_underscores_are_the_framework_s_keys():
    """Some exports write verl's keys as the names of columns."""
    row = {"step": 1, "critic_score_mean": 0.5, "actor_grad_norm": 0.3, "response_length_clip_ratio": 0.1}
    (named,) = named_rows([row])
    assert (named["reward"], named["grad_norm"], named["cut"]) == (0.5, 0.3, 0.1)
    (both,) = named_rows([row | {"critic/score/mean": 0.7}])
    assert both["reward"] == 0.7, "the framework's own spelling comes first"


@pytest.mark.parametrize("separator", ["_", "."])
def test_an_export_is_of_the_framework_whose_keys_it_spells(separator):
    """Two of verl's columns are spelled as OpenRLHF's keys; columns of a fork are no keys of verl."""
    keys = ("actor/grad_norm", "actor/lr", "actor/entropy", "critic/score/mean", "response_length/clip_ratio")
    counters = ("perf/mfu/actor", "timing_s/gen", "training/global_step")
    row = {key.replace("/", separator): 0.5 for key in (*keys, *counters)}
    fork = {f"actor{separator}prefix_ratio_mean": 1e7, f"actor{separator}prefix_ppo_kl": -1.0}
    log = Log.of([{"step": step} | row | fork for step in range(1, 30)])
    assert {"reward", "grad_norm", "learning_rate", "entropy", "cut"} == log.read.keys()
    assert set(log.unread) == fork.keys()
    assert framework_of(frozenset(row)) == "verl"
    assert framework_of(frozenset(("actor_grad_norm", "actor_lr", "reward"))) == "openrlhf"


@pytest.mark.parametrize("is_plain", [True, False])
def test_the_length_of_finished_answers_is_not_known_where_none_is_finished(is_plain):
    """TRL logs a mean of 0 for them."""
    rows = [
        {"step": 1.0, "reward": 0.5, "completions/mean_terminated_length": 200.0},
        {"step": 2.0, "reward": 0.1, "completions/mean_terminated_length": 0.0},
        {"step": 3.0 if is_plain else 3, "reward": 0.2, "completions/mean_terminated_length": 90.0},
    ]
    lengths = [row.get("length_finished") for row in named_rows(rows)]
    assert lengths == [200.0, None, 90.0]
