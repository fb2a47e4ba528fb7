"""The rule on the learning rate knows LoRA, the optimizer and the size of the model."""

import pickle
import re
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest

from pages import ROOT
from rlvet.errors import OtherFormat
from rlvet.lint.checks import lint_configurations, lint_file, lint_run_configuration
from rlvet.lint.learning_rate import billions
from rlvet.lint.readers import parse_configurations
from rlvet.runs.configs import newest_configuration

VERL = "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8"
VERL_RATE = f"{VERL} actor_rollout_ref.actor.optim.lr"
SKYRL = "uv run -m skyrl.train.entrypoints.main_base trainer.policy.optimizer_config.lr=1e-4"
OPENRLHF = "python -m openrlhf.cli.train_ppo_ray --actor.adam.lr 1e-4"
TRL = "python train.py --num_generations 8 --per_device_train_batch_size 8 --learning_rate 1e-4"
PRIME_RL = "[orchestrator]\nbatch_size = 64\ngroup_size = 8\n[trainer.optim]\nlr = 1e-4\n"


def script(config="", trainer="", before=""):
    """Return a script of TRL with some arguments of the configuration and of the trainer."""
    return f"""
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig, GRPOTrainer
import torch
{before}
args = GRPOConfig("out", learning_rate=1e-4, num_generations=8{config})
GRPOTrainer({trainer or 'model="Qwen/Qwen2.5-7B"'}, args=args, reward_funcs=len)
"""


def judgement(text, name):
    """Return "high", "fine" or "not judged": what the rule says of the configuration in a file."""
    configurations = parse_configurations(text.encode(), name)
    assert len(configurations) == 1
    report = lint_configurations(configurations, name)
    if "learning-rate" in [finding.id for finding in report.findings]:
        return "high"
    return "not judged" if "learning-rate" in [rule.id for rule in report.unchecked] else "fine"


