"""The change of a model's parameters by one batch under a configuration of TRL or verl, by the framework's own code.

`python packages/bandpo/tests/integrations/one_batch.py` writes the labels of the pairs of `rlvet diff`, which are in
packages/rlvet/tests/compare/pairs: whether two configurations train the same thing. The frameworks read the
configurations, not rlvet: a shell script runs in bash with a function in place of the program, and the call of
`GRPOConfig` in a Python script is executed.

The batch is fixed: for each prompt and each number of an answer, the tokens, and a reward that depends on the tokens.
Answers longer than the cap are cut. The reference and the engine are the model with noise on its parameters. The
optimizer is gradient descent with a fixed rate. So the labels depend on the loss, the advantages, the masks and the
number of updates, and not on the learning rate, the schedule or the optimizer.

- TRL: the stock `GRPOTrainer` trains on the batch, which a ``rollout_func`` returns. Its parts of a batch are not
  shuffled.
- verl: its functions compute the correction, the rewards, the advantages and `ppo_loss`, in the order of its trainer.
  The logits are divided by the temperature, as its engines do.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import yaml
from torch import Tensor

PAIRS = Path(__file__).parents[4] / "packages/rlvet/tests/compare/pairs"

EFFECT = 1e-2
"""Relative differences of the change above this one are an effect."""
EQUAL = 2e-3
"""Relative differences below this one are none. TRL adds 1e-4 to the deviation of rewards, and verl 1e-6."""
PROMPTS = 8


def words_of(script: str) -> list[str]:
    """Return the words of the training command of a shell script, as bash expands them."""
    programs = ("python", "python3", "trl", "accelerate", "torchrun")
    functions = "\n".join(f"{name}() {{ printf '%s\\0' \"$@\"; }}" for name in programs)
    environment = {"PATH": os.environ["PATH"], "HOME": "/home/user"}
    answer = subprocess.run(
        ["bash", "-c", f"{functions}\n{script}"], env=environment, check=True, capture_output=True, text=True
    )
    return answer.stdout.split("\0")[:-1]


# TRL


class _Trainer:
    """A trainer that does nothing."""

    def __init__(self, **_: Any):
        pass

    def train(self) -> None:
        """Do nothing."""


def trl_settings(file: Path) -> dict[str, Any]:
    """Return the arguments of `GRPOConfig` that a file sets."""
    from transformers import HfArgumentParser
    from trl import GRPOConfig

    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        calls: list[dict[str, Any]] = []
        names = {
            "GRPOConfig": lambda output_dir=None, **settings: calls.append(settings),
            "GRPOTrainer": _Trainer,
        }
        lines = [line for line in text.splitlines() if not line.startswith(("from ", "import "))]
        names |= {"correct": None, "load_dataset": lambda *_, **__: None}
        exec("\n".join(lines), names)
        (settings,) = calls
        return settings
    if file.suffix in (".yaml", ".yml"):
        arguments = []
        for name, value in yaml.safe_load(text).items():
            arguments += [f"--{name}", str(value)]
    else:
        arguments = words_of(text)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--output_dir", folder, "--use_cpu", "true", "--bf16", "false", "--use_vllm", "false"]
        named = {word.removeprefix("--") for word in arguments if word.startswith("--")}
        parser = HfArgumentParser(GRPOConfig)
        config, *_ = parser.parse_args_into_dataclasses(
            [*_without(arguments, ("output_dir", "use_vllm", "bf16")), *flags], return_remaining_strings=True
        )
    settings = {name: getattr(config, name) for name in named if hasattr(config, name)}
    if "use_vllm" in named:
        settings["use_vllm"] = True
    return settings


def _without(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return arguments without some flags and their values."""
    kept = []
    skipping = False
    for word in arguments:
        if word.startswith("--"):
            skipping = word.removeprefix("--") in names
        if not skipping:
            kept.append(word)
    return kept


