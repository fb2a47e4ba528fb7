"""Run TRL's tests of GRPO with its trainer and with `BandGRPOTrainer`, and print the tests whose outcomes differ.

    git clone --branch v1.16.0 https://github.com/huggingface/trl build/trl    # tests of the version that is installed
    python scripts/trl_suite.py build/trl build/trl-suite

The tests load tiny models, a tokenizer and prompts from the hub. This script creates random ones with the same names.
Tests of images, and of models that are not created, fail with both trainers. Takes about twenty minutes on one core.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

HUB = "trl-internal-testing"
TEST = "tests/test_grpo_trainer.py"
STOCK = """
from trl import GRPOConfig as Config, GRPOTrainer
class GRPOConfig(Config):
    def __init__(self, *args, **settings):
        super().__init__(*args, **{"bf16": False, "use_cpu": True} | settings)
"""
OURS = """
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer as GRPOTrainer
class GRPOConfig(BandGRPOConfig):
    def __init__(self, *args, epsilon=0.2, epsilon_high=None, **settings):
        method = f"FixedClip({epsilon}, {epsilon if epsilon_high is None else epsilon_high})"
        super().__init__(*args, method=method, **{"bf16": False, "use_cpu": True} | settings)
"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
LINES = [
    f"{better} is better than {worse}."
    for better, worse in [
        *(("Beautiful", "ugly"), ("Explicit", "implicit"), ("Simple", "complex"), ("Complex", "complicated")),
        *(("Flat", "nested"), ("Sparse", "dense"), ("Now", "never"), ("Practicality", "purity")),
        *(("Readable", "clever"), ("Silent", "noisy"), ("One way", "many"), ("Early", "late")),
        *(
            ("Short", "long"),
            ("Tested", "hoped for"),
            ("Plain", "fancy"),
            ("Small", "large"),
            ("Named", "numbered"),
        ),
    ]
]
MODELS = {
    "Qwen2{}-2.5": ("qwen2", "qwen2_5"),
    "Qwen3{}": ("qwen3", "qwen3"),
    "Qwen3Moe{}": ("qwen3_moe", "qwen3"),
    "Llama{}-3.2": ("llama", "qwen2_5"),
    "Mistral{}-0.2": ("mistral", "qwen2_5"),
    "Gemma2{}": ("gemma2", "qwen2_5"),
}
"""The architecture and TRL's chat template of each model, by its name on the hub."""


def make_hub(folder: Path, templates: Path) -> None:
    """Create random models, a tokenizer and prompts with the names that the tests load."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    tokenizer.add_tokens(ADDED)
    torch.manual_seed(0)
    for name, (kind, template) in MODELS.items():
        config = AutoConfig.for_model(
            kind, vocab_size=len(tokenizer.get_vocab()), num_labels=1, pad_token_id=0
        )
        config.update({"hidden_size": 16, "intermediate_size": 32, "eos_token_id": 2, "bos_token_id": None})
        config.update(
            {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 4}
        )
        config.update({"layer_types": ["full_attention"] * 2, "num_experts": 4, "num_experts_per_tok": 2})
        for head, make in (
            ("CausalLM", AutoModelForCausalLM),
            ("SequenceClassification", AutoModelForSequenceClassification),
        ):
            model_folder = folder / f"tiny-{name.format('For' + head)}"
            make.from_config(config).save_pretrained(model_folder)
            fast_tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0], padding_side="left"
            )
            fast_tokenizer.chat_template = (templates / f"{template}.jinja").read_text()
            fast_tokenizer.save_pretrained(model_folder)
    settings = []
    for name, rows in {
        "standard_prompt_only": [{"prompt": line.rsplit(" ", 2)[0]} for line in LINES],
        "conversational_prompt_only": [{"prompt": [{"role": "user", "content": line}]} for line in LINES],
    }.items():
        settings.append(f"- config_name: {name}\n  data_files:")
        for split in "train", "test":
            datasets.Dataset.from_list(rows).to_parquet(folder / "zen" / name / f"{split}.parquet")
            settings.append(f"  - split: {split}\n    path: {name}/{split}.parquet")
    (folder / "zen" / "README.md").write_text("---\nconfigs:\n" + "\n".join(settings) + "\n---\n")


def outcomes(folder: Path, checkout: Path, trainer: str) -> dict[str, str]:
    """Run the tests, and return the outcome of each.

    Args:
        folder: The working folder.
        checkout: A clone of TRL.
        trainer: The source of a module that replaces TRL's `GRPOConfig` and `GRPOTrainer` in the tests.
    """
    shutil.copytree(checkout / "tests", folder / "tests")
    test = folder / TEST
    # transformers loads a name from the working folder, not from the hub, if it is a folder there.
    test.write_text(
        test.read_text().replace(
            "from trl import GRPOConfig, GRPOTrainer", "from tried import GRPOConfig, GRPOTrainer"
        )
    )
    (folder / "tried.py").write_text(trainer)
    command = [
        sys.executable,
        "-m",
        "pytest",
        TEST,
        "-q",
        "-rA",
        "-W",
        "ignore",
        "-p",
        "no:randomly",
        "--timeout",
        "300",
    ]
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    output = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    ).stdout
    (folder / "said.txt").write_text(output)
    return {
        test: outcome
        for outcome, test in re.findall(r"^(PASSED|FAILED|ERROR|XPASS) (\S+)", output, re.MULTILINE)
    }


def main() -> None:
    checkout, build = (Path(name).resolve() for name in sys.argv[1:])
    make_hub(build / HUB, checkout / "trl" / "chat_templates")
    outcomes_by_trainer = []
    for name, trainer in ("stock", STOCK), ("ours", OURS):
        folder = build / name
        folder.mkdir()
        (folder / HUB).symlink_to(build / HUB)
        outcome_by_test = outcomes(folder, checkout, trainer)
        outcomes_by_trainer.append(outcome_by_test)
        counts = [
            f"{list(outcome_by_test.values()).count(word)} {word.lower()}"
            for word in ("PASSED", "FAILED", "ERROR")
        ]
        print(name, *counts)
    stock, ours = outcomes_by_trainer
    for test in sorted(stock):
        if ours.get(test) != stock[test]:
            print(f"{test}: {stock[test]} with TRL's trainer, {ours.get(test)} with BandGRPOTrainer")


if __name__ == "__main__":
    main()