LORA = [
    ("run.sh", f"{TRL} --use_peft"),
    ("run.sh", f"{TRL} --use_peft --lora_r 16"),
    ("run.sh", f"{TRL} --lora_rank 16 --lora_alpha 32"),
    ("run.sh", f"{TRL} --lora_r 16"),
    ("run.sh", f"{TRL} --lora_alpha 32"),
    ("run.sh", f"{TRL} --use_lora True"),
    ("run.yaml", "num_generations: 8\nuse_vllm: true\nlearning_rate: 1e-4\nlora_r: 16\n"),
    ("run.yaml", "num_generations: 8\nuse_vllm: true\nlearning_rate: 1e-4\npeft_config: {r: 16}\n"),
    ("run.sh", f"{VERL_RATE}=1e-4 actor_rollout_ref.model.lora_rank=32"),
    ("run.sh", f"{VERL_RATE}=1e-4 actor_rollout_ref.model.lora.rank=32"),
    ("run.sh", f"{VERL_RATE}=1e-4 actor_rollout_ref.model.lora_adapter_path=sft"),
    ("run.sh", f"{SKYRL} trainer.policy.model.lora.rank=32"),
    ("run.sh", f"{OPENRLHF} --ds.lora.rank 32"),
    ("run.sh", f"{OPENRLHF} --lora_rank 32"),
    (
        "run.sh",
        f"{VERL_RATE}=1e-4 +actor_rollout_ref.model.lora.rank=32 +actor_rollout_ref.model.lora.merge=true",
    ),
    ("run.sh", f"{TRL} --use_rslora True --lora_r 16"),
    ("run.sh", f"{TRL} --load_in_4bit --use_qlora"),
    ("run.sh", f"{TRL} --use_dora --lora-rank 16"),
    ("rl.toml", f"{PRIME_RL}[trainer.model.lora]\nrank = 8\n"),
    ("rl.toml", f"{PRIME_RL}[trainer.model.experimental.lora]\nrank = 8\n"),
    ("rl.toml", f"{PRIME_RL}[trainer.model.experimental.lora]\nalpha = 32\n"),
    ("rl.toml", f"{PRIME_RL}[trainer.model.experimental.lora]\n"),
    ("train.py", script(trainer='model="Qwen/Qwen2.5-7B", peft_config=LoraConfig(r=16)')),
    ("train.py", script(trainer='"Qwen/Qwen2.5-7B", peft_config=LoraConfig(r=16)')),
    ("train.py", script(trainer='model="Qwen/Qwen2.5-7B", peft_config=c', before="c = LoraConfig(r=16)")),
]
ALL_WEIGHTS = [
    ("run.sh", TRL),
    ("run.sh", f"{TRL} --use_peft False --lora_r 16"),
    ("run.sh", f"{TRL} --lora_rank 0"),
    ("run.sh", f"{VERL_RATE}=1e-4 actor_rollout_ref.model.lora_rank=0"),
    ("run.sh", f"{VERL_RATE}=1e-4 actor_rollout_ref.model.lora_rank=0 actor_rollout_ref.model.lora_alpha=16"),
    ("run.sh", f"{VERL_RATE}=1e-4 critic.model.lora_rank=32"),
    ("run.sh", f"{SKYRL} trainer.policy.model.lora.rank=0"),
    ("run.sh", f"{SKYRL} trainer.critic.model.lora.rank=32"),
    ("run.sh", f"{OPENRLHF} --ds.lora.rank 0"),
    ("rl.toml", PRIME_RL),
    ("train.py", script()),
    ("train.py", script(trainer='model="Qwen/Qwen2.5-7B", peft_config=None')),
    ("train.py", script(config=', optim="adamw_bnb_8bit"')),
    ("run.sh", f"{VERL_RATE}=1e-3 actor_rollout_ref.model.lora_rank=32"),
    ("run.sh", f"{VERL_RATE}=1e-2 actor_rollout_ref.model.path=$MODEL"),
    ("run.sh", f"{VERL_RATE}=1e-2 actor_rollout_ref.model.path=gpt2"),
    ("run.sh", f"{VERL_RATE}=1e-4 actor_rollout_ref.model.path=null"),
    ("run.sh", f"{VERL_RATE}=1e-4 actor_rollout_ref.model.path=$MODELS/Qwen2.5-7B"),
    ("run.sh", f"{VERL_RATE}=2e-5 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B"),
    ("run.sh", f"{VERL_RATE}=1e-4 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"),
]
NOT_JUDGED = [
    ("train.py", script(config=', optim="sgd"')),
    ("train.py", script(config=', optim="adafactor"')),
    ("train.py", script(config=', optim="galore_adamw"')),
    ("train.py", script(trainer='model="Qwen/Qwen2.5-7B", optimizers=(torch.optim.SGD(p), None)')),
    ("train.py", script(trainer="model=str(path())")),
    ("train.py", script(trainer="str(path()), len")),
    ("train.py", script(before="model = load()\nmodel = get_peft_model(model, c)", trainer="model=model")),
    ("run.sh", f"{TRL} --optim lion_32bit"),
    ("run.sh", f"{TRL} --lora_rank $RANK"),
    ("run.sh", f"{VERL_RATE}=1e-4 actor_rollout_ref.actor.optim.optimizer=SGD"),
    ("run.sh", f"{VERL_RATE}=1e-4 actor_rollout_ref.model.path=$MODEL"),
    # Names without a size: a model of 150,000 parameters for a test, and one of 124 million.
    ("run.sh", f"{VERL_RATE}=1e-4 actor_rollout_ref.model.path=tests/e2e/arithmetic_sequence/model"),
    ("run.sh", f"{TRL} --model_name_or_path gpt2"),
    ("run.yaml", "model_name_or_path: zai-org/GLM-4.5-Air\nnum_generations: 8\nlearning_rate: 1e-4\n"),
    ("run.sh", f"{SKYRL} trainer.policy.optimizer_config.type=muon"),
    ("run.sh", f"{OPENRLHF} --actor.optim muon"),
    ("rl.toml", PRIME_RL + 'type = "muon"\n'),
]
SMALL = [
    ("run.sh", f"{TRL} --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct"),
    ("run.sh", f"{TRL} --model_name_or_path trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"),
    ("run.sh", f"{VERL_RATE}=1e-4 actor_rollout_ref.model.path=$HOME/models/SmolLM2-135M"),
    ("run.sh", f"{VERL_RATE}=2e-5 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct"),
    ("run.yaml", "model_name_or_path: multiplication\nnum_generations: 8\nlearning_rate: 2e-4\n"),
]


@pytest.mark.parametrize(("name", "text"), LORA)
def test_rates_that_are_right_for_an_adapter(name, text):
    assert judgement(text, name) == "fine"


@pytest.mark.parametrize(("name", "text"), ALL_WEIGHTS)
def test_rates_that_are_high(name, text):
    assert judgement(text, name) == "high"


