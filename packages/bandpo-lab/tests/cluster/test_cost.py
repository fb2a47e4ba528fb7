"""Time and memory of a run of verl, from its log."""

import re
from statistics import fmean

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from bandpo_lab.cli.app import app
from bandpo_lab.cli.preflight import saving_settings
from bandpo_lab.cluster.cost import (
    AUTHORS,
    CHECKPOINT,
    PARAMETERS,
    RUN_STEPS,
    estimate_of,
    estimated_hours,
    estimated_step,
    kept_checkpoints,
    read_steps,
)
from bandpo_lab.rehearsal import gpu
from helpers.frameworks import needs
from pages import ROOT

STEPS = [
    {"timing_s/step": 100.0, "timing_s/gen": 30.0, "perf/time_per_step": np.float64(100.0), "x/nan": np.nan},
    {"timing_s/step": 140.0, "timing_s/gen": 50.0, "perf/time_per_step": 140.0, "timing_s/save": 24},
    {"timing_s/step": 120.0, "timing_s/gen": 40.0, "perf/max_memory_allocated_gb": 61.25},
]


def log():
    """As verl's own console logger writes it, through Ray, with a step that a requeued job has done again."""
    needs("verl")
    from verl.utils.logger import aggregate_logger as logger

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


LOGGED = """
grpo        109.6 34.7 71.3 696 | 107.7 37.0 67.1 707 | 109.5 36.3 69.3 694 | 111.1 37.7 69.3 710
clip-higher 109.6 33.9 72.1 696 | 108.3 37.2 67.4 713 | 106.7 37.0 66.1 683 | 110.9 37.4 69.6 710
band-kl     108.1 34.4 69.6 696 | 109.4 38.2 66.9 709 | 107.8 36.2 67.3 702 | 110.1 37.6 68.4 719
dcpo        108.7 34.4 70.4 696 | 103.8 32.6 67.2 714 | 108.0 37.4 66.7 694 | 109.9 37.4 68.1 723
"""
"""Steps 1 to 4 that the authors logged of each rule (OpenMOSS/BandPO, baselinescripts/Qwen2.5-3B-Instruct-L4k/time):
seconds of the step, of generation, and of reference, old log-probabilities and update; and tokens of a response."""


def logged() -> dict[str, list[tuple[float, ...]]]:
    rows = [line.split(maxsplit=1) for line in LOGGED.strip().splitlines()]
    return {rule: [tuple(map(float, step.split())) for step in steps.split(" | ")] for rule, steps in rows}


def test_the_estimate_is_near_each_step_that_the_authors_logged():
    parameters, tokens = PARAMETERS["qwen2.5-3b-instruct"]
    steps = [step for rule in logged().values() for step in rule]
    assert len(steps) == 16
    for seconds, generation, training, length in steps:
        estimate = estimated_step(parameters, length)
        assert estimate.step == pytest.approx(seconds, rel=0.06)
        assert estimate.training == pytest.approx(training, rel=0.07)
        assert estimate.generation == pytest.approx(generation, rel=0.13)
    assert estimated_step(parameters, tokens).step == pytest.approx(
        fmean(step[0] for step in steps), rel=0.01
    )
    # What a run is laid beside are the means of the same steps.
    for rule, of_rule in logged().items():
        means = [fmean(column) for column in zip(*of_rule, strict=True)]
        assert means == pytest.approx(AUTHORS[rule][:4], rel=0.004)


def test_the_pages_table_of_time_and_price_is_the_estimate():
    page = (ROOT / "research/reports/recipes.md").read_text()
    row = r"\| ([\w.-]+) \| ([\d.e]+) \| (\d+) \| (\d+) \+ (\d+) s \| (\d+) h \| ([\d,]+) \| \$([\d,]+) \| (\d+) GB \|"
    rows = re.findall(row, page)
    assert len(rows) >= 5
    for model, *cells in rows:
        parameters, tokens, generation, training, hours, gpu_hours, price, size = (
            float(cell.replace(",", "")) for cell in cells
        )
        assert (parameters, tokens) == PARAMETERS[model]
        step, whole = estimated_step(parameters, tokens), estimated_hours(parameters, tokens)
        assert (generation, training, hours) == (round(step.generation), round(step.training), round(whole))
        assert gpu_hours == pytest.approx(8 * whole, abs=1)
        assert price == pytest.approx(8 * whole * 2.5, abs=10)
        assert size == round(12 * parameters / 1e9)


def test_the_pages_checkpoints_are_those_that_the_settings_keep():
    page = " ".join((ROOT / "research/reports/recipes.md").read_text().split())
    counts = {
        name: kept_checkpoints(RUN_STEPS, *saving_settings(name)) for name in ("recommended", "authors")
    }
    assert counts["recommended"] == 3
    assert "`recommended` keeps three checkpoints." in page
    parameters, _ = PARAMETERS["qwen2.5-3b-instruct"]
    size = counts["authors"] * CHECKPOINT * parameters / 1e12
    assert (
        f"`authors` keeps all {counts['authors']} of a run, which is {size:.1f} TB for the first row." in page
    )


@pytest.mark.parametrize(
    ("steps", "every", "most"),
    [(100, 20, 3), (100, 20, None), (101, 20, None), (99, 20, 0), (5, 20, 3), (40, 20, 3), (100, -1, 3)],
)
def test_as_many_checkpoints_are_kept_as_verl_writes_and_leaves(steps, every, most):
    saved = [step for step in range(1, steps + 1) if every > 0 and (step == steps or step % every == 0)]
    assert kept_checkpoints(steps, every, most) == len(saved[-most:] if most else saved)


def test_a_run_on_more_gpus_takes_less_time_and_no_less_money():
    eight, sixteen = estimate_of("qwen2.5-7b"), estimate_of("qwen2.5-7b", 16)
    assert "58 h for 769 steps, 465 GPU hours" in eight
    assert "30 h for 769 steps, 472 GPU hours" in sixteen  # what is not spread takes 4 s of each step


PLAN = ["run", "verl", "--one-step", "--model", "qwen2.5-3b-instruct", "--method", "band-kl"]


def one_step(monkeypatch, tmp_path, text):
    """Invoke one step where it may start; verl prints this text and writes a checkpoint of 2 GB."""
    needs("verl")

    def verl(command, stdout, **_):
        stdout.write(text)
        (tmp_path / "one-step/global_step_1").mkdir()
        with (tmp_path / "one-step/global_step_1/model.pt").open("wb") as file:
            file.truncate(2_000_000_000)

    data = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["?"] * 2560}), data)
    monkeypatch.setattr(gpu, "missing_on_node", lambda config: None)
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
    needs("verl")
    found = CliRunner().invoke(app, PLAN)
    assert "trainer.total_training_steps=1" in found.output
    assert "actor_rollout_ref.rollout.ignore_eos=true" in found.output
    assert "sees no GPU" in str(found.exception)
    assert CliRunner().invoke(app, [*PLAN, "--dry-run"]).stdout == found.stdout