def trl_change(file: Path, rate: float) -> Tensor:
    """Return the change of the parameters by one batch of TRL's trainer."""
    import trl.trainer.grpo_trainer as module
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = trl_settings(file)
    uses_vllm = settings.pop("use_vllm", False)
    fixed = {
        "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "logging_strategy": "no",
        "disable_tqdm": True, "shuffle_dataset": False, "gradient_checkpointing": False, "optim": "sgd",
        "learning_rate": rate, "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.0,
        "max_grad_norm": 0.0, "disable_dropout": True,
    }  # fmt: skip
    settings = {
        name: value for name, value in settings.items() if not name.startswith(("warmup", "logging", "save"))
    }
    settings = {
        name: value
        for name, value in settings.items()
        if name not in ("num_train_epochs", "max_steps", "run_name")
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = GRPOConfig(**(settings | fixed | {"output_dir": folder}))
        updates = config.num_iterations * config.steps_per_generation / config.gradient_accumulation_steps
        assert updates == int(updates), file
        config.max_steps = int(updates)
        model = new_model()
        trainer = GRPOTrainer(
            model=model,
            args=config,
            reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts()]),
            processing_class=tokenizer(),
            rollout_func=lambda texts, trainer: _rollout(texts, config),
        )
        if trainer.ref_model is not None:
            trainer.ref_model.load_state_dict(new_model(noise_seed=1).state_dict())
        assert config.beta == 0 or trainer.ref_model is not None
        trainer.use_vllm = uses_vllm
        trainer._last_loaded_step = 0
        original = module.shuffle_sequence_dict
        module.shuffle_sequence_dict = lambda parts: parts
        before = parameters(model)
        try:
            trainer.train()
        finally:
            module.shuffle_sequence_dict = original
        assert trainer.state.global_step == updates
    return parameters(model) - before


def _rollout(texts: Sequence[str], config: Any) -> dict[str, Any]:
    """Return the fixed answers to prompts, with the engine's log-probabilities."""
    counts: dict[str, int] = {}
    answers, ids, logprobs = [], [], []
    for text in texts:
        number = counts.get(text, 0)
        counts[text] = number + 1
        prompt = prompt_ids(text)
        completion = answer(text, number, config.max_completion_length)
        answers.append(completion)
        ids.append(prompt)
        logp = log_probabilities(engine(), [prompt], [completion], config.temperature)[0]
        logprobs.append(logp[: len(completion)].tolist())
    return {"prompt_ids": ids, "completion_ids": answers, "logprobs": logprobs}


# verl


def verl_config(file: Path) -> Any:
    """Return the complete configuration of a shell script that runs verl, or of a YAML file."""
    import verl
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    overrides: list[str] = []
    if file.suffix == ".sh":
        overrides = [
            word
            for word in words_of(file.read_text(encoding="utf-8"))
            if "=" in word and not word.startswith("-")
        ]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(verl.__path__[0]) / "trainer/config"), version_base=None):
        config = compose("ppo_trainer", overrides)
    if file.suffix != ".sh":
        config = OmegaConf.merge(config, OmegaConf.load(file))
    return config


