"""Settings that frameworks print at the start of their consoles' output are joined with the metrics."""

import json
import pprint

import pytest

from rlvet import diagnose
from rlvet.runs.configs import newest_configuration, read_configuration
from rlvet.runs.console_settings import DEEPEST, read_console_settings

VERL = {
    "actor_rollout_ref": {
        "actor": {"ppo_mini_batch_size": 256, "ppo_epochs": 1, "optim": {"lr": 1e-6}},
        "model": {"path": "Qwen/Qwen2.5-7B", "note": "it's {not} a bracket, " * 6},
        "rollout": {"n": 1, "temperature": 1.0, "engine_kwargs": {"vllm": None, "sglang": [True, False]}},
    },
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_batch_size": 2, "max_response_length": 1024},
}


def verl_lines(settings, worker="\x1b[36m(TaskRunner pid=312)\x1b[0m "):
    return "".join(f"{worker}{line}\n" for line in pprint.pformat(settings).split("\n"))


def step_lines(steps=30):
    """Return verl's lines of steps whose advantages are their rewards."""
    lines = []
    for step in range(1, steps + 1):
        high, low = 0.3 + 0.01 * (step % 7), -0.4 - 0.01 * (step % 5)
        metrics = {
            "actor/pg_loss": 0.1,
            "critic/score/mean": 0.1 * (step % 3),
            "critic/rewards/max": high,
            "critic/rewards/min": low,
            "critic/advantages/max": high,
            "critic/advantages/min": low,
            "response_length/mean": 980.5,
        }
        text = " - ".join(f"{name}:{value}" for name, value in metrics.items())
        lines.append(f"(TaskRunner pid=312) step:{step} - {text}\n")
    return "".join(lines)


@pytest.mark.parametrize(
    "worker", ["", "(TaskRunner pid=312) ", "\x1b[36m(main_task pid=8, ip=10.0.0.1)\x1b[0m "]
)
def test_verl_prints_its_configuration(worker, tmp_path):
    log = tmp_path / "run.log"
    log.write_text("starting\n{'one': 1}\n" + verl_lines(VERL, worker) + step_lines())
    assert read_console_settings(log) == ("verl", VERL)
    setup = read_configuration(log)
    assert setup.number("group size") == 1
    # A batch that is smaller than a mini-batch gets one update.
    assert setup.updates == 1
    assert str(setup.values["group size"]) == "actor_rollout_ref.rollout.n=1 (run.log)"


@pytest.mark.parametrize("worker", ["", "(TaskRunner pid=312) "])
def test_lines_of_others_within_verls_configuration_are_left_out(worker, tmp_path):
    lines = verl_lines(VERL, worker).splitlines(keepends=True)
    others = [
        "(pid=7) 'n': 2,\n",
        f"{worker}Loading weights: {{'n': 3}}\n",
        "\n",
        "warning [1, 2\n",
        f"{worker}  warnings.warn(\n",
    ]
    mixed = [line for number, own in enumerate(lines) for line in (own, others[number % len(others)])]
    # Ray breaks a line, and joins the line of another worker to one.
    middle = next(number for number, line in enumerate(mixed) if "'temperature': 1.0" in line)
    head, tail = mixed[middle].split(" 1.0")
    mixed[middle : middle + 1] = [
        f"{head} \n",
        f"{worker}1.0{tail.rstrip()}(Actor pid=12) /a/b.py:1: UserWarning: x\n",
    ]
    log = tmp_path / "run.log"
    log.write_text("".join(mixed[:-1]) + step_lines())
    assert read_console_settings(log) == ("verl", VERL)


def test_settings_in_which_the_runs_of_an_output_differ_are_not_known(tmp_path):
    log = tmp_path / "run.log"
    named = [VERL | {"trainer": {"experiment_name": name}} for name in "ab"]
    log.write_text(verl_lines(named[0]) + step_lines() + verl_lines(named[1]) + step_lines())
    assert read_console_settings(log).settings["algorithm"] == VERL["algorithm"]
    other = VERL | {"algorithm": {**VERL["algorithm"], "adv_estimator": "rloo"}}
    log.write_text(verl_lines(VERL) + step_lines() + verl_lines(other) + step_lines())
    assert read_console_settings(log) is None


