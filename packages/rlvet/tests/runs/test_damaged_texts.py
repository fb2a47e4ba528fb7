"""Damage to consoles, tables, archives, configurations and linted files ends in a result or in one line.

These files have no digests, so a changed digit is not noticed. test_damaged_logs.py and test_damaged_records.py have
the other kinds of file.
"""

import gzip
import json
import random
import warnings
from collections import Counter

import pytest
from test_consoles import areal, nemo_rl, openrlhf, prime_rl, roll, skyrl, slime

from helpers.damage import damaged, read_with_limits
from rlvet import diagnose
from rlvet.errors import InvalidValue
from rlvet.lint.checks import lint_file


@pytest.fixture(autouse=True)
def _limits(request, monkeypatch):
    """Read in a process with limits, as the commands do, in the tests that run at night."""
    if request.node.get_closest_marker("exhaustive"):
        read_with_limits(monkeypatch)


STEPS = range(1, 25)
ROWS = [{"step": step, "reward": 0.01 * step, "entropy": 1.0, "kl": 0.01} for step in STEPS]
TRL = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "learning_rate": 1e-6, "num_generations": 8}
VERL = {
    "actor_rollout_ref": {
        "actor": {"clip_ratio": 0.2, "policy_loss": {"loss_mode": "vanilla"}, "optim": {"lr": 1e-6}},
        "rollout": {"n": 8, "temperature": 1.0},
    },
    "data": {"train_batch_size": 64},
}


def verl(step):
    return f"(TaskRunner pid=1) step:{step} - actor/entropy:0.5 - critic/rewards/mean:{0.01 * step}\n"


def trl(step):
    return (
        f"{{'loss': 0.1, 'grad_norm': 0.25, 'reward': {0.01 * step}, 'entropy': 0.5, 'epoch': {step / 24}}}\n"
    )


def table(step):
    return (
        f"| {step} | {0.01 * step} | 0.5 |\n" if step > 1 else "| step | reward | entropy |\n|---|---|---|\n"
    )


def log_text(text):
    return lambda folder: write(folder / "train.log", text.encode(), diagnose)


def write(file, content, read):
    file.write_bytes(content)
    return file, read


def archive(folder):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    return write(folder / "metrics.jsonl.gz", gzip.compress(lines.encode(), mtime=0), diagnose)


def beside_a_log(name, content):
    """Write a configuration beside a log, which is diagnosed with it."""

    def written(folder):
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return write(folder / name, content.encode(), lambda file: diagnose(file.parent))

    return written


def linted(name, content):
    return lambda folder: write(folder / name, content.encode(), lambda file: lint_file(str(file)))


def yaml_of(config, depth=0):
    lines = []
    for key, value in config.items():
        if isinstance(value, dict):
            lines += [f"{'  ' * depth}{key}:", *yaml_of(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{key}: {value}")
    return lines


def flags(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flags(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value}"


SCRIPT = 'LR=1e-6\nARGS=(\n  data.train_batch_size=64  # rows\n)\npython3 -m verl.trainer.main_ppo "${ARGS[@]}" \\\n  '
SCRIPT += " \\\n  ".join(flags(VERL)) + " \\\n  actor_rollout_ref.actor.optim.lr=$LR $((1 + 2)) $(date)\n"
PYTHON = "from trl import GRPOConfig\nsettings = {'beta': 0.0}\nargs = GRPOConfig(**settings, "
PYTHON += ", ".join(f"{key}={value!r}" for key, value in TRL.items()) + ")\nargs.num_iterations = 2 * 1\n"
TOML = 'seq_len = 2048\n[trainer.loss]\ntype = "default"\nkl_tau = 1e-3\n[trainer.optim]\nlr = 1e-6\n'

KINDS = {
    **{
        f"console of {one.__name__}": log_text("".join(map(one, STEPS)))
        for one in (areal, nemo_rl, openrlhf, prime_rl, roll, skyrl, slime, verl, trl)
    },
    "table": log_text("".join(map(table, STEPS))),
    "archive": archive,
    "config.yaml of TRL": beside_a_log("config.yaml", "\n".join(yaml_of(TRL))),
    "config.yaml of verl": beside_a_log("config.yaml", "\n".join(yaml_of(VERL))),
    "trainer.toml": beside_a_log("trainer.toml", TOML),
    "trainer.json": beside_a_log(
        "trainer.json", json.dumps({"loss": {"kl_tau": 1e-3, "dppo_mask_low": 0.2}})
    ),
    "adapter_config.json": beside_a_log("adapter_config.json", json.dumps({"r": 8, "peft_type": "LORA"})),
    "linted YAML": linted("run.yaml", "\n".join(yaml_of(VERL))),
    "linted TOML": linted("run.toml", TOML),
    "linted shell script": linted("run.sh", SCRIPT),
    "linted Python": linted("run.py", PYTHON),
    "linted JSON": linted("run.json", json.dumps(VERL)),
}
"""For each kind of file a function that writes one to a folder, and returns it with its reader."""


def check_damages(kind, folder, count):
    file, read = KINDS[kind](folder)
    content = file.read_bytes()
    assert str(read(file))
    outcomes = Counter()
    for seed in range(count):
        file.write_bytes(damaged(content, random.Random(seed)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = None
            try:
                str(read(file))
            except InvalidValue as error:
                said = str(error)
        outcomes["read" if said is None else "refused"] += 1
        assert "\n" not in (said or ""), (seed, said)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_text_gives_no_traceback(kind, tmp_path):
    assert check_damages(kind, tmp_path, 200).total() == 200


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_damages_of_a_text(kind, tmp_path):
    assert check_damages(kind, tmp_path, 2000).total() == 2000