@pytest.mark.parametrize(("name", "text"), NOT_JUDGED)
def test_rates_of_which_nothing_is_known(name, text):
    assert judgement(text, name) == "not judged"


@pytest.mark.parametrize(("name", "text"), SMALL)
def test_rates_that_are_right_for_a_small_model(name, text):
    assert judgement(text, name) == "fine"


def test_the_reason_names_the_optimizer():
    (configuration,) = parse_configurations(script(config=', optim="sgd"').encode(), "train.py")
    report = lint_configurations([configuration], "train.py")
    assert "not checked, because optim is sgd, and the limits are those of Adam: learning-rate" in str(report)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("SmolLM2-135M-Instruct", 0.135),
        ("pythia-14m", 0.014),
        ("Qwen2.5-0.5B", 0.5),
        ("./models/qwen3-30b-a3b", 30),
        ("TinyLlama-1.1B", 1.1),
        ("gpt2", None),
        ("checkpoint-500", None),
    ],
)
def test_the_size_in_a_models_name(model, size):
    assert billions(model) == size


def shipped_configurations():
    """Yield the name and the text of each configuration, script and code block of the project."""
    folders = ("examples", "packages/bandpo-lab/src", "studies", "scripts", "benchmarks", "src")
    for path in [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]:
        if path.suffix in (".py", ".yaml", ".toml", ".sh"):
            yield str(path.relative_to(ROOT)), path.read_text()
    suffixes = {"python": "py", "py": "py", "sh": "sh", "bash": "sh", "yaml": "yaml", "toml": "toml"}
    for page in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "lab").rglob("*.md")),
    ]:
        blocks = re.findall(r"^```(\w+)[^\n]*\n(.*?)^```", page.read_text(), re.M | re.S)
        for number, (language, text) in enumerate(blocks):
            if language in suffixes:
                yield f"{page.relative_to(ROOT)}-{number}.{suffixes[language]}", text


def test_nothing_is_found_in_what_the_project_ships(tmp_path):
    frameworks = set()
    findings = []
    for name, text in shipped_configurations():
        file = tmp_path / re.sub(r"\W+(?!\w+$)", "_", name)
        file.write_text(text)
        try:
            report = lint_file(file)
        except OtherFormat:
            continue
        except ValueError:
            # A block of a page may be a fragment.
            assert name.startswith(("docs", "lab", "README"))
            continue
        frameworks |= {configuration.framework for configuration in report.configurations}
        findings += [(name, finding.id) for finding in report.findings if finding.severity != "note"]
    assert findings == []
    assert {"trl", "verl"} <= frameworks


@pytest.mark.parametrize(
    ("sizes", "flagged"),
    [
        # A model of 335,000 parameters, 135M and 7B in half precision, and 7B in two files.
        ({"model.safetensors": 1_340_000}, False),
        ({"model.safetensors": 270_000_000}, False),
        ({"model.safetensors": 14_000_000_000}, True),
        (
            {
                "model-00001-of-00002.safetensors": 7_000_000_000,
                "model-00002-of-00002.safetensors": 7_000_000_000,
            },
            True,
        ),
        # Weights of an adapter do not tell the size of its model.
        ({"adapter_model.safetensors": 1_340_000}, True),
        ({}, True),
    ],
)
def test_the_weights_of_a_run_tell_the_size_of_its_model(sizes, flagged, tmp_path):
    arguments = {"learning_rate": 1e-4, "num_generations": 8, "per_device_train_batch_size": 8}
    arguments |= {
        "output_dir": "out",
        "loss_type": "dapo",
        "epsilon": 0.2,
        "importance_sampling_level": "token",
    }
    with zipfile.ZipFile(tmp_path / "training_args.bin", "w") as file:
        file.writestr("training_args/data.pkl", pickle.dumps(Namespace(**arguments)))
    for name, size in sizes.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    report = lint_run_configuration(newest_configuration(tmp_path).configuration)
    assert ("learning-rate" in [finding.id for finding in report.findings]) == flagged


def test_the_folder_of_a_run_is_listed_once(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("importance_sampling_level: token\nlearning_rate: 1e-6\n")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    calls = []
    original = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: calls.append(pattern) or original(self, pattern))
    configuration = newest_configuration(tmp_path).configuration
    lint_run_configuration(configuration)
    assert len(calls) == len(set(calls))
