"""`rlvet diff`: what is said of settings, what is refused, and the exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from pages import ROOT
from rlvet.cli.app import app
from rlvet.compare import configurations as comparison
from rlvet.compare import diff, trl, verl
from rlvet.compare.vocabulary import EFFECTS, QUANTITIES, UPDATES
from rlvet.errors import RlvetError
from rlvet.lint.known import FRAMEWORKS

VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet {}\n"
TRL = "from trl import GRPOConfig, GRPOTrainer\nargs = GRPOConfig('out', {})\nGRPOTrainer('m', f, args).train()\n"
PAGE = ROOT / "docs/lint.md"


def run(*arguments):
    return CliRunner().invoke(app, ["diff", *map(str, arguments)])


def refusal(*files):
    """Return the message with which the command refuses two files. `run_app` prints it and exits with 2."""
    result = run(*files)
    assert isinstance(result.exception, RlvetError), result.exception
    assert result.stdout == ""
    return str(result.exception)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes two files, and returns their paths."""

    def write_files(a, b, suffixes=(".sh", ".sh")):
        files = []
        for name, text, suffix in zip("ab", (a, b), suffixes, strict=True):
            file = tmp_path / f"{name}{suffix}"
            file.write_text(text)
            files.append(file)
        return files

    return write_files


def names(differences):
    return [one.quantity.name for one in differences]


# Configurations


def test_every_framework_has_every_quantity():
    listed = {quantity.name for quantity in QUANTITIES}
    assert len(listed) == len(QUANTITIES)
    assert {quantity.effect for quantity in QUANTITIES} == set(EFFECTS)
    for framework in (trl, verl):
        assert framework.QUANTITIES.keys() == {*listed, UPDATES}
    for quantity in QUANTITIES:
        assert quantity.only_with in {*listed, ""}


def test_the_defaults_are_of_the_versions_that_lint_knows():
    assert {name: comparison.DEFAULTS[name]["version"] for name in ("trl", "verl")} == {
        name: FRAMEWORKS[name].version for name in ("trl", "verl")
    }


def test_a_default_and_the_line_of_a_setting_are_named_as_sources(write):
    files = write(VERL.format(""), VERL.format("\\\n    actor_rollout_ref.rollout.temperature=0.7"))
    result = run(*files)
    assert result.exit_code == 1
    assert result.stdout.startswith("1 difference in effect: temperature\n")
    assert "A  1  actor_rollout_ref.rollout.temperature=1.0 (default of verl 0.9.1)" in result.stdout
    assert "B  0.7  actor_rollout_ref.rollout.temperature=0.7 (b.sh:2)" in result.stdout


def test_differences_of_the_gradient_come_before_those_of_the_data(write):
    settings = "data.max_response_length=64 actor_rollout_ref.rollout.temperature=0.7 trainer.total_epochs=1"
    (comparison_of_settings,) = [diff(*write(VERL.format(settings), VERL.format(""))).configurations]
    assert names(comparison_of_settings.differences) == ["temperature", "longest answer", "length of the run"]


@pytest.mark.parametrize(
    ("a", "b", "group", "text"),
    [
        ("trainer.project_name=x", "", "names", "trainer.project_name"),
        ("trainer.save_freq=5", "trainer.save_freq=6", "names", "trainer.save_freq"),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "",
            "speed",
            "ppo_micro_batch_size_per_gpu 4",
        ),
        (
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.name=sglang",
            "speed",
            "vLLM | SGLang",
        ),
    ],
)
def test_what_trains_nothing_else_is_listed_apart(a, b, group, text, write):
    difference = diff(*write(VERL.format(a), VERL.format(b)))
    assert text in " ".join(getattr(difference.configurations, group))
    assert not difference.differs
    assert run(*write(VERL.format(a), VERL.format(b))).exit_code == 0


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_both_names_of_checkpoints_of_activations_are_settings_of_memory(name, write):
    difference = diff(*write(TRL.format(f"{name}=False"), TRL.format(f"{name}=True"), (".py", ".py")))
    assert name in " ".join(difference.configurations.speed)
    assert not difference.differs