def verl_change(file: Path, rate: float) -> Tensor:
    """Return the change of the parameters by one batch of verl's functions."""
    import numpy as np
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils import tensordict_utils
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    config = verl_config(file)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout = config.actor_rollout_ref.rollout
    algorithm = config.algorithm
    texts = [text for text in prompts()[: config.data.train_batch_size] for _ in range(rollout.n)]
    inputs = [prompt_ids(text) for text in texts]
    outputs = [
        answer(text, index % rollout.n, config.data.max_response_length) for index, text in enumerate(texts)
    ]
    mask = _padded(outputs)[1]
    model = new_model()
    before = parameters(model)
    temperature = rollout.temperature
    old = log_probabilities(model, inputs, outputs, temperature)
    engine_logp = log_probabilities(engine(), inputs, outputs, temperature)
    scores = torch.zeros(mask.shape)
    for row, ids in enumerate(outputs):
        scores[row, len(ids) - 1] = reward(ids)
    bypass = algorithm.rollout_correction.bypass_mode
    tensors = {
        "old_log_probs": engine_logp if bypass else old,
        "response_mask": mask.long(),
        "token_level_scores": scores,
        "token_level_rewards": scores.clone(),
        "ref_log_prob": log_probabilities(new_model(noise_seed=1), inputs, outputs, temperature),
    }
    if rollout.calculate_log_probs:
        tensors["rollout_log_probs"] = engine_logp
    data = DataProto.from_dict(tensors, non_tensors={"uid": np.array(texts, dtype=object)})
    with contextlib.redirect_stdout(io.StringIO()):
        if algorithm.use_kl_in_reward:
            data, _ = apply_kl_penalty(
                data, core_algos.get_kl_controller(algorithm.kl_ctrl), algorithm.kl_penalty
            )
        if "rollout_log_probs" in data.batch and not bypass:
            data, _ = compute_rollout_correction_and_add_to_batch(data, algorithm.rollout_correction)
        data = compute_advantage(
            data, algorithm.adv_estimator, algorithm.gamma, algorithm.lam, rollout.n,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo, config=algorithm,
        )  # fmt: skip
    names = ["response_mask", "old_log_probs", "advantages", "ref_log_prob"]
    names += ["rollout_is_weights"] if "rollout_is_weights" in data.batch else []
    size = actor.ppo_mini_batch_size * rollout.n
    for _ in range(actor.ppo_epochs):
        for start in range(0, len(outputs), size):
            rows = range(start, min(start + size, len(outputs)))
            lengths = [len(outputs[row]) for row in rows]
            logits_inputs = [inputs[row] for row in rows], [outputs[row] for row in rows]
            logp, entropy = log_probabilities(model, *logits_inputs, temperature, gradient=True)
            part = {name: _nested(data.batch[name][list(rows)], lengths) for name in names}
            part["prompts"] = _nested(torch.ones(len(rows), 2, dtype=torch.long), [2] * len(rows))
            part["responses"] = _nested(torch.ones(len(rows), max(lengths), dtype=torch.long), lengths)
            batch = TensorDict(part, batch_size=[len(rows)])
            tokens = int(data.batch["response_mask"][list(rows)].sum())
            tensordict_utils.assign_non_tensor(
                batch, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(rows)
            )
            output = {"log_probs": _packed(logp, lengths)}
            if actor.entropy_coeff:
                output["entropy"] = _packed(entropy, lengths)
            loss, _ = ppo_loss(actor, output, batch)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= rate * parameter.grad
    return parameters(model) - before


