"""Run the first hour on one GPU: check it, then train a 1.5B model with four rules and two seeds, with checks.

    python scripts/first_hour.py --dry-run      # the plan, with times: `make first-hour FIRST_HOUR=--dry-run`
    python scripts/first_hour.py                # `make first-hour`; needs a GPU of 80 GB, verl and vLLM
    python scripts/first_hour.py --rehearse     # the same plan on a CPU: small models, one step each
    python scripts/first_hour.py --small        # twelve minutes with SmolLM2, without a network, see one_card.py
    python scripts/first_hour.py --page         # update the table of the plan's page

The script stops at the first stage that fails, and prints what to do. Stages that passed are not repeated.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from bandpo_lab.cluster.cost import PARAMETERS, estimated_step
from marked import write_between_marks
from one_card import measured_rows, read_rows, small_plan, small_table
from stages import Stage, Steps, plan_rows, run_stages, table_rows

ROOT = Path(__file__).parents[1]
MEASURED = "research/results/one-card/rows.jsonl.gz"
"""The rows of the stages that ran on a GPU."""
MODEL = "deepseek-r1-distill-qwen-1.5b"
METHODS = {
    "grpo": "FixedClip(0.2, 0.2)",
    "clip-0.8-2": "FixedClip(0.2, 1.0)",
    "band-above": "BandAbove()",
    "bandpo": "BandPO()",
}
"""GRPO's clip, the fixed interval [0.8, 2], and the two Bands."""
SEEDS = (0, 1)
PROMPTS, SAMPLES, UPDATES, STEPS = 16, 8, 4, 8
RESPONSE_TOKENS, LONGEST = 700, 2048
"""The tokens of a response to a problem of GSM8K: the assumed mean, and the maximum."""
START = 120
"""The assumed seconds for the start of Ray, the model and vLLM."""
SLOW = 3.0
"""The ratio to the expected time above which a step is reported as too slow."""


def expected_step() -> float:
    """Estimate the seconds of a step from the authors' logs. Small batches use a GPU less efficiently than theirs."""
    return estimated_step(PARAMETERS[MODEL][0], RESPONSE_TOKENS, PROMPTS * SAMPLES, gpus=1).step


def plan(data: Path, output: Path, steps: int = STEPS, rehearse: bool = False) -> list[Stage]:
    """Return all stages in order.

    Args:
        data: Folder of model and data.
        output: Folder for runs.
        steps: Steps of each training.
        rehearse: If True, each training is a rehearsal on the CPU, and stages that need a GPU or a hub are left out.
    """
    lab = (sys.executable, "-m", "bandpo_lab")
    trainings = [
        training(name, method, seed, data, output, steps, rehearse)
        for seed in SEEDS
        for name, method in METHODS.items()
    ]
    if rehearse:
        return trainings
    return [
        Stage(
            "preflight",
            (*lab, "preflight", "--gpus", "1", "--output-dir", str(output)),
            20,
            "READY; lines that begin with `look` are to be read",
            "each line that begins with `stop` says what to do",
        ),
        Stage(
            "gpu-check",
            ("make", "gpu-check", f"PYTHON={sys.executable}"),
            16 * 60,
            "a table of times and errors for each section, in `research/reports/benchmarks.md`",
            "a failed section has its traceback; one without its package is skipped. The other stages do not need it: "
            "`--without gpu-check`",
        ),
        Stage(
            "setup",
            (*lab, "setup", "--model", MODEL, "--data", str(data), "--output-dir", str(output)),
            180,
            "progress bars for 3.6 GB of weights and for the sets, then `export BANDPO_DATA=…`",
            "the same command goes on where it stopped; without a hub, copy the folder of the model and name it",
        ),
        Stage(
            "data",
            (*lab, "data", "prepare", "gsm8k-train", "gsm8k", "--output-dir", str(data), "--overwrite"),
            20,
            "up to 7,473 rows for training and 1,319 for evaluation",
            "`gsm8k-train=FILE.jsonl gsm8k=FILE.jsonl` takes files of yours",
        ),
        *trainings,
    ]


