"""Console output of frameworks, in the form in which their own source prints it."""

import json
import pprint
import re

import pytest

from rlvet import diagnose
from rlvet.runs.consoles import printed_trainings
from rlvet.runs.consoles.trl import trl_trainings
from rlvet.runs.logs import read_log
from rlvet.runs.tables import table_rows
from rlvet.runs.unread import Unread

STEPS = range(1, 13)


def printed_rows(text, unread=None):
    """Return the rows of all trainings in a text, and add what is not read."""
    trainings, unread_of_text = printed_trainings(text)
    if unread is not None:
        unread.add_all(unread_of_text)
    return [row for rows in trainings for row in rows]


def skyrl(step):
    """ConsoleLogger of skyrl/train/utils/tracking.py: floats as texts of four decimals, through pprint and loguru."""
    data = {
        "reward/avg_raw_reward": 0.1 * step,
        "policy/policy_entropy": 0.5,
        "policy/raw_grad_norm": 0.25,
        "trainer/global_step": step,
        "policy/policy_lr": 1e-6,
    }
    texts = {key: f"{value:.4f}" if isinstance(value, float) else value for key, value in data.items()}
    return (
        f"2026-08-21 10:00:00.000 | INFO     | skyrl.train.utils.tracking:log:189 - Step {step}: \n"
        f"{pprint.pformat(texts)}\n"
    )


def openrlhf(step):
    """PPOTrainer.fit of openrlhf/trainer/ppo_trainer.py."""
    status = {"reward": 0.1 * step, "ppo_clip_ratio": 0.01, "actor_grad_norm": 0.25, "entropy_loss": 0.5}
    prefix = "\x1b[36m(PPOTrainer pid=7)\x1b[0m INFO 08-21 10:00:00 ppo_trainer.py:547]"
    return f"{prefix} ✨ Global step {step}: {status}\n"


def slime(step):
    """gather_log_data of slime/observability/train_metric_utils.py and train of backends/megatron_utils/model.py."""
    rollout = {"rollout/raw_reward": 0.1 * step, "rollout/response_lengths": 300.5}
    lines = [
        f"(Actor pid=3) [2026-08-21 10:00:00] train_metric_utils.py:135 - rollout {step - 1}: {rollout}\n"
    ]
    for update in range(2):
        number = 2 * (step - 1) + update
        train = {
            "train/pg_clipfrac": 0.01,
            "train/entropy_loss": 0.5,
            "train/grad_norm": 0.25,
            "train/step": number,
        }
        lines.append(f"(Actor pid=3) [2026-08-21 10:00:00] model.py:918 - step {number}: {train}\n")
    return "".join(lines)


def prime_rl(step):
    """Return the step messages of prime-rl's orchestrator and trainer."""
    return (
        f"10:00:00 SUCCESS Step {step} |   1m 2s | Reward {0.1 * step:.4f} | Trainable 60/64 (93.8%) | Turns 1.0 | "
        "Branches 1.0 | Max Off-Policy 1 | Error 0.0% | Cancelled 0.0% | Truncation 12.5%\n"
        f"10:00:09 SUCCESS Step {step} |   9.51s | Loss 0.0100 | Entropy 0.5000 | Mismatch KL 0.0010 | "
        "Grad. Norm 0.2500 | LR 1.00e-06 | Throughput 9000 tokens/s | MFU 30.1% | Peak Mem. 60.0 GiB\n"
    )


def roll(step):
    """StdoutTracker of roll/utils/tracking.py."""
    metrics = {"critic/score/mean": 0.1 * step, "actor/ppo_ratio_clipfrac": 0.01, "actor/entropy": 0.5}
    content = json.dumps({"step": step, "metrics": metrics})
    return f"[2026-08-21 10:00:00] [tracking.py (161)] [INFO] metrics_tag: {content}\n"