def _nested(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    cut = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return torch.nested.as_nested_tensor(cut, layout=torch.jagged)


def _packed(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return values of answers as verl's engine does: that of a token is before the token, and a prompt has two."""
    zero = torch.zeros(1)
    rows = [torch.cat([zero, row[:length], zero]) for row, length in zip(values, lengths, strict=True)]
    return torch.cat(rows)


# The batch and the models


@functools.cache
def tokenizer() -> Any:
    """Return the tokenizer of the embedded model."""
    from transformers import AutoTokenizer

    from bandpo_lab.tasks import multiplication

    return AutoTokenizer.from_pretrained(multiplication.base_model_path(), padding_side="left")


def new_model(noise_seed: int = 0) -> Any:
    """Return the embedded model, with noise on its parameters if a seed is given."""
    from transformers import AutoModelForCausalLM

    from bandpo_lab.tasks import multiplication

    model = AutoModelForCausalLM.from_pretrained(multiplication.base_model_path(), dtype=torch.float32)
    if noise_seed:
        generator = torch.Generator().manual_seed(noise_seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.1 * parameter.std() * noise
    return model.train()


@functools.cache
def engine() -> Any:
    """Return the model that stands for the engine's probabilities."""
    return new_model(noise_seed=2)


@functools.cache
def prompts() -> list[str]:
    """Return prompts of the same number of tokens."""
    from bandpo_lab.tasks import multiplication

    texts = list(dict.fromkeys(row["prompt"] for row in multiplication.dataset("train", 200)))
    length = len(prompt_ids(texts[0]))
    return [text for text in texts if len(prompt_ids(text)) == length][:PROMPTS]


def prompt_ids(text: str) -> list[int]:
    """Return the tokens of a prompt."""
    return tokenizer()(text)["input_ids"]


def answer(text: str, number: int, cap: int) -> list[int]:
    """Return an answer to a prompt: 3 to 16 tokens, the last of which ends it, cut at the cap."""
    generator = torch.Generator().manual_seed(crc32(f"{text} {number}".encode()))
    length = int(torch.randint(3, 17, (1,), generator=generator))
    digits = tokenizer().convert_tokens_to_ids(list("0123456789"))
    picks = torch.randint(len(digits), (length - 1,), generator=generator).tolist()
    return [*(digits[pick] for pick in picks), tokenizer().eos_token_id][:cap]


def reward(ids: Sequence[int]) -> float:
    """Return a reward that depends on the tokens of an answer."""
    return crc32(bytes(index % 256 for index in ids)) % 97 / 97


def parameters(model: Any) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def _padded(outputs: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, outputs))
    ids = torch.full((len(outputs), longest), tokenizer().pad_token_id)
    mask = torch.zeros(len(outputs), longest, dtype=torch.bool)
    for row, output in enumerate(outputs):
        ids[row, : len(output)] = torch.tensor(output)
        mask[row, : len(output)] = True
    return ids, mask


def log_probabilities(
    model: Any,
    inputs: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    temperature: float,
    gradient: bool = False,
) -> Any:
    """Return the log-probabilities of answers, (rows, longest); with ``gradient`` also the entropies."""
    ids, mask = _padded(outputs)
    prompts_part = torch.tensor(inputs)
    attention = torch.cat([torch.ones_like(prompts_part), mask.long()], dim=1)
    with torch.set_grad_enabled(gradient):
        logits = model(input_ids=torch.cat([prompts_part, ids], dim=1), attention_mask=attention).logits
        logps = (logits[:, prompts_part.shape[1] - 1 : -1] / temperature).log_softmax(-1)
        chosen = logps.gather(2, ids[..., None])[..., 0]
    return (chosen, -(logps.exp() * logps).sum(-1)) if gradient else chosen


# Labels


def change(file: Path, rate: float) -> Tensor:
    """Return the change of the parameters by one batch under a configuration."""
    is_verl = "actor_rollout_ref" in file.read_text(encoding="utf-8")
    return verl_change(file, rate) if is_verl else trl_change(file, rate)


def difference(folder: Path) -> float:
    """Return the relative difference of the changes under the two configurations of a pair."""
    rate = json.loads((folder / "pair.json").read_text())["rate"]
    first, second = (change(next(folder.glob(f"{name}.*")), rate) for name in "ab")
    assert first.norm() > 0
    return ((first - second).norm() / max(first.norm(), second.norm())).item()


def label(figure: float) -> str:
    """Return ``same`` or ``different`` for a relative difference.

    Raises:
        ValueError: if it is neither.
    """
    if figure < EQUAL:
        return "same"
    if figure > EFFECT:
        return "different"
    raise ValueError(f"a difference of {figure:.3g} is neither none nor an effect")


def main(names: Sequence[str]) -> None:
    """Write the label of each pair, or print those of the named ones."""
    for folder in sorted(PAIRS.iterdir()):
        if names and folder.name not in names:
            continue
        figure = difference(folder)
        print(
            f"{folder.name:32} {figure:.2e} {label(figure) if not EQUAL <= figure <= EFFECT else '?'}",
            flush=True,
        )
        file = folder / "pair.json"
        pair: dict[str, Any] = json.loads(file.read_text())
        if not EQUAL <= figure <= EFFECT:
            pair = pair | {"label": label(figure), "difference": float(f"{figure:.2g}")}
        file.write_text(json.dumps(pair, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
