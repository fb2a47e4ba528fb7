"""Run a command for each statement, figure and feature of the BandPO paper and its repository, and write the report.

    python scripts/mission.py [NUMBER ...]

Replaces the rows in the table of research/reports/mission.md, with numbers only these. What a row needs and
cannot have here, such as a GPU, stands in its last column in place of an outcome.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from bandpo_lab.cli.recipes import SHIPPED
from marked import write_between_marks

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "research/reports/mission.md"
CORE = "packages/bandpo/tests/core"
RUN = "bandpo-lab run verl --model qwen2.5-3b-instruct --method"
FIGURES = f"PYTHONPATH={ROOT}/scripts:{ROOT}/research python -c"
TIMEOUT = 900
"""Seconds that a command may take."""


class Row(NamedTuple):
    """A statement, and the command that shows it."""

    statement: str
    command: str = ""
    """A line of bash; empty if the row cannot be run here."""
    prints: str = ""
    """A regular expression of what it prints."""
    status: int = 0
    note: str = ""
    """A remark beside the outcome: the difference or the gap here, and its reason."""


def run_tests(path: str, chosen: str = "", marks: str = "") -> str:
    """Return the command that runs tests of the repository."""
    words = [f"cd {ROOT} && python -m pytest -n 0 -q {path}"]
    words += [f"-k '{chosen}'"] if chosen else []
    words += [f"-m '{marks}'"] if marks else []
    return " ".join(words)


def bounds(divergence: str) -> str:
    """Return the command that prints the bounds of p = 0.08 and 0.9 for a divergence with radius 0.05."""
    return f"bandpo bounds 0.08 0.9 --divergence {divergence} --radius 0.05 --json"


EVERY_RULE = """python - <<'END'
from typer.testing import CliRunner
from bandpo_lab.cli.app import app
from variants import names
pairs = [(model, rule) for model in names("model") for rule in names("rule")]
for model, rule in pairs:
    words = ["run", "verl", "--model", model, "--method", rule, "--settings", "authors", "--dry-run"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0 and "verl.trainer.main_ppo" in result.output, result.output
print(f"{len(pairs)} of {len(pairs)} commands composed")
END"""
FLOW = "packages/bandpo-lab/tests/recipes/test_flow.py"
PASSED = r"\d+ passed.*?(?= in )"

ROWS = [
    Row("a token of p = 0.08 may gain 0.016 under a clip of 1.2", "bandpo bounds 0.08", r"0\.08 .*1\.28"),
    Row("KL: bounds by finding roots", bounds("KL"), r"\[[\d.]+, 2\.41\d+\]"),
    Row("total variation: 1 ± δ/p", bounds("TotalVariation"), r"\[0\.37\d+, 1\.62\d+\]"),
    Row("Pearson χ²: 1 ± √(δ(1 − p)/p)", bounds("PearsonChi2"), r"\[[\d.]+, 1\.758\d+\]"),
    Row("simplex: r ≤ 1/p", "bandpo bounds 0.999 --json", r"\[[\d.]+, 1\.00\d+\]"),
    Row(
        "bounds widen as p falls and tighten as it rises",
        run_tests(f"{CORE}/test_bounds.py", "monotone_in_radius_and_probability"),
        PASSED,
    ),
    Row("an f-divergence of your own", run_tests(f"{CORE}/test_custom.py"), PASSED),
    Row(
        "the names `bandkl`, `bandtv`, `bandchi2`, `bandkl005_relax`",
        f"{RUN} bandkl005_relax --dry-run",
        r"policy_loss\.method=\S*bandkl005_relax\S*",
    ),
    Row(
        "the legacy solver `kl2clipbound`",
        note="Not included: one exact solver takes the place of both of theirs.",
    ),
    Row("`band/` copied into another project", run_tests(f"{CORE}/test_copied_folder.py"), PASSED),
    Row(
        "the surrogate min(rA, Band(r)A)",
        run_tests(f"{CORE}/test_loss.py", "gradient_is_the_textbooks"),
        PASSED,
    ),
    Row(
        "KL by bisection in parallel on CUDA, or from a lookup table",
        run_tests(f"{CORE}/test_bounds_table.py", "margins_against_the_oracle"),
        PASSED,
        note="KL takes a fixed number of steps. Tables are for divergences without a closed form, on a CPU.",
    ),
    Row(
        "the extra compute is small",
        f"python {ROOT}/benchmarks/speed.py --tokens 16384 --rounds 1 --only loss --output speed.csv",
        r"BandPO\(\).*",
        note="Milliseconds of the loss, and times those of a textbook's clip 0.2;"
        " research/reports/benchmarks.md has more.",
    ),
    Row(
        "δ = 0.05 for all models; small models need tuning",
        f"{RUN} band-kl recipe.radius=0.03 --dry-run",
        r"recipe\.radius=0\.03",
        note="The radius is one override. The claim itself was not tested.",
    ),
    Row(
        "an adaptive δ (future work)",
        run_tests("tests/test_docs.py", "write-your-own"),
        PASSED,
        note="An example to copy. What it does to learning was not measured.",
    ),
    Row(
        "other divergences: reverse KL, Jensen–Shannon; integral probability metrics (open question)",
        " && ".join(bounds(name) for name in ("ReverseKL", "JensenShannon")),
        r"Band JensenShannon.*?\]",
        note="Bounds alone: their learning was not compared. There is no integral probability metric.",
    ),
    Row("the relaxed Band", f"{RUN} band-kl-relaxed --dry-run", r"\+paper/rule=band-kl-relaxed"),
    Row(
        "mean@32 and pass@32",
        "bandpo-lab data prepare multiplication --size 8 --output-dir data"
        " && bandpo-lab eval --data data/trl/multiplication.parquet -n 32 --limit 2 --output-dir runs/eval",
        r"pass@32",
        note="With the embedded model. AMC and AIME need a hub and a GPU.",
    ),
    Row(
        "Band above GRPO and Clip-Higher on Qwen2.5-3B-Instruct, DeepSeek-R1-Distill-Qwen 1.5B and 7B, and -Llama-8B:"
        " mean@32 of 55.17 against 45.94, at least"
        " +2.0 points, pass@32 up to +28.9 %",
        note="Not run: needs eight GPUs for a day or more a model.",
    ),
    Row(
        "entropy at equal step ends near 0.2 with Band, near 0.02 with GRPO, which collapses near step 340",
        run_tests("research/tests/test_paper_setting.py", "variety"),
        PASSED,
        note="Not run at the paper's scale. The test reads our study of a small network, which does not show it.",
    ),
    Row(
        "the share of rare winners that a clip blocks is measured",
        "bandpo-lab compare 'FixedClip(0.2)' 'BandPO()' --batches 30 --output-dir runs/pair"
        " && bandpo audit runs/pair/FixedClip-0.2-seed-0",
        r"of the gradient on [\d,]+ rare winners \(p < 0\.1, A > 0\) .*",
    ),
    Row(
        "the share falls under Band",
        "bandpo audit runs/pair/BandPO-seed-0",
        r"of the gradient on [\d,]+ rare winners \(p < 0\.1, A > 0\) .*",
        note="The run of the row above.",
    ),
    Row(
        "Figure 1: the change of probability under DAPO, DCPO and BandPO",
        f"{FIGURES} 'import pictures; pictures.probability_change().savefig(\"1.png\")' && file 1.png",
        r"PNG image data, \d+ x \d+",
    ),
    Row(
        "Figure 2: clipping regions of DAPO and BandPO",
        f"{FIGURES} 'import pictures; pictures.clip_regions().savefig(\"2.png\")' && file 2.png",
        r"PNG image data, \d+ x \d+",
    ),
    Row(
        "`init.sh`: all in one step",
        "bandpo-lab setup --model qwen2.5-3b-instruct --settings authors --dry-run",
        r"\(the recipe's\)",
        note="The download itself is tested against a small hub on the same machine.",
    ),
    Row(
        "`python init.py` in the Quick Start",
        note="Not runnable: their repository has no such file. `init.sh` is meant.",
    ),
    Row("`utils/ray/initialization.sh`", "recipes/cluster.sh --dry-run head", r"ray start --head --port \d+"),
    Row(
        "`start_grpo_official.sh`, `bandpo__…bandkl005.sh`: 48 scripts",
        EVERY_RULE,
        r"\d+ of \d+ commands composed",
        note="Six models times seven rules; of two of the models the authors have no script. Trainings need eight "
        "GPUs.",
    ),
    Row(
        "the log of Ray's driver",
        "recipes/job.sh --dry-run log raysubmit_1",
        "ray job logs.*",
        note="The file is on the head, as the page says.",
    ),
    Row(
        "scripts for Slurm",
        "bash recipes/slurm.sbatch qwen2.5-3b-instruct band-kl --settings authors",
        "ray start --block",
        note="Slurm itself: a mock in the tests.",
    ),
    Row(
        "CUDA 12.4 and cuDNN without root",
        "bandpo-lab preflight",
        r"CUDA compiler:.*",
        status=1,
        note="CUDA 13 as wheels of one lock; needs a GPU to be run.",
    ),
    Row(
        "apex, Megatron, SGLang",
        f"{RUN} band-kl actor_rollout_ref.rollout.name=sglang --dry-run"
        f" && {RUN} band-kl model_engine=megatron actor_rollout_ref.actor.strategy=megatron --dry-run",
        r"model_engine=megatron",
        note="Composed; both engines need a GPU. apex is not needed.",
    ),
    Row(
        "requirements, versions in conflict",
        "bandpo-lab preflight",
        r"packages: Python \S+",
        status=1,
        note="One lock.",
    ),
    Row("W&B offline", f"{RUN} band-kl --dry-run", r"WANDB_MODE:offline"),
    Row(
        "data to verl's parquet",
        run_tests(FLOW, "flow_runs and commonsenseqa-train", "slow"),
        PASSED,
        note="From a small hub on the same machine; the real one was not accessible.",
    ),
    Row(
        "uploads to the hub",
        run_tests(FLOW, "flow_runs and upload and band-kl", "slow"),
        PASSED,
        note="To the same small hub.",
    ),
    Row(
        "help for people new to clusters",
        "bandpo-lab preflight --model qwen2.5-3b-instruct --gpus 8",
        r"STOPPED BY.*",
        status=1,
        note="With `docs/install.md`, from a bare machine to a job.",
    ),
    Row(
        "training of Qwen3-4B on Tinker",
        note="Not run: needs the package tinker and an account. `python scripts/matrix.py build/matrix tinker` tests"
        " the adapter in an environment of its own.",
    ),
    Row(
        "soft clips; cosine, polynomial, hold and restart radii; the cubic polynomial",
        run_tests(f"{CORE}/test_schedules.py", "schedules_by_hand"),
        PASSED,
        note="The linear radius alone. The others are not included: they are unpublished, or no script uses them.",
    ),
    Row(
        "filters for BGE-M3, gibberish and rambling",
        note="Not included: none is part of the paper's experiments.",
    ),
    Row("plots of time and memory", "bandpo-lab recipes summary LOG", r".*GB of GPU memory allocated.*"),
    Row(
        "citation",
        f"grep -c arXiv:2603.04918 {ROOT}/docs/paper.md",
        r"^\d+",
        note="BibTeX on the page of the paper.",
    ),
]


def make_workspace(folder: Path) -> None:
    """Write what commands start from: the recipes, and a log of verl."""
    shutil.copytree(SHIPPED, folder / "recipes")
    metrics = (
        "actor/entropy:0.5 - timing_s/step:109.0 - timing_s/gen:36.0 - perf/max_memory_allocated_gb:122.8"
    )
    (folder / "LOG").write_text("".join(f"step:{number} - {metrics}\n" for number in range(1, 31)))


def outcome_of(row: Row, folder: Path) -> str:
    """Run a row's command in a folder, and return its exit status and what it printed, or what went wrong."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}/scripts:{ROOT}/tests",
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }
    try:
        process = subprocess.run(
            ["bash", "-c", row.command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"**no end in {TIMEOUT} s**"
    printed = re.search(row.prints, process.stdout, re.M)
    if process.returncode != row.status or printed is None:
        print(process.stdout[-3000:], file=sys.stderr)
        return f"**failed**, exit {process.returncode}"
    return f"exit {process.returncode}: `{' '.join(printed[0].split())}`"


def cells(number: int, row: Row, folder: Path) -> str:
    """Run a row and return its line of the table."""
    if not row.command:
        return f"| {number} | {row.statement} | – | {row.note} |"
    command = (
        "the models and rules of the recipes, each with `--dry-run`" if row.command == EVERY_RULE else None
    )
    shown = row.command.replace(f"cd {ROOT} && ", "").replace(f"{ROOT}/", "").replace("|", "\\|")
    outcome = outcome_of(row, folder).replace("|", "\\|").replace("│", "·")
    return f"| {number} | {row.statement} | {command or f'`{shown}`'} | {outcome}. {row.note}".rstrip() + " |"


def table_lines() -> dict[int, str]:
    """Return the lines of the report's table by their numbers."""
    found = re.findall(r"^\| (\d+) \|.*$", REPORT.read_text(encoding="utf-8"), re.M)
    lines = re.findall(r"^\| \d+ \|.*$", REPORT.read_text(encoding="utf-8"), re.M)
    return dict(zip(map(int, found), lines, strict=True))


def main(numbers: list[int]) -> None:
    """Run the rows of these numbers, or all, and write the table after each."""
    with tempfile.TemporaryDirectory() as name:
        make_workspace(Path(name))
        for number in numbers or range(1, len(ROWS) + 1):
            line = cells(number, ROWS[number - 1], Path(name))
            print(line, flush=True)
            lines = table_lines() | {number: line}
            header = ["| | the paper or its repository | command | outcome |", "|---:|---|---|---|"]
            write_between_marks(REPORT, "mission", [*header, *(lines[key] for key in sorted(lines))])


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