def areal(step):
    """StatsLogger.commit of areal/utils/stats_logger.py, with the table of areal/utils/printing.py (fancy_grid)."""
    line = "═" * 24
    return (
        f"20260821-10:00:00.000 StatsLogger INFO: Epoch 1/1 Step {step}/12 Train step {step}/12 done.\n"
        "20260821-10:00:00.000 StatsLogger INFO: Stats (1/1):\n"
        f"20260821-10:00:00.000 StatsLogger INFO: \n╒{line}╤{line}╤{line}╤{line}╕\n"
        f"│ ppo_actor/task_reward/avg │ {0.1 * step:.4e} │ ppo_actor/update/entropy/avg │ 5.0000e-01 │\n"
        f"├{line}┼{line}┼{line}┼{line}┤\n"
        f"│ ppo_actor/update/grad_norm │ 2.5000e-01 │                   │            │\n"
        f"╘{line}╧{line}╧{line}╧{line}╛\n"
    )


def nemo_rl(step):
    """grpo_train of nemo_rl/algorithms/grpo.py, for runs of two epochs of six steps."""
    epoch, number = divmod(step - 1, 6)
    line = "=" * 25
    title = f"\n{line} Epoch {epoch + 1}/2 {line}\n" if number == 0 else ""
    return (
        f"{title}\n{line} Step {number + 1}/6 {line}\n▶ Preparing batch...\n\n📊 Training Results:\n"
        f"  • Loss: 0.0100\n  • Generation KL Error: 0.0010\n  • Avg Reward: {0.1 * step:.4f}\n"
        "  • Mean Generation Length: 300.5000\n\n⏱️  Timing:\n  • Total step time: 35.70s\n"
        "  • policy_training: 10.97s (30.7%)\n"
    )


@pytest.mark.parametrize("printed", [skyrl, openrlhf, slime, prime_rl, roll, areal, nemo_rl])
def test_the_console_of_a_framework_is_a_log(printed, tmp_path):
    file = tmp_path / "train.log"
    file.write_text("loading the model 3/3 [00:01]\n" + "".join(f"{printed(step)}noise\n" for step in STEPS))
    log = read_log(file)
    assert [round(row["reward"], 4) for row in log.rows] == [round(0.1 * step, 4) for step in STEPS]
    # NeMo-RL prints no entropy.
    assert printed is nemo_rl or all(row["entropy"] == 0.5 for row in log.rows)
    expected = list(STEPS) if printed is not slime else [step - 1 for step in STEPS]
    assert [row["step"] for row in log.rows] == expected
    assert diagnose(file).healthy


def test_quantities_beside_reward_and_entropy(tmp_path):
    (row,) = printed_rows(prime_rl(3))
    assert row == {
        "step": 3,
        "time/step": 62.0,
        "reward/mean": 0.3,
        "trainable": 0.9375,
        "turns": 1.0,
        "branches": 1.0,
        "off_policy_level/max": 1.0,
        "error": 0.0,
        "cancelled": 0.0,
        "is_truncated/mean": 0.125,
        "trainer/time/step": 9.51,
        "loss/mean": 0.01,
        "entropy/all/mean": 0.5,
        "mismatch_kl/all/mean": 0.001,
        "optim/grad_norm": 0.25,
        "optim/lr": 1e-6,
        "perf/throughput": 9000.0,
        "perf/mfu": pytest.approx(0.301),
        "perf/peak_memory": 60.0,
    }