def test_a_setting_at_its_default_is_no_difference(write):
    difference = diff(*write(VERL.format("data.seed=null data.shuffle=True"), VERL.format("")))
    assert not difference.differs


def test_a_setting_of_unknown_effect_is_said_and_counts(write):
    files = write(VERL.format("reward.reward_manager.name=dapo"), VERL.format("+mine.bonus=2"))
    result = run(*files)
    assert result.exit_code == 1
    assert "2 settings of unknown effect" in result.stdout
    assert (
        "effect not known: reward.reward_manager.name dapo | not set, mine.bonus not set | 2" in result.stdout
    )


def test_long_paths_are_shown_from_their_ends(write):
    start = "/workspace/a-long-folder/" * 4
    result = run(*write(VERL.format(f"+mine.adapter={start}one"), VERL.format(f"+mine.adapter={start}two")))
    assert "/one | …" in " ".join(result.stdout.split())


def test_the_value_of_a_secret_is_not_shown(write):
    files = write(VERL.format("+env_vars.HF_TOKEN=hf_one"), VERL.format("+env_vars.HF_TOKEN=hf_two"))
    result = run(*files)
    assert "effect not known: env_vars.HF_TOKEN not shown | not shown" in result.stdout
    assert "hf_" not in result.stdout + run(*files, "--json").stdout


def test_a_clip_of_half_a_configuration_is_a_setting_of_unknown_effect(write):
    """The loss that it belongs to may come from a file that this one overrides."""
    half = "actor_rollout_ref:\n  actor:\n    clip_ratio_high: {}\n"
    a, b = write(half.format(0.2), half.format(0.3), (".yaml", ".yaml"))
    difference = diff(a, b)
    assert difference.differs
    assert difference.headline.startswith("1 setting of unknown effect, no difference in effect in ")
    assert "effect not known: actor_rollout_ref.actor.clip_ratio_high 0.2 | 0.3" in str(difference)
    assert not diff(a, a).differs


def test_settings_of_a_critic_count_where_there_is_one(write):
    a, b = VERL.format("critic.optim.lr=1e-5"), VERL.format("critic.optim.lr=2e-5")
    assert not diff(*write(a, b)).differs
    pair = write(a.replace("=grpo", "=gae"), b.replace("=grpo", "=gae"))
    assert [one.name for one in diff(*pair).configurations.unjudged] == ["critic.optim.lr"]


def test_a_value_that_is_known_when_the_program_runs_is_said(write):
    files = write(VERL.format("actor_rollout_ref.rollout.temperature=$T"), VERL.format(""))
    result = run(*files)
    assert result.exit_code == 0
    assert "no difference in effect" in result.stdout
    assert (
        "not known: temperature not known | 1; actor_rollout_ref.rollout.temperature is the environment variable T"
        in result.stdout
    )


def test_the_same_expression_in_both_is_no_difference(write):
    text = VERL.format("actor_rollout_ref.rollout.temperature=$T")
    difference = diff(*write(text, text))
    assert "temperature" in difference.configurations.in_neither
    assert not difference.configurations.undecided


def test_settings_from_elsewhere_are_not_taken_for_defaults(write):
    a = VERL.format("--config-name mine")
    difference = diff(*write(a, VERL.format("actor_rollout_ref.rollout.n=8")))
    undecided = {one.quantity.name: one.note for one in difference.configurations.undecided}
    assert "the configuration mine that --config-name names" in undecided["answers to a prompt"]
    assert not difference.configurations.differences


