"""Time and memory of a run of verl, from its log."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from bandpo_lab.cli.app import app
from bandpo_lab.cost import read_steps
from bandpo_lab.rehearsal import gpu

STEPS = [
    {"timing_s/step": 100.0, "timing_s/gen": 30.0, "perf/time_per_step": np.float64(100.0), "x/nan": np.nan},
    {"timing_s/step": 140.0, "timing_s/gen": 50.0, "perf/time_per_step": 140.0, "timing_s/save": 24},
    {"timing_s/step": 120.0, "timing_s/gen": 40.0, "perf/max_memory_allocated_gb": 61.25},
]


def log():
    """As verl's own console logger writes it, through Ray, with a step that a requeued job has done again."""
    logger = pytest.importorskip("verl.utils.logger.aggregate_logger", reason="needs the extra bandpo[verl]")
    printed = [logger.concat_dict_to_str(metrics, step) for step, metrics in enumerate(STEPS, 5)]
    lines = [f"(TaskRunner pid=7) {line}" for line in printed]
    return "\n".join(["Training Progress: 1/3", lines[0].replace("30.0", "99.0"), *lines, "done"]) + "\n"


def test_the_metrics_of_verls_console_are_read():
    steps = read_steps(log().splitlines())
    assert list(steps) == [5, 6, 7]
    assert steps[5]["timing_s/gen"] == 30.0
    assert np.isnan(steps[5]["x/nan"])
    assert {k: v for k, v in steps[6].items() if k != "step"} == STEPS[1]


def test_the_command_sums_a_log_up(tmp_path):
    (tmp_path / "run.log").write_text(log())
    printed = CliRunner().invoke(app, ["recipes", "summary", str(tmp_path / "run.log")]).output
    assert printed.splitlines() == [
        "| 3 steps, 5 to 7 |  |",
        "| --- | --- |",
        "| s per step | 120 |",
        "| GB of GPU memory allocated, at most | 61.25 |",
        "| step, 3 times | 120 s |",
        "| gen, 3 times | 40 s, 33% of the time |",
        "| save, 1 times | 24 s, 7% of the time |",
    ]
    assert CliRunner().invoke(app, ["recipes", "summary", "-"], input=log()).output == printed
    with pytest.raises(ValueError, match="no line of verl's with a step"):
        CliRunner().invoke(app, ["recipes", "summary", "-"], input="hello\n", catch_exceptions=False)


def test_the_first_steps_are_laid_beside_the_authors():
    line = "step:{} - timing_s/step:{} - actor/entropy:0.5 - timing_s/ref:1.0"
    given = "\n".join(line.format(step, 100.0 + step) for step in (1, 2, 9))
    printed = CliRunner().invoke(app, ["recipes", "summary", "-"], input=given).output
    assert "| s per step | 102 | 110 | 109 | 109 | 108 |" in printed  # of steps 1 and 2
    assert "| entropy | 0.5 | 0.572 |" in printed
    assert "| s of training |  | 69.3 |" in printed  # of which the log has not all parts


PLAN = ["run", "verl", "--one-step", "--model", "qwen2.5-3b-instruct", "--method", "band-kl"]


def one_step(monkeypatch, tmp_path, text):
    """Invoke one step where it may start; verl prints this text and writes a checkpoint of 2 GB."""
    pytest.importorskip("verl", reason="needs the extra bandpo[verl]")

    def verl(command, stdout, **_):
        stdout.write(text)
        (tmp_path / "one-step/global_step_1").mkdir()
        with (tmp_path / "one-step/global_step_1/model.pt").open("wb") as file:
            file.truncate(2_000_000_000)

    data = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["?"] * 2560}), data)
    monkeypatch.setattr(gpu, "missing", lambda config: None)
    monkeypatch.setattr(gpu.subprocess, "run", verl)
    files = [f"data.train_files={data}", f"data.val_files={data}"]
    return CliRunner().invoke(app, [*PLAN, "--output-dir", str(tmp_path), *files])


def test_one_step_on_a_gpu_tells_what_the_run_will_cost(monkeypatch, tmp_path):
    line = "step:1 - perf/time_per_step:360.0 - timing_s/step:360.0 - perf/max_memory_allocated_gb:61.25\n"
    found = one_step(monkeypatch, tmp_path, line)
    assert found.exit_code == 0, found.output
    assert "| GB of GPU memory allocated, at most | 61.25 |" in found.output
    # 10 steps an epoch, 10 epochs, 8 GPUs; three checkpoints are kept
    assert "100 steps: at most 10 h, 80 GPU hours, $200 at $2.50 an hour" in found.output
    assert "2 GB a checkpoint, 6 GB for 3" in found.output
    assert list((tmp_path / "one-step").iterdir()) == [tmp_path / "one-step/log-gpu.txt"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ImportError: FlashAttention2 has been toggled on, but it cannot be used", "attn_implementation=sdpa"),
        ("(EngineCore_DP0 pid=7) torch.OutOfMemoryError: CUDA out of memory", "The rollout ran out of memory"),
        ("(WorkerDict pid=7) torch.OutOfMemoryError: CUDA out of memory.", "Training ran out of memory"),
        ("Free memory on device (9/80 GiB) on startup is less than desired GPU memory utilization", "nvidia"),
        ("ValueError: No available memory for the cache blocks. Try increasing", "no room for its cache"),
        ("RuntimeError: Engine core initialization failed. See root cause above", "vLLM did not start"),
        ("OSError: [Errno 28] No space left on device", "The disk is full"),
        ("Traceback\nKeyError: 'answer'", "It failed with: KeyError: 'answer'"),
    ],
)  # fmt: skip
def test_a_step_that_fails_says_what_to_change(monkeypatch, tmp_path, text, words):
    found = one_step(monkeypatch, tmp_path, text)
    assert isinstance(found.exception, RuntimeError)
    assert words in str(found.exception)


def test_the_plan_is_printed_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    pytest.importorskip("verl", reason="needs the extra bandpo[verl]")
    found = CliRunner().invoke(app, PLAN)
    assert "trainer.total_training_steps=1" in found.output
    assert "actor_rollout_ref.rollout.ignore_eos=true" in found.output
    assert "sees no GPU" in str(found.exception)
    assert CliRunner().invoke(app, [*PLAN, "--dry-run"]).output == found.output