def test_filters_and_evaluations_of_prime_rl_have_the_step_of_the_line_after_them(tmp_path):
    """src/prime_rl/orchestrator/orchestrator.py and eval_utils.py, as in issue reports of 2025."""
    line = (
        "00:27:06 INFO Detected 97/128 rollouts (gibberish=2, zero_advantage={count}), enforced 95\n"
        "00:27:06 SUCCESS Evaluated aime24 in 34.06s (Avg@8=0.2500, Pass@8: 0.5000, Completion Length: 900.00 (±9.00, "
        "∈[1.00, 950.00]), Truncated: 12.5%)\n"
        "00:27:06 SUCCESS Step {step} | Time: 3.20s | Reward: 0.9912 | Seq. Length: 331.1 tokens/sample | Async Level: "
        "1 | Max. Off-Policy Level: 2\n"
    )
    file = tmp_path / "orchestrator.log"
    file.write_text("".join(line.format(step=step, count=90 + step) for step in range(1, 4)))
    log = read_log(file)
    assert [row["dead"] for row in log.rows] == [91 / 128, 92 / 128, 93 / 128]
    assert {row["length"] for row in log.rows} == {331.1}
    assert {row["staleness_max"] for row in log.rows} == {2.0}
    assert {row["evaluation"] for row in log.rows} == {0.25}
    assert {row["step_time"] for row in log.rows} == {3.2}
    assert set(log.unread) == {
        "async_level",
        "filters/all/gibberish",
        "eval/aime24/pass@8",
        "eval/aime24/completion_length",
        "eval/aime24/truncated",
    }
    assert log.unread_rows == 0
    assert not log.unread_values


def test_quantities_that_nemo_rl_prints():
    (row,) = printed_rows(nemo_rl(3))
    assert row == {
        "step": 3,
        "loss": 0.01,
        "gen_kl_error": 0.001,
        "reward": 0.3,
        "mean_gen_tokens_per_sample": 300.5,
    }


def test_results_of_nemo_rl_that_are_no_numbers_are_named(tmp_path):
    text = nemo_rl(1).replace("  • Avg Reward", "  • Mode: fast\n  • Avg Reward")
    (tmp_path / "train.log").write_text(text)
    assert read_log(tmp_path / "train.log").unread == ("loss", "mode")


def printed_by_trl(count, first_epoch=0.01, **summary):
    rows = [
        {"loss": 0.1, "reward": 0.5, "epoch": round(first_epoch + 0.01 * number, 2)}
        for number in range(count)
    ]
    return "\n".join(map(str, [*rows, {"train_runtime": 735.8, "train_loss": 0.1, "epoch": 0.5, **summary}]))


@pytest.mark.parametrize(
    ("count", "summary", "first", "last"),
    [
        (40, {"train_steps_per_second": 0.272}, 5, 200),
        (40, {"train_steps_per_second": 0.276}, 5, 200),  # three more steps, which have no row
        (40, {"train_steps_per_second": 0.054}, 1, 40),
        (40, {}, 1, 40),
        (40, {"train_steps_per_second": 0.272, "first_epoch": 0.41}, 1, 40),  # a run that was resumed
        (5, {"train_steps_per_second": 0.05}, 7, 35),  # 36 or 37 steps
        (3, {"train_steps_per_second": 0.001, "train_runtime": 9000.0}, 1, 3),  # 4 to 14 steps
    ],
)
def test_steps_of_rows_without_a_bar_are_those_of_the_summary(count, summary, first, last):
    unread = Unread()
    [rows] = trl_trainings(printed_by_trl(count, **summary), unread)
    steps = [row["step"] for row in rows if "reward" in row]
    assert (steps[0], steps[-1], len(steps)) == (first, last, count)
    [note] = unread.notes() or [""]
    is_known = "train_steps_per_second" in summary and "first_epoch" not in summary and count > 3
    assert note.startswith("no row has its step") == (first > 1 or not is_known)
    assert ("by the summary" in note) == (first > 1)


def test_a_line_of_a_step_that_cannot_be_parsed_is_counted():
    unread = Unread()
    text = f"{openrlhf(1)}Global step 2: {{'reward': 0.5, 'broken': <object at 0x7f>}}\n{openrlhf(3)}"
    assert [row["step"] for row in printed_rows(text, unread)] == [1, 3]
    assert unread.notes() == ("1 line of a step is not read, as its metrics cannot be parsed: 'step 2'",)