def training(
    name: str, method: str, seed: int, data: Path, output: Path, steps: int, rehearse: bool
) -> Stage:
    """Return the training by one rule with one seed."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    # A clip rule does not set the loss aggregation, so all four methods get the same one.
    words = ["--model", MODEL, "--method", method, "--data", str(data), "--output-dir", str(output)]
    words += [
        f"trainer.experiment_name={name}-{seed}",
        f"data.train_files=[{data / 'verl/gsm8k-train.parquet'}]",
        f"data.val_files=[{data / 'verl/gsm8k.parquet'}]",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_response_length={LONGEST}",
        f"data.seed={seed}",
        f"{actor}.data_loader_seed={seed}",
        f"{actor}.ppo_mini_batch_size={PROMPTS // UPDATES}",
        f"{actor}.policy_loss.average=seq-mean-token-mean",
        f"{actor}.fsdp_config.seed={seed}",
        # One GPU holds all of the model's 29 GB of weights and Adam's moments, beside vLLM.
        f"{actor}.ppo_max_token_len_per_gpu=8192",
        f"{rollout}.gpu_memory_utilization=0.4",
        "actor_rollout_ref.ref.fsdp_config.param_offload=true",
        f"{rollout}.seed={seed}",
        f"{rollout}.n={SAMPLES}",
        f"{rollout}.val_kwargs.n=1",
        f"{rollout}.calculate_log_probs=true",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    ]
    if importlib.util.find_spec("flash_attn") is None:
        words.append("+actor_rollout_ref.model.override_config.attn_implementation=sdpa")
    command = (sys.executable, "-m", "bandpo_lab", "run", "verl", *words)
    if rehearse:
        return Stage(
            f"{name}-{seed}", (*command, "--rehearse"), 60, "`REHEARSAL PASSED`", "it names the part at fault"
        )
    return Stage(
        f"{name}-{seed}",
        command,
        START + steps * expected_step(),
        f"{steps} steps of about {expected_step():.0f} s; a gradient and a reward above 0; probabilities of vLLM that "
        "stay as near to the trainer's as in step 1",
        "its log says which of these it was",
        lambda metrics_by_step: fault(metrics_by_step, steps, expected_step()),
    )


def fault(metrics_by_step: Steps, steps: int, seconds: float) -> str | None:
    """Return the fault of a training with advice, or None.

    Args:
        metrics_by_step: The metrics of each step.
        steps: The planned number of steps.
        seconds: The expected seconds of a step.
    """
    missing = sorted({*range(1, steps + 1)} - metrics_by_step.keys())
    if missing:
        return (
            f"step {missing[0]} was not made: read the end of the log; `bandpo-lab run verl --one-step` knows the "
            "usual errors of vLLM and of memory"
        )
    for step, metrics in sorted(metrics_by_step.items()):
        gradient = metrics.get("actor/grad_norm", math.nan)
        if not math.isfinite(gradient):
            return f"the gradient of step {step} is {gradient}: `rlvet diagnose` on the log says where that began"
    if all(metrics["actor/grad_norm"] == 0 for metrics in metrics_by_step.values()):
        return "every gradient is 0: all answers to a prompt have the same reward; look at the responses"
    if all(metrics.get("critic/score/mean", 0.0) <= 0 for metrics in metrics_by_step.values()):
        return (
            "no answer was right: responses are cut off (`response_length/clip_ratio`), or the prompt does not ask for "
            "the box that the reward reads"
        )
    differences = [
        metrics.get("training/rollout_probs_diff_mean", math.nan)
        for _, metrics in sorted(metrics_by_step.items())
    ]
    too_large = [value for value in differences if not value <= 3 * differences[0]]  # includes NaN
    if too_large:
        return (
            f"vLLM's probabilities were {differences[0]:.2g} from the trainer's in step 1 and {too_large[0]:.2g} later"
            ": the new weights do not reach it; try actor_rollout_ref.rollout.enforce_eager=true"
        )
    # The first step includes compilation.
    step_seconds = fmean(
        metrics["timing_s/step"] for step, metrics in metrics_by_step.items() if step > 1 or steps == 1
    )
    if step_seconds > SLOW * seconds:
        stages = {
            name.removeprefix("timing_s/"): fmean(
                metrics.get(name, 0.0) for metrics in metrics_by_step.values()
            )
            for name in ("timing_s/gen", "timing_s/ref", "timing_s/old_log_prob", "timing_s/update_actor")
        }
        longest = max(stages, key=lambda name: stages[name])
        return (
            f"a step took {step_seconds:.0f} s and {seconds:.0f} s were expected, most of it {longest}: "
            "another process on the GPU (nvidia-smi), sdpa in place of flash-attn, "
            "or longer responses (`response_length/mean`)"
        )
    return None


COLUMNS = {
    "s per step": ("timing_s/step",),
    "reward": ("critic/score/mean",),
    "entropy": ("actor/entropy",),
    "clipped, A > 0": ("actor/clip_high",),
    "clipped, A < 0": ("actor/clip_low",),
    "GB": ("actor/perf/max_memory_allocated_gb", "perf/max_memory_allocated_gb"),
}
"""The columns of the table at the end: seconds, reward, entropy, and the shares of tokens clipped."""


def comparison_rows(runs: Mapping[str, Steps]) -> list[str]:
    """Return the rows of a table of the trainings."""
    return table_rows(runs, COLUMNS)


def main(arguments: list[str] | None = None) -> int:
    """Print the plan, or run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="Print the plan alone.")
    parser.add_argument(
        "--rehearse", action="store_true", help="Rehearse each training on this machine's CPU."
    )
    parser.add_argument(
        "--small", action="store_true", help="Twelve minutes with SmolLM2, without a network."
    )
    parser.add_argument("--page", action="store_true", help="Write the plan into its page.")
    parser.add_argument(
        "--steps", type=int, help=f"Steps of each training, by default {STEPS}; not with --small."
    )
    parser.add_argument(
        "--trl-python", default=sys.executable, help="The Python with TRL, for --small; by default this one."
    )
    parser.add_argument("--without", action="append", default=[], help="A stage to leave out; repeatable.")
    parser.add_argument("--data", type=Path, default=Path("data"), help="Folder of model and data.")
    parser.add_argument(
        "--output-dir", type=Path, help="Folder for runs and logs, by default runs/first-hour."
    )
    options = parser.parse_args(arguments)
    name = "one-card" if options.small else "first-hour"
    data, output = options.data.resolve(), (options.output_dir or Path("runs") / name).resolve()
    if options.small:
        if options.steps is not None:
            parser.error("--steps is not an option of --small, whose steps fill twelve minutes")
        if shutil.which(options.trl_python) is None:
            parser.error(f"--trl-python {options.trl_python}: there is no such Python")
        stages = small_plan(data, output, options.trl_python, options.rehearse)
    else:
        stages = plan(data, output, options.steps or STEPS, options.rehearse)
    unknown = {*options.without} - {stage.name for stage in stages}
    if unknown:
        parser.error(
            f"--without {', '.join(sorted(unknown))}: the stages are {', '.join(s.name for s in stages)}"
        )
    stages = [stage for stage in stages if stage.name not in options.without]
    if options.page:
        if not options.small:
            write_between_marks(ROOT / "research/reports/recipes.md", "first hour", plan_rows(stages))
            return 0
        page = ROOT / "research/reports/one-card.md"
        write_between_marks(page, "twelve minutes", plan_rows(stages))
        write_between_marks(page, "measured on one card", measured_rows(read_rows(ROOT / MEASURED)))
        return 0
    if options.dry_run:
        print("\n".join([*plan_rows(stages), "", *(shlex.join(stage.command) for stage in stages)]))
        return 0
    return run_stages(stages, output, small_table if options.small else comparison_rows)


if __name__ == "__main__":
    sys.exit(main())