def test_a_missing_baseline_is_explained_by_the_settings_of_the_console(tmp_path):
    (tmp_path / "run.log").write_text(verl_lines(VERL) + step_lines())
    for path in (tmp_path, tmp_path / "run.log"):
        diagnosis = diagnose(path)
        assert diagnosis.headline.startswith("no-baseline: ")
        assert "as each prompt has one answer" in diagnosis.findings[0].cause
        truncated = next(finding for finding in diagnosis.findings if finding.code == "truncated")
        assert "96% of the cap of 1024 tokens" in truncated.cause


def test_trl_prints_its_arguments(tmp_path):
    arguments = {
        "beta": 0.04,
        "max_completion_length": 256,
        "num_generations": 8,
        "temperature": 1e-4,
        "optim": "adamw",
    }
    lines = "".join(f"{name}={value!r},\n" for name, value in arguments.items())
    log = tmp_path / "train.log"
    log.write_text(
        f"INFO - Training parameters GRPOConfig(\n_n_gpu=1,\n{lines})\n" + "{'loss': 0.0, 'reward': 0.5}\n"
    )
    settings = read_console_settings(log)
    assert settings.framework == "trl"
    assert {name: settings.settings[name] for name in arguments} == arguments
    assert read_configuration(log).number("temperature") == 1e-4


def test_slime_and_miles_print_megatrons_arguments(tmp_path):
    log = tmp_path / "job.out"
    log.write_text(
        "(MegatronTrainRayActor pid=1) ------------------------ arguments ------------------------\n"
        "(MegatronTrainRayActor pid=1)   advantage_estimator ............................. grpo\n"
        "(MegatronTrainRayActor pid=1)   lr .............................................. 1e-06\n"
        "(MegatronTrainRayActor pid=1)   n_samples_per_prompt ............................ 8\n"
        "(MegatronTrainRayActor pid=1)   rollout_max_response_len ........................ 8192\n"
        "(MegatronTrainRayActor pid=1) -------------------- end of arguments ---------------------\n"
        "(MegatronTrainRayActor pid=1)   ignored ......................................... 1\n"
    )
    setup = read_configuration(log)
    assert (setup.framework, setup.number("group size"), setup.number("length cap")) == ("slime", 8, 8192)
    assert setup.values["estimator"].value == "grpo"
    assert "ignored" not in read_console_settings(log).settings


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{'actor_rollout_ref': " + "[" * (DEEPEST + 10) + "\n",
        "{'actor_rollout_ref': " + "(" * 100_000 + "\n",
        "{'actor_rollout_ref': {'a': __import__('os').system('true')}}\n",
        "{'actor_rollout_ref': {'a': 1}\nnever closed\n",
        "{'actor_rollout_ref': '\\udc80'}}}\n",
        "GRPOConfig(\n",
        "------- arguments -------\n a ...... 1\n",
    ],
)
def test_damaged_and_hostile_headers_have_no_settings(text, tmp_path):
    log = tmp_path / "run.log"
    log.write_text(text)
    assert read_console_settings(log) is None
    assert newest_configuration(log).configuration is None


def test_a_configuration_file_comes_before_the_console(tmp_path):
    (tmp_path / "run.log").write_text(verl_lines(VERL))
    settings = {"actor_rollout_ref": {"actor": {"ppo_epochs": 1}, "rollout": {"n": 16}}}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    assert read_configuration(tmp_path).number("group size") == 16


def test_arguments_of_older_versions_of_trl_are_read(tmp_path):
    """They have no importance_sampling_level, nor loss_type: a cap of 3584 beside mean lengths of 3166 to 3443."""
    settings = {"num_generations": 8, "max_completion_length": 3584, "learning_rate": 1e-6, "beta": 0.04}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    rows = []
    for step in range(1, 31):
        row = {
            "step": step,
            "reward": step / 30,
            "completions/mean_length": 3300.5 + 4 * (step % 9),
            "kl": 0.01,
        }
        rows.append(json.dumps(row))
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    diagnosis = diagnose(tmp_path)
    assert diagnosis.headline.startswith("truncated: the mean length is 33")
    assert "of the cap of 3584 tokens" in diagnosis.findings[0].cause
    assert read_configuration(tmp_path).framework == "trl"


def test_a_run_that_has_trained_is_not_told_what_stops_one_from_starting(tmp_path):
    settings = {
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 256, "policy_loss": {"loss_mode": "vanilla"}}},
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_batch_size": 2},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    (tmp_path / "run.log").write_text(step_lines())
    text = str(diagnose(tmp_path))
    assert "the configuration:" in text
    assert "batch-does-not-divide" not in text