def test_several_updates_of_a_rollout_of_slime_are_counted():
    unread = Unread()
    text = "rollout 0: {'rollout/raw_reward': 0.5}\n"
    text += "step 0: {'train/grad_norm': 0.1}\nstep 1: {'train/grad_norm': 0.3}\n"
    assert printed_rows(text, unread) == [{"step": 0, "rollout/raw_reward": 0.5, "train/grad_norm": 0.3}]
    assert unread.count == 1


def test_colons_that_prime_rl_printed_in_2025():
    """src/prime_rl/trainer/rl/train.py of version 0.3."""
    (row,) = printed_rows(
        "[default0]:15:41:30 SUCCESS Step 9 | Time: 4.29s | Loss: 0.0000 | Entropy: 0.3571 | Mismatch KL: 0.0007 | "
        "Grad. Norm: 0.0000 | LR: 3.00e-06 | Throughput: 3964 tokens/s | Peak Mem.: 17.4 GiB"
    )
    assert row["entropy/all/mean"] == 0.3571
    assert row["mismatch_kl/all/mean"] == 0.0007
    assert row["optim/lr"] == 3e-6
    assert set(row) == {
        "step",
        "trainer/time/step",
        "loss/mean",
        "entropy/all/mean",
        "mismatch_kl/all/mean",
        "optim/grad_norm",
        "optim/lr",
        "perf/throughput",
        "perf/peak_memory",
    }


# NotebookProgressCallback of transformers/utils/notebook.py, as browsers copy its table.
NOTEBOOK = """the logs:

Step {s} Training Loss {s} reward {s} completions / mean_length {s} kl {s} rewards / format / mean
{line}1 {s} -0.283600 {s} 0.437500 {s} 1115.4 {s} nan {s} 0.1
2 {s} -0.149100 {s} 0.931818 {s} 1203.2 {s} No Log {s} 0.2
12 {s} 0.1 {s} 0.5 {s} 11
"""


@pytest.mark.parametrize(
    ("separator", "line"), [("|", "-- | -- | -- | -- | -- | --\n"), ("\t", "")], ids=["markdown", "tabs"]
)
def test_a_table_of_a_notebook_is_a_log(separator, line, tmp_path):
    file = tmp_path / "pasted.txt"
    file.write_text(NOTEBOOK.format(s=separator, line=line))
    log = read_log(file)
    assert [row["step"] for row in log.rows] == [1, 2, 12]
    assert [row["reward"] for row in log.rows] == [0.4375, 0.931818, 0.5]
    assert [row.get("length") for row in log.rows] == [1115.4, 1203.2, None]
    assert log.rows[0]["not_finite"]
    assert log.rows[1]["rewards/format/mean"] == 0.2