def test_numbers_of_each_process_are_compared_with_each_other_but_not_with_a_total(write):
    python = (".py", ".py")
    a, b = TRL.format("per_device_train_batch_size=8"), TRL.format("per_device_train_batch_size=4")
    assert names(diff(*write(a, b, python)).configurations.differences) == [
        "answers an update",
        "answers a batch",
    ]
    more = TRL.format("per_device_train_batch_size=4, gradient_accumulation_steps=2")
    assert not diff(*write(a, more, python)).differs
    total = VERL.format(
        "data.train_batch_size=2 actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.rollout.n=8"
    )
    undecided = diff(*write(a, total, (".py", ".sh"))).configurations.undecided
    notes = {one.quantity.name: one.note for one in undecided}
    assert notes["answers an update"].startswith("equal with 2 processes")
    odd = total.replace("rollout.n=8", "rollout.n=5")
    assert "answers an update" in names(diff(*write(a, odd, (".py", ".sh"))).configurations.differences)


def test_an_estimator_without_a_coefficient_is_no_difference(write):
    a, b = VERL.format("actor_rollout_ref.actor.kl_loss_type=k1"), VERL.format("")
    assert not diff(*write(a, b)).differs
    term = " actor_rollout_ref.actor.use_kl_loss=True"
    assert names(diff(*write(a.strip() + term, b.strip() + term)).configurations.differences) == [
        "KL estimator"
    ]


def test_a_method_of_bandpo_is_the_policy_loss(write):
    loss = "actor_rollout_ref.actor.policy_loss."
    method = f"{loss}_target_=bandpo.integrations.verl.BandPolicyLossConfig +{loss}method='Band(KL(),0.05)'"
    stock = diff(*write(VERL.format(method), VERL.format(""))).configurations
    assert names(stock.differences)[0] == "policy loss"
    assert not stock.unjudged
    assert "average of the loss" in names(stock.undecided)
    other = diff(*write(VERL.format(method), VERL.format(method.replace("0.05", "0.1")))).configurations
    assert names(other.differences) == ["policy loss"]
    trl = [TRL.format(f"method='DAPO()', beta={beta}") for beta in (0.0, 0.1)]
    assert names(diff(*write(*trl, (".py", ".py"))).configurations.differences) == ["KL coefficient"]


def test_a_clip_acts_if_one_of_the_two_has_several_updates(write):
    actor = "actor_rollout_ref.actor."
    size = f"data.train_batch_size=64 {actor}ppo_mini_batch_size={{}} {actor}clip_ratio_high={{}}"
    one_update = diff(
        *write(VERL.format(size.format(64, 0.28)), VERL.format(size.format(64, 0.2)))
    ).configurations
    assert names(one_update.without_effect) == ["clip above"]
    assert not one_update.differs
    several = diff(
        *write(VERL.format(size.format(64, 0.28)), VERL.format(size.format(32, 0.2)))
    ).configurations
    assert names(several.differences) == ["clip above", "answers an update"]


def test_the_number_of_updates_on_a_batch_is_told_where_it_differs(write):
    size = "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size={}"
    said = str(diff(*write(VERL.format(size.format(64)), VERL.format(size.format(16)))))
    assert (
        "\nfrom these settings, updates on a batch: 1 | 4, and with one, every ratio is 1, and nothing is clipped\n"
        in f"{said}\n"
    )
    same = str(diff(*write(VERL.format(size.format(64)), VERL.format(f"{size.format(64)} trainer.nnodes=2"))))
    assert "updates on a batch" not in same


def test_a_warm_up_by_a_share_of_the_run_is_of_its_steps(write):
    ratio = "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps={}"
    found = diff(
        *write(VERL.format(ratio.format(300)), VERL.format(ratio.format(700)))
    ).configurations.differences
    assert {one.quantity.name: (one.a.value, one.b.value) for one in found} == {
        "warm-up": ("30 batches", "70 batches"),
        "length of the run": ("300 batches", "700 batches"),
    }
    trl = [TRL.format(f"warmup_ratio=0.1, max_steps={steps}") for steps in (45, 90)]
    found = diff(*write(*trl, (".py", ".py"))).configurations.differences
    assert ("5 batches", "9 batches") in [(one.a.value, one.b.value) for one in found]


