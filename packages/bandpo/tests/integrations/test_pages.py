"""What README and the pages print for TRL and verl."""

import json
import re
import shlex
import subprocess
import sys
from itertools import product

import pytest

from helpers.frameworks import needs
from pages import ROOT, blocks, check_python, python_blocks
from rlvet import diagnose

[FIRST_PROGRAM] = [
    block.text for block in blocks(ROOT / "README.md", "python") if "BandGRPOConfig" in block.text
]
OTHER_PROGRAMS = [one for one in python_blocks(of_frameworks=True) if one.values[1] != FIRST_PROGRAM]


@pytest.mark.parametrize(("page", "block"), OTHER_PROGRAMS)
def test_python(page, block, tmp_path, monkeypatch, capsys):
    needs("trl")
    executed = check_python(page, block, tmp_path, monkeypatch, capsys)
    if "BandGRPOConfig" in block:
        # A reader sees what a clip rule does: the ratios move, and the clip acts on some tokens.
        assert not [text for text in executed.warnings if "no clip rule can act" in text]
        log = executed.names["trainer"].state.log_history
        clipped = [row[name] for row in log for name in ("audit/clip_high", "audit/clip_low") if name in row]
        assert max(clipped) > 0


@pytest.fixture(scope="module")
def first_program(tmp_path_factory):
    """What README's program did as it is printed, its folder, what it said, and its processor time in seconds."""
    needs("trl")
    folder = tmp_path_factory.mktemp("first")
    command = [sys.executable, "-c", f"{FIRST_PROGRAM}\nimport time\nprint(time.process_time())"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    [state] = folder.glob("runs/example/checkpoint-*/trainer_state.json")
    log = json.loads(state.read_text())["log_history"]
    return [row for row in log if "grad_norm" in row], folder / "runs/example", run.stderr, run.stdout


@pytest.mark.slow
def test_the_first_program_shows_what_a_clip_does(first_program):
    """There are enough rare winners, and updates in which something happens."""
    updates, folder, _, printed = first_program
    assert sum(row.get("audit/tokens_positive_below_0.1", 0) for row in updates) >= 100
    with_gradient = [row for row in updates if row["grad_norm"] > 0]
    assert len(with_gradient) / len(updates) >= 0.8
    clipped = [row for row in updates if row["audit/inert"] < 1]
    assert len(clipped) / len(updates) >= 0.2
    # Under a minute of one quiet core. Beside other processes the same work takes more processor time, too.
    assert float(printed.splitlines()[-1]) < 120
    # Ten batches are too few for a verdict. What can be tested is in order.
    assert not diagnose(folder).is_at_least("look")


NUMBER = re.compile(r"(?<![\w.])[\d,]+(?= rare winners| %)")


@pytest.mark.slow
def test_the_first_program_ends_in_the_lines_that_readme_shows(first_program):
    """Numbers of another machine may differ, as its rounding leads to other answers."""
    [shown] = [block.text for block in blocks(ROOT / "README.md", "text") if "rare winners" in block.text]
    _, _, errors, _ = first_program
    said = errors.splitlines()[-3:]
    assert [NUMBER.sub("N", line) for line in said] == [NUMBER.sub("N", line) for line in shown.splitlines()]
    (count, *shares), (count_shown, *shares_shown) = (
        [int(number.replace(",", "")) for number in NUMBER.findall("\n".join(lines))]
        for lines in (said, shown.splitlines())
    )
    assert count == pytest.approx(count_shown, rel=0.3)
    assert shares == pytest.approx(shares_shown, abs=20)


@pytest.mark.slow
def test_one_more_command_says_which_kinds_of_tokens_the_clip_drops(first_program):
    """The page on the audit shows how its output begins."""
    _, folder, errors, _ = first_program
    program, *arguments = errors.splitlines()[-1].partition("more: ")[2].split()
    command = [sys.executable, "-m", program, *arguments]
    output = subprocess.run(command, cwd=folder.parents[1], capture_output=True, text=True, check=True).stdout
    [shown] = [block.text for block in blocks(ROOT / "docs/audit.md", "text") if "rare winners" in block.text]
    said = [
        re.sub(r"\b(some|much|little)\b", "AMOUNT", NUMBER.sub("N", line)) for line in output.splitlines()
    ]
    for line in shown.splitlines()[:2]:
        assert re.sub(r"\b(some|much|little)\b", "AMOUNT", NUMBER.sub("N", line)) in said
    dropped = "of the rare winners' gradient that clip 0.2 would have dropped"
    assert re.search(f"{dropped}, .* was on first tokens of an answer", output)
    assert "the tokens of whose gradient" in output
    assert "first tokens of an answer" in output
    assert "shown as ids" not in output


def test_the_first_programs_use_the_rule_that_the_text_recommends():
    """In TRL, in verl, and as the rule of the row on old data in the table of what to use."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    used = re.findall(r"method=[\"'](\w+\(\))[\"']", text)
    [recommended] = re.findall(r"^\| \*\*Old.* \| `(\w+\(\))`.*\|$", text, re.M)
    assert used == [recommended] * 2


def test_the_verl_overrides_compose():
    """The two overrides as README prints them, through hydra and into verl's own config object."""
    hydra = pytest.importorskip("hydra")
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    [block] = [b for b in blocks(ROOT / "README.md", "text") if "actor_rollout_ref" in b.text]
    overrides = shlex.split(block.text)
    assert len(overrides) == 2
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides)
    loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert type(loss).__name__ == "BandPolicyLossConfig"
    assert (loss.loss_mode, loss.method) == ("band", "BandAbove()")
    assert OmegaConf.is_config(config)


@pytest.mark.slow
def test_the_verl_page_composes():
    """Its one override, with each of those that may come second, through hydra and into verl's own config object."""
    hydra = pytest.importorskip("hydra")
    from verl.utils.config import omega_conf_to_dataclass

    page = (ROOT / "docs/verl.md").read_text()
    lines = re.findall(r'^    "?(\+?actor_rollout_ref\.actor\.policy_loss\.[^"#\n]*)"?', page, re.M)
    targets, named = [x for x in lines if x[0] != "+"], [x.strip() for x in lines if x[0] == "+"]
    assert (len(targets), len(named)) == (2, 7)
    for target, second in product(targets, named):
        name, _, text = second.rpartition("policy_loss.")[2].partition("=")
        if "Audited" in target and name == "method":
            continue
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            config = hydra.compose("ppo_trainer", [target.strip(), second])
        loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
        assert type(loss).__name__ == target.strip().rpartition(".")[2]
        assert str(getattr(loss, name)).lower() == text.strip("'").lower()