def test_a_table_without_steps_is_no_log():
    assert table_rows("name | reward | kl\na | 0.5 | 0.1\n1 | 2 | 3\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "Global step 3: {'reward': __import__('os').system('touch ran')}",
        "Global step 3: {" * 5000,
        "Step 1:\n{'a'",
        'metrics_tag: {"step": 1, "metrics": [1]}',
        "metrics_tag: {1}",
        "Step 1 | nothing | at all",
        "Train step 1/3 done.",
        "step 3: {}",
    ],
)
def test_what_is_no_row_of_metrics_is_none(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert printed_rows(text) == []
    assert list(tmp_path.iterdir()) == []


def test_nested_values_are_read_and_lists_are_named(tmp_path):
    line = "Global step 3: {'reward': 0.5, 'by source': {'a': {'b': 0.1}}, 'lengths': [1, 2], 'none': None}"
    (tmp_path / "train.log").write_text(line)
    log = read_log(tmp_path / "train.log")
    assert log.rows[0]["by source/a/b"] == 0.1
    assert log.unread == ("by source/a/b", "lengths", "none")
    assert printed_rows("Global step 3: {'reward': 0.5, 'deep': " + "{'a': " * 10 + "1" + "}" * 11) == []


def test_a_learning_rate_that_skyrl_rounds_away_is_not_0():
    (row,) = printed_rows(skyrl(3))
    assert row["policy/policy_lr"] == "0.0000 (rounded)"
    assert row["policy/raw_grad_norm"] == 0.25


def test_not_a_number_is_kept():
    (row,) = printed_rows("Global step 3: {'reward': nan, 'actor_grad_norm': inf}")
    assert row == {"step": 3, "reward": "NaN", "actor_grad_norm": "Infinity"}


@pytest.mark.parametrize(
    "line",
    [
        "[10:00] step {step} | Reward: {reward:.4f} | KL_ref: -0.0010, Avg Response Len: 271.00, Learning Rate: 3e-7",
        "Step {step}/100: reward={reward:.4f} kl_ref=-0.001 avg_response_len=271.00 learning_rate=3e-7",
        "iteration: {step}, Reward = {reward:.4f}; KL ref = -1e-3; Avg Response Len = 271; learning rate = 3e-07 (1 s)",
    ],
)
def test_lines_of_a_loop_of_one_s_own_are_rows(line, tmp_path):
    file = tmp_path / "train.log"
    text = "Model Params: 30.03M\n"
    for step in STEPS:
        text += line.format(step=step, reward=0.1 * step) + "\nanswer 3: the reward is large\n"
    file.write_text(text)
    log = read_log(file)
    assert [row["step"] for row in log.rows] == list(STEPS)
    assert [row["reward"] for row in log.rows] == [round(0.1 * step, 4) for step in STEPS]
    assert {row["kl"] for row in log.rows} == {-0.001}
    assert {row["length"] for row in log.rows} == {271.0}
    assert {row["learning_rate"] for row in log.rows} == {3e-7}


def test_steps_of_a_second_epoch_go_on_after_the_first():
    text = "\n".join(
        f"Epoch:[{epoch}/2]({step}/3), Reward: 0.5, Loss: 0.1" for epoch in (1, 2) for step in (1, 2, 3)
    )
    assert [row["step"] for row in printed_rows(text)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "line",
    [
        "step 3: the reward is 0.5",
        "step 3 loss=0.5 lr=0.1",
        "reward: 0.5, kl: 0.1",
        "step 3 reward: 0.5",
        "Run step 3 of the guide: set reward: true, kl: none",
    ],
)
def test_lines_without_a_step_and_a_reward_beside_another_number_are_no_rows(line):
    assert printed_rows(f"{line}\n" * 12) == []


def test_a_learning_rate_that_a_loop_rounds_away_is_not_0():
    (row,) = printed_rows("step 1: Reward: 0.5, Loss: 0.0000, Learning Rate: 0.00000000")
    assert row == {"step": 1, "reward": 0.5, "loss": 0.0, "learning_rate": "0.00000000 (rounded)"}


@pytest.mark.parametrize("zero", ["0", "-0", "0.000e+00"])
def test_a_zero_without_decimals_is_0(zero):
    (row,) = printed_rows(f"step 1: Reward: 0.5, Loss: 0.25, Learning Rate: {zero}")
    assert row["learning_rate"] == 0


def test_a_line_with_a_kl_divergence_and_another_number_is_a_row():
    assert printed_rows("Step: 2 | Loss: -0.1 | KL: tensor(0.25, device='cuda:0')") == [
        {"step": 2, "loss": -0.1, "kl": 0.25}
    ]
    assert printed_rows("Step: 2 | Loss: -0.1 | kluster: 0.25") == []


@pytest.mark.parametrize("is_above", [True, False])
def test_dictionaries_belong_to_the_rows_beside_them(is_above):
    text = ""
    for step in (1, 2, 3):
        dictionary = (
            f"{{'shape': (8, 4), 'reward_mean': tensor(0.{step}, grad_fn=<DivBackward0>), 'ratio': 1.5}}"
        )
        line = f"Step: {step} | Loss: -0.1 | KL: 0.01"
        text += "\n".join((dictionary, line) if is_above else (line, dictionary)) + "\n"
    rows = printed_rows(text)
    assert [(row["step"], row["reward_mean"], row["ratio"]) for row in rows] == [
        (1, 0.1, 1.5),
        (2, 0.2, 1.5),
        (3, 0.3, 1.5),
    ]


def test_other_lines_of_a_loop_are_rows_of_an_evaluation_or_counted():
    unread = Unread()
    text = "step 1 | Reward: 0.5 | KL: 0.1\nstep 1 | eval accuracy: 0.4\nstep 2 | loss: 0.1 | lr: 0.2\n"
    assert printed_rows(text, unread) == [
        {"step": 1, "reward": 0.5, "kl": 0.1},
        {"step": 1, "eval_accuracy": 0.4},
    ]
    assert unread.notes() == (
        "1 line with a step and numbers is not read, as it has no reward: 'step 2 | loss: 0.1 | lr: 0.2'",
    )


def trl(step):
    return f"{{'loss': 0.0, 'reward': {0.1 * step:.2f}, 'kl': 0.01, 'epoch': {0.01 * step:.2f}}}\n"


def verl(step):
    return f"(TaskRunner pid=1) step:{step} - critic/score/mean:{0.1 * step:.2f} - actor/entropy:0.500\n"


PRINTERS = [skyrl, openrlhf, prime_rl, roll, areal, nemo_rl, trl, verl]


@pytest.mark.parametrize("printed", PRINTERS)
@pytest.mark.parametrize("damage", ["a value is no number", "the reward is missing", "an object is printed"])
def test_of_a_damaged_line_the_row_is_read_or_counted(printed, damage, tmp_path):
    text = ""
    for step in range(1, 13):
        part = printed(step)
        if step == 7:
            value = {
                "a value is no number": "??",
                "the reward is missing": "",
                "an object is printed": "<a at 0x7f>",
            }
            # The first number with a point after the reward's name, or the only one of AReaL's cell.
            part, count = re.subn(
                r"((?:[Rr]eward(?:/avg)?|score/mean|avg_raw_reward)\W{1,4})\d[\d.e+-]*",
                rf"\g<1>{value[damage]}",
                part,
                count=1,
            )
            assert count == 1
        text += part
    (tmp_path / "train.log").write_text(text)
    log = read_log(tmp_path / "train.log")
    rewards = sum("reward" in row for row in log.rows)
    named = log.unread_rows + sum(log.unread_values.values())
    assert rewards == 11
    assert named >= 1 or damage == "the reward is missing"
    assert len(log.rows) + log.unread_rows >= 12


def test_a_pass_of_nanochat_is_no_row_of_a_step(tmp_path):
    """scripts/chat_rl.py prints a line for each pass over the samples of a prompt before that of the step."""
    lines = []
    for step in STEPS:
        for number in range(4):
            lines.append(
                f"Step {step}/467 | Example step 0 | Pass {number} | loss: 0.012500 | Average reward: 1.0"
            )
        lines.append(f"Step {step}/467 | Average reward: {0.05 * step} | Average sequence length: 202.84")
    file = tmp_path / "train.log"
    file.write_text("\n".join(lines))
    log = read_log(file)
    assert [row["reward"] for row in log.rows] == [0.05 * step for step in STEPS]
    assert (log.unread_rows, log.unjudged) == (48, "")
    assert log.notes[0].startswith(
        "48 lines of a pass are not read, as the line of the step has the mean: 'Step 1/467"
    )


def test_dynamic_sampling_of_nemo_rl_prints_another_reward():
    """grpo_train of nemo_rl/algorithms/grpo.py prints two rewards in place of Avg Reward."""
    text = nemo_rl(3).replace("Avg Reward", "Avg Filtered Reward: 0.9000\n  • Avg Total Reward")
    (row,) = printed_rows(text)
    assert (row["reward"], row["filtered_reward"]) == (0.3, 0.9)