def test_a_temperature_of_the_engine_alone_is_one_of_the_data(write):
    other = TRL.format("generation_kwargs={'temperature': 0.7}")
    (difference,) = diff(*write(TRL.format(""), other, (".py", ".py"))).configurations.differences
    assert (difference.quantity.name, difference.quantity.effect) == ("engine's temperature", "data")
    assert (difference.a.value, difference.b.value) == (None, 0.7)


def test_the_engine_s_old_policy_makes_a_clip_act_at_one_update(write):
    size = (
        "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 "
        "algorithm.rollout_correction.bypass_mode=True actor_rollout_ref.actor.clip_ratio_high={}"
    )
    difference = diff(*write(VERL.format(size.format(0.28)), VERL.format(size.format(0.2))))
    assert names(difference.configurations.differences) == ["clip above"]


@pytest.mark.parametrize(
    ("setting", "quantity", "message"),
    [
        ("actor_rollout_ref.rollout.n=many", "answers a batch", "rollout.n is many, and not a number"),
        ("actor_rollout_ref.rollout.n=1e300", "answers a batch", "rollout.n is 1e+300, and not a number"),
        ("actor_rollout_ref.actor.loss_agg_mode=mean", "average of the loss", "has a value of another type"),
        ("actor_rollout_ref.actor.optim.betas=0.9", "betas of Adam", "has a value of another type"),
        ("data.train_batch_size=[1,2]", "answers an update", "train_batch_size is [1, 2], and not a number"),
    ],
)
def test_a_value_of_another_type_is_said_and_not_a_traceback(setting, quantity, message, write):
    difference = diff(*write(VERL.format(setting), VERL.format("")))
    notes = {one.quantity.name: one.note for one in difference.configurations.undecided}
    assert message in notes[quantity]
    assert json.loads(run(*write(VERL.format(setting), VERL.format("")), "--json").stdout)


@pytest.mark.parametrize("value", ["NaN", "1e999", str(10**400), '"text"', "[1]", "true"])
def test_no_value_of_a_saved_configuration_ends_in_a_traceback(value, tmp_path):
    names = list(comparison.DEFAULTS["trl"]["defaults"])
    text = ", ".join(f'"{name}": {value}' for name in names)
    for name, content in (
        ("a", text),
        ("b", '"importance_sampling_level": "token", "scale_rewards": "group"'),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "trainer.json").write_text(f"{{{content}}}")
    difference = diff(tmp_path / "a", tmp_path / "b")
    assert json.dumps(difference.as_json(), allow_nan=False)
    assert str(difference)


def test_a_script_and_the_configuration_that_its_run_saved_differ_in_nothing(write, tmp_path):
    """A saved configuration has every setting, also those of which an older version knew nothing."""
    saved = {
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "num_generations": 8,
        "beta": 0.04,
    }
    saved |= {"loss_type": "dapo", "learning_rate": 1e-6, "max_completion_length": 256, "temperature": 1.0}
    saved |= {"use_bias_correction_kl": True, "vllm_importance_sampling_correction": True, "epsilon": 0.2}
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps(saved))
    script, _ = write(TRL.format("beta=0.04, max_completion_length=256"), "", (".py", ".sh"))
    difference = diff(script, folder)
    assert names(difference.configurations.differences) == []
    (folder / "config.yaml").write_text(json.dumps(saved | {"beta": 0.1}))
    assert names(diff(script, folder).configurations.differences) == ["KL coefficient"]


# What is refused


