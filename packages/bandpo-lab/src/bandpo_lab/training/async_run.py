"""The trainer of `bandpo-lab train --async`: TRL's asynchronous one, with vLLM on a GPU or rehearsed on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoModelForCausalLM
from trl import get_peft_config, get_quantization_config

from bandpo.core.text import importable_current_folder
from bandpo.integrations.trl import BandAsyncGRPOTrainer
from bandpo_lab.errors import InvalidValue, RunProblem
from bandpo_lab.output.console import echo
from bandpo_lab.training.async_on_cpu import OldSampler, trl_on_a_cpu
from bandpo_lab.training.run_checkpoints import RunCheckpoints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from bandpo_lab.training.arguments import Arguments
    from bandpo_lab.training.async_config import AsyncTrainingConfig


class AsyncRunTrainer(RunCheckpoints, BandAsyncGRPOTrainer):
    """`BandAsyncGRPOTrainer` whose checkpoints are written atomically."""


def async_trainer(
    arguments: Arguments,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    train_set: Any,
    rewards: list[Callable[..., list[float]]],
    **settings: Any,
) -> AsyncRunTrainer:
    """Create the trainer; in a rehearsal with a sampler in this process. Use it within `async_training`.

    Args:
        arguments: The settings.
        path: The path or name of the model.
        tokenizer: The tokenizer.
        train_set: The prompts.
        rewards: The reward functions.
        **settings: Further arguments of the trainer.

    Raises:
        ValueError: A setting is one that TRL's asynchronous trainer does not have.
    """
    training: AsyncTrainingConfig = arguments.training  # type: ignore[assignment]
    check_settings(arguments, train_set)
    # TRL sets the attention itself.
    del training.model_init_kwargs["attn_implementation"]  # type: ignore[arg-type, union-attr]
    if training.rehearse:
        sampler = _sampler(training, path, tokenizer, train_set, rewards)
        settings |= {"rollout_worker": sampler, "weight_transfer": sampler}
        if training.process_index == 0:
            # A token that is sampled right before a sync waits for that many updates more.
            oldest = (cast("int", training.lag) + 1) * training.weight_sync_steps
            echo(
                f"rehearsal: this process samples, with weights of {training.lag} versions ago, in place of vLLM: "
                f"tokens are at most {oldest} updates old",
                err=True,
            )
    return AsyncRunTrainer(
        model=path,
        reward_funcs=rewards,
        args=training,
        train_dataset=train_set,
        processing_class=tokenizer,
        peft_config=get_peft_config(arguments.model),
        **settings,
    )


def check_settings(arguments: Arguments, train_set: Any) -> None:
    """Check the settings that TRL's script has and TRL's asynchronous trainer has not.

    Raises:
        ValueError: One of them is set; the message names it.
    """
    run, training, model, _ = arguments
    problem = None
    if run.reward_model_name_or_path:
        problem = "reward_model_name_or_path: TRL's asynchronous trainer has reward functions only"
    elif get_quantization_config(model) is not None:
        problem = "load_in_8bit and load_in_4bit: TRL's asynchronous trainer has no quantized weights"
    elif model.attn_implementation:
        problem = f"attn_implementation={model.attn_implementation}: TRL's asynchronous trainer has its own attention"
    elif training.eval_strategy != "no":
        problem = (
            "eval_strategy: TRL's asynchronous trainer has no evaluation; eval_every is that of bandpo-lab"
        )
    elif not hasattr(train_set, "__len__"):
        problem = "dataset_streaming: the prompts are used again and again"
    if problem:
        raise InvalidValue(f"{problem}; leave it out")
    (row,) = islice(train_set, 1)
    if isinstance(row["prompt"], str) and not training.rehearse:
        raise InvalidValue(
            f"the prompts are texts, such as {row['prompt']!r:.60}, and TRL's asynchronous trainer samples from "
            "conversations only: write each as [{'role': 'user', 'content': …}]. A rehearsal takes both"
        )


def check_gpu(training: AsyncTrainingConfig) -> None:
    """Check that there is a GPU, if the training is no rehearsal.

    Raises:
        RunProblem: There is none.
    """
    if training.rehearse or (torch.cuda.is_available() and not training.use_cpu):
        return
    raise RunProblem(
        "async: TRL's asynchronous trainer trains on one GPU with samples of a vLLM server on another "
        f"(vllm_server_base_url={training.vllm_server_base_url}), and torch {torch.__version__} sees none (nvidia-smi) "
        "or use_cpu is set: add --rehearse to train on this CPU"
    )


def _sampler(
    training: AsyncTrainingConfig,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    train_set: Any,
    rewards: list[Callable[..., list[float]]],
) -> OldSampler:
    """Return the sampler of a rehearsal, with a model of its own."""
    settings: Any = training.model_init_kwargs
    model = AutoModelForCausalLM.from_pretrained(
        path, **{name: value for name, value in settings.items() if value is not None}
    )
    prompts = training.per_device_train_batch_size * training.world_size // training.num_generations
    return OldSampler(
        model,
        tokenizer,
        train_set,
        rewards,
        lag=training.lag or 0,
        num_generations=training.num_generations,
        prompts=max(prompts, 1),
        max_new_tokens=training.max_completion_length,
        temperature=training.temperature,
        chat_template_kwargs=training.chat_template_kwargs,  # type: ignore[arg-type]
        seed=training.seed,
    )


@contextmanager
def async_training(training: AsyncTrainingConfig) -> Generator[None, None, None]:
    """Prepare this process for TRL's asynchronous trainer in the block."""
    # The reward functions are imported again in the process that samples.
    with importable_current_folder():
        if not training.rehearse:
            yield
            return
        with trl_on_a_cpu():
            yield


@contextmanager
def dense_attention(model: Any) -> Generator[None, None, None]:
    """Let the model of TRL's asynchronous trainer generate in the block: its own attention needs packed rows.

    Args:
        model: The model, without wrappers of accelerate.
    """
    packed = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(packed)