def log_text(steps=40, key="reward"):
    return "".join(
        json.dumps({"step": step, key: step % 3 / 10, "entropy": 0.5}) + "\n" for step in range(steps)
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sft.py", "from trl import SFTConfig\nSFTConfig('out')\n", "configures SFTConfig, which is no RL"),
        ("sft.sh", "torchrun -m verl.trainer.sft_trainer data.train_batch_size=8\n", "sft_trainer, which is no RL"),
        ("sky.sh", "python -m skyrl.train.entrypoints.main_base trainer.algorithm.eps_clip_low=0.2\n", "SkyRL"),
        ("two.sh", 2 * VERL.format(""), "holds 2 runs, which begin at lines 1, 2"),
        ("none.sh", "echo hello\n", "holds no configuration of TRL, verl"),
        ("sft.jsonl", log_text(key="loss"), "is no log of RL: it is thought to be of supervised training"),
        ("log.jsonl", log_text(), "log.jsonl is a log"),
        ("slime.sh", "python t.py --advantage-estimator grpo --rollout-num-gpus 4 --n-samples-per-prompt 8\n", "slime"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_with_its_name(name, text, message, tmp_path):
    other = tmp_path / "other.sh"
    other.write_text(VERL.format(""))
    file = tmp_path / name
    file.write_text(text)
    assert message in refusal(file, other)
    assert message in refusal(other, file)


def test_a_record_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    recorder = pytest.importorskip("bandpo.audit").Recorder
    torch = pytest.importorskip("torch")
    from bandpo import Batch

    other = tmp_path / "log.jsonl"
    other.write_text(log_text())
    with recorder(tmp_path / "tokens") as record:
        values = torch.full((2, 3), -1.0)
        record.add(Batch.read(values, values, torch.tensor([1.0, -1.0]), torch.ones(2, 3)))
    assert "is a record of tokens" in refusal(tmp_path / "tokens", other)
    assert "is a record of tokens" in refusal(other, tmp_path / "tokens")


def test_a_path_that_is_not_there_is_refused(tmp_path):
    command = [sys.executable, "-m", "rlvet", "diff", tmp_path / "a.sh", tmp_path / "b.sh"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == f"error: {tmp_path}/a.sh does not exist\n"


def test_control_characters_of_a_file_do_not_reach_the_terminal(write):
    files = write(VERL.format("'+mine.name=\x1b[31mred'"), VERL.format(""))
    text = str(diff(*files))
    assert "\\x1b[31mred" in text
    assert "\x1b" not in text
    assert "\x1b" not in run(*files, "--json").stdout


# Runs with a log


def test_settings_of_an_earlier_version_are_told(tmp_path):
    """Its loss may be another one. A file without settings of the newest version is of an earlier one."""
    for name, settings in (("a", {"importance_sampling_level": "token", "temperature": 1.0}), ("b", None)):
        folder = tmp_path / name
        folder.mkdir()
        rows = [{"step": step, "reward": 0.3 + 0.02 * (step * 3 % 7)} for step in range(60)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        if settings is None:
            settings = {**FRAMEWORKS["trl"].defaults, "importance_sampling_level": "token"}
        (folder / "config.yaml").write_text(json.dumps(settings))
    output = run(tmp_path / "a", tmp_path / "b").stdout
    assert (
        "A was saved by an earlier version than TRL 1.16.0; what settings do is told as of TRL 1.16.0"
        in output
    )


def test_a_setting_that_one_run_leaves_at_its_default_is_named(write):
    term = "python -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=True"
    difference = diff(*write(f"{term} actor_rollout_ref.actor.kl_loss_coef=-0.1\n", f"{term}\n"))
    lines = [line for line in str(difference).split("\n") if line.startswith("   B  0.001")]
    (line,) = lines
    assert line.endswith(", actor_rollout_ref.actor.kl_loss_coef at its default")


def write_run(folder, rows, temperature):
    """Write a log and, beside it, the settings of TRL with a temperature."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"importance_sampling_level": "token", "scale_rewards": "group", "temperature": temperature}
    (folder / "config.yaml").write_text(json.dumps(settings))


def test_two_logs_part_and_the_settings_beside_them_are_compared(tmp_path):
    for name, shift, temperature in (("a", 0.0, 1.0), ("b", 0.4, 0.6)):
        rows = []
        for step in range(60):
            entropy = 0.8 - (shift if step >= 30 else 0) + 0.01 * (step * 7 % 5)
            rows.append({"step": step, "reward": 0.3 + 0.02 * (step * 3 % 7), "entropy": entropy})
        write_run(tmp_path / name, rows, temperature)
    result = run(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    assert result.stdout.startswith(
        "1 of 2 shared metrics parts beyond its noise, entropy by step 30 at the latest; 1 diff"
    )
    assert re.search(r"^- entropy from step 30: 0\.8\d* \| 0\.4\d* ", result.stdout, re.M)
    assert "over all 60 of them, 0 to 59, 0.36 | 0.36: A − B is 0" in result.stdout.split("\n")[1]
    assert "not told apart" not in result.stdout
    assert "1. temperature (gradient)" in result.stdout
    assert run(tmp_path / "a", tmp_path / "a").exit_code == 0


def write_short_runs(folder, rows):
    """Write two runs with as many log steps, which differ in the temperature."""
    for name, temperature in (("a", 1.0), ("b", 0.6)):
        log = [{"step": step, "reward": 0.3 + 0.02 * (step * 3 % 7)} for step in range(rows)]
        write_run(folder / name, log, temperature)


def test_the_settings_of_two_short_logs_are_compared(tmp_path):
    write_short_runs(tmp_path, 15)
    result = run(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    assert result.stdout.startswith(
        "no shared metric has the 20 common steps that the rule needs; 1 difference in effect: temperature"
    )
    (tmp_path / "b/config.yaml").unlink()
    result = run(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0
    assert "were not compared" in result.stdout


def test_two_logs_of_seven_rows_are_compared_at_their_ends(tmp_path):
    write_short_runs(tmp_path, 7)
    result = run(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    reason = "A has the steps 0 to 6, B 0 to 6, and no metric has 8 common ones, so that only the ends of"
    assert result.stdout.startswith(reason)
    assert "; 1 difference in effect: temperature\n" in result.stdout
    assert (
        "\nmeans of the first tenth → of the last tenth of the 7 common steps (A | B): reward"
        in result.stdout
    )
    (tmp_path / "b/config.yaml").unlink()
    assert run(tmp_path / "a", tmp_path / "b").exit_code == 0


def test_two_runs_with_an_audit_are_named_by_method_and_blocked_share_first(tmp_path):
    """The share is that of all steps, Σ blocked / Σ gradient, and a log without the audit has none."""
    logs = {"a": ("Band(KL(), 0.05)", [0.0, 0.1]), "b": ("GRPO()", [0.5, 0.25]), "c": ("GRPO()", None)}
    for name, (method, shares) in logs.items():
        folder = tmp_path / name
        folder.mkdir()
        rows = []
        for step in range(20):
            row = {"step": step, "reward": 0.1 * (step * 7 % 5), "audit/tokens": 10.0}
            if shares is not None:
                row["audit/mass_positive_below_0.1"] = 1.0 if step < 10 else 3.0
                row["audit/blocked_mass_below_0.1"] = shares[step >= 10]
            rows.append(row)
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "config.yaml").write_text(
            json.dumps({"importance_sampling_level": "token", "num_generations": 8, "method": method})
        )
    begin = "blocked of the gradient on tokens of A > 0 and p < 0.1: A Band(KL(), 0.05), 7.5%; B GRPO(), "
    assert run(tmp_path / "a", tmp_path / "b").stdout.startswith(f"{begin}31.2%\n")
    assert run(tmp_path / "a", tmp_path / "c").stdout.startswith(f"{begin}not measured\n")
    assert run(tmp_path / "c", tmp_path / "c").stdout.startswith("all values of ")
    output = json.loads(run(tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert output["notes"][0] == f"{begin}31.2%"


def test_a_run_of_a_file_of_several_is_named_and_so_is_the_reward(tmp_path):
    several, one = tmp_path / "several.csv", tmp_path / "one.csv"
    lines = [f"{step},{name},{0.1 + 0.001 * (step % 5)}" for name in ("x", "y") for step in range(40)]
    several.write_text("\n".join(["step,run,my_score", *lines]))
    one.write_text("\n".join(["step,my_score", *(f"{step},{2 + 0.001 * (step % 5)}" for step in range(40))]))
    names = ("--map", "reward=my_score")
    assert "--run-name" in str(run(several, one, *names).exception)
    assert "--map reward=KEY" in str(run(one, one).exception)
    same = run(several, several, *names, "--run-name", "x", "--run-name", "y")
    assert same.exit_code == 0
    assert f"A: {several}, run x\n   rlvet diagnose: " in same.stdout
    assert f"B: {several}, run y\n   rlvet diagnose: " in same.stdout
    other = run(several, one, *names, "--run-name", "y", "--run-name", "")
    assert other.exit_code == 1
    assert f"A: {several}, run y\n   rlvet diagnose: " in other.stdout
    assert f"B: {one}\n   rlvet diagnose: " in other.stdout
    three = run(several, one, *("--run-name", "x") * 3)
    assert "--run-name is given once, or 2 times for 2 paths, got 3" in str(three.exception)


# The JSON and the page


def test_the_json_has_its_fields_and_a_version(write):
    result = run(*write(VERL.format("actor_rollout_ref.rollout.n=8"), VERL.format("")), "--json")
    output = json.loads(result.stdout)
    fields = "schema headline differs a b configurations logs keys diagnoses notes"
    assert list(output) == fields.split()
    assert output["schema"] == "urn:rlvet:diff:1"
    assert output["logs"] is None
    fields = "frameworks compared differences without_effect undecided in_neither speed unjudged names"
    assert list(output["configurations"]) == fields.split()
    first = output["configurations"]["differences"][0]
    assert list(first) == ["name", "effect", "a", "b", "note"]
    assert first["a"] == {
        "value": "2048",
        "unknown": "",
        "settings": [
            {
                "name": "actor_rollout_ref.actor.ppo_mini_batch_size",
                "value": 256,
                "source": "default of verl 0.9.1",
            },
            {"name": "actor_rollout_ref.rollout.n", "value": 8, "source": "a.sh:1"},
        ],
    }


def test_the_page_has_a_real_output(monkeypatch):
    """The page leaves out lines in the middle, at an ellipsis."""
    monkeypatch.chdir(Path(__file__).parent / "page")
    output = str(diff("works.py", "stalls.sh"))
    page = PAGE.read_text()
    assert "rlvet diff works.py stalls.sh" in page
    (shown,) = re.findall(r"^    \d+ differences in effect.*\n(?:(?:    .*)?\n)+", page, re.M)
    start, end = re.sub("^    ", "", shown.rstrip(), flags=re.M).split("…\n")
    assert output.startswith(start)
    assert output.endswith(end)


def test_the_page_has_the_limits_of_the_noise():
    from rlvet.compare import logs

    page = PAGE.read_text()
    assert f"more than {logs.LIMIT:g} · noise / √window" in page
    assert f"{100 * logs.SHIFT:g} % of the steps" in page
    assert f"fewer than {logs.FEWEST_STEPS} common steps" in page


def test_settings_in_json_are_a_configuration_and_a_state_of_the_trainer_a_log(tmp_path):
    for name, rate in (("a", 1e-5), ("b", 1e-6)):
        settings = {"learning_rate": rate, "num_generations": 8, "max_completion_length": 64}
        (tmp_path / f"{name}.json").write_text(json.dumps(settings))
    difference = diff(tmp_path / "a.json", tmp_path / "b.json")
    assert difference.headline.startswith("1 difference in effect: learning rate")
    rows = [{"step": step, "reward": step / 40, "kl": 0.1} for step in range(1, 41)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    state = diff(tmp_path / "trainer_state.json", tmp_path / "trainer_state.json")
    assert state.configurations is None
    assert state.logs is not None
