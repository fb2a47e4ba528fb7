"""Run one training, from settings to a finished run folder."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import datasets
import torch
from transformers import AutoTokenizer
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import PrinterCallback
from trl import get_dataset, get_peft_config, get_quantization_config

from bandpo.integrations.trl import BandGRPOTrainer
from bandpo_lab.errors import InvalidValue
from bandpo_lab.evals.dataset_io import check_prepared
from bandpo_lab.evals.generate import Sampling, sample
from bandpo_lab.evals.metrics import mean_at_k, pass_at_k
from bandpo_lab.files.writing import check_writable
from bandpo_lab.models.embedded import model_path
from bandpo_lab.output.console import echo
from bandpo_lab.tasks import task_module
from bandpo_lab.training.arguments import Arguments, reward_functions
from bandpo_lab.training.callbacks import MetricsLog, PeriodicEvaluation, ProgressBar
from bandpo_lab.training.failures import check_weights, naming_failures
from bandpo_lab.training.processes import Processes
from bandpo_lab.training.run_checkpoints import RunCheckpoints
from bandpo_lab.training.run_folder import RunFolder
from bandpo_lab.training.stale import StaleBatches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from bandpo_lab.training.arguments import TrainingConfig
    from bandpo_lab.training.async_config import AsyncTrainingConfig
    from bandpo_lab.training.async_run import AsyncRunTrainer

EVALUATION_SEED = 1234


class RunTrainer(RunCheckpoints, StaleBatches, BandGRPOTrainer):
    """`BandGRPOTrainer` with a lag, whose checkpoints are written atomically."""

    _stops_without_rewards = True


def run_training(arguments: Arguments) -> RunFolder:
    """Train, evaluate before and after, and write all results to ``output_dir``.

    With ``resume``, the run continues from the newest checkpoint that is not damaged, to the same weights as an
    uninterrupted run (bit for bit on one machine). If the run had finished, nothing is done. If an error ends the run,
    its traceback is in the folder's error.log.

    Raises:
        ValueError: Settings exclude each other, or the run folder cannot be used. This is raised before an evaluation
            or training, and the folder can still be used.
        FileProblem: Another process is writing to the folder.
        RunProblem: The newest checkpoint cannot be loaded, or all checkpoints are damaged; they are not moved. Or
            another process of this training does not answer.
    """
    run, training, _, _ = arguments
    check_prepared_data(arguments)
    rewards = reward_functions(run)
    updates = training.updates_per_batch
    if training.save_strategy == "steps" and training.save_steps % updates:
        raise InvalidValue(
            f"save_steps={training.save_steps} would save between the {updates} updates of a batch, and a resumed run "
            f"would differ from an uninterrupted one; use a multiple of {updates}"
        )
    if training.record:
        check_writable(Path(training.record))
    processes = Processes.of(training)
    folder = RunFolder(training.output_dir or "", processes)
    with folder.lock(), processes.naming_lost_processes(), _prepared(arguments):
        folder.check(arguments)
        if not processes.from_main(lambda: folder.finished):
            _run(arguments, folder, rewards)
    return folder


def _prepared(arguments: Arguments) -> AbstractContextManager[None]:
    """Return a context in which this process is prepared for the trainer."""
    if not arguments.is_async:
        return nullcontext()
    from bandpo_lab.training.async_run import async_training

    return async_training(cast("AsyncTrainingConfig", arguments.training))


def _run(arguments: Arguments, folder: RunFolder, rewards: list[Callable[..., list[float]]]) -> None:
    """Evaluate, train and evaluate in a folder that was checked."""
    run, training, _, _ = arguments
    if run.threads:
        torch.set_num_threads(run.threads)
    train_set, test_set = load_data(arguments)
    can_evaluate = test_set is not None and run.eval_prompts and rewards
    if run.eval_every and not can_evaluate:
        raise InvalidValue("eval_every needs a test split, eval_prompts above 0 and a reward function")
    trainer, tokenizer = _trainer(arguments, train_set, test_set, rewards)

    def scores() -> dict[str, float]:
        with _generating(trainer.model, arguments):
            return evaluation(trainer.model, tokenizer, test_set, rewards, arguments)

    def evaluate(when: str) -> None:
        if when not in folder.evaluations and can_evaluate:
            if training.process_index == 0:
                echo(
                    f"evaluating {when} training: {run.eval_prompts} prompts × {run.eval_samples} samples",
                    err=True,
                )
            folder.record_evaluation(when, scores())

    trainer.add_callback(MetricsLog(folder))
    if run.eval_every:
        trainer.add_callback(PeriodicEvaluation(folder, run.eval_every, scores))
    # All settings are valid: from here on, the folder is used.
    checkpoint = folder.begin()
    try:
        with naming_failures(trainer, folder.path):
            evaluate("before")
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            check_weights(trainer, folder.model.name)
            folder.save_model(trainer)
            evaluate("after")
            folder.finish(arguments.training.effective_method)
    except Exception:
        folder.record_error()
        raise


def _generating(model: Any, arguments: Arguments) -> AbstractContextManager[None]:
    """Return a context in which the model of the trainer can generate."""
    if not arguments.is_async:
        return nullcontext()
    from bandpo_lab.training.async_run import dense_attention

    return dense_attention(model)


def _trainer(
    arguments: Arguments, train_set: Any, test_set: Any, rewards: list[Callable[..., list[float]]]
) -> tuple[RunTrainer | AsyncRunTrainer, PreTrainedTokenizerBase]:
    """Create the trainer and the tokenizer.

    The optimizer and the trackers are created as well, so that errors in their settings are raised before the first
    evaluation.

    Raises:
        ValueError: A setting is not valid; the message names it.
    """
    run, training, model, _ = arguments
    try:
        for tracker in get_reporting_integration_callbacks(training.report_to):
            tracker()
    except (ValueError, ImportError, RuntimeError) as error:  # an unknown tracker, or its package is missing
        raise InvalidValue(f"report_to: {error}") from error
    path = model_path(str(model.model_name_or_path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path,
            revision=model.model_revision,
            trust_remote_code=training.trust_remote_code,
            padding_side="left",
        )
    except OSError as error:
        raise InvalidValue(f"model_name_or_path {path}: {error}") from error
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        # Weights in other formats are pickles, which can run code.
        "use_safetensors": True,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **cast("dict[str, Any]", training.model_init_kwargs or {}),
    }
    training.disable_tqdm = True  # the callback ProgressBar replaces it
    if arguments.is_async:
        from bandpo_lab.training.async_run import async_trainer

        trainer = async_trainer(arguments, path, tokenizer, train_set, rewards, callbacks=[ProgressBar()])
    else:
        trainer = RunTrainer(
            model=path,
            reward_funcs=[*rewards, *filter(None, [run.reward_model_name_or_path])],
            args=cast("TrainingConfig", training),
            train_dataset=train_set,
            eval_dataset=test_set if training.eval_strategy != "no" else None,
            processing_class=tokenizer,
            callbacks=[ProgressBar()],
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
        )
    trainer.remove_callback(PrinterCallback)
    if not trainer.is_fsdp_enabled:  # with FSDP, it is created later from sharded parameters
        try:
            trainer.create_optimizer()
        except (ValueError, TypeError) as error:
            raise InvalidValue(f"the optimizer refuses its settings: {error}") from error
    for callback in trainer.callback_handler.callbacks:
        if getattr(callback, "_initialized", True) is False:
            try:
                callback.setup(training, trainer.state, trainer.model)
            except Exception as error:  # each tracker raises errors of its own
                raise InvalidValue(f"report_to: {type(callback).__name__} cannot begin: {error}") from error
    return trainer, tokenizer


def check_prepared_data(arguments: Arguments) -> None:
    """Compare the training files that `bandpo-lab data prepare` wrote with their digests; other files are not checked.

    Raises:
        ValueError: A file has changed since it was prepared; the message names it.
    """
    run, _, _, mixture = arguments
    for file in _data_files(run.dataset_name or ""):
        check_prepared(file)
    for dataset in mixture.datasets:
        for file in _mixture_files(dataset):
            check_prepared(file)


def _mixture_files(dataset: Any) -> list[Path]:
    """Return the local files of a dataset in TRL's mixture."""
    is_folder = Path(dataset.path).is_dir()
    if dataset.data_files is None and not (dataset.data_dir or is_folder):
        return []
    # data_files is a pattern, a list of patterns, or a mapping from splits to either.
    data_files = dataset.data_files or "*"
    patterns: list[str] = []
    for value in data_files.values() if isinstance(data_files, Mapping) else [data_files]:
        patterns += [value] if isinstance(value, str) else value
    folder = Path(dataset.data_dir or (dataset.path if is_folder else "."))
    paths: list[Path] = []
    for pattern in patterns:
        paths += map(Path, glob.glob(str(folder / pattern), recursive=True))
    return paths


def _data_files(name: str) -> list[Path]:
    """Return the parquet files of a dataset whose name is a path."""
    path = Path(name)
    if path.is_dir():
        return sorted(path.rglob("*.parquet"))
    return [path] if path.is_file() else []


def load_data(arguments: Arguments) -> tuple[Any, Any]:
    """Return the train split, and the test split or None if there is none."""
    run, _, _, mixture = arguments
    task = task_module(run.dataset_name) if run.dataset_name else None
    if task:
        return task.dataset("train", run.train_prompts), task.dataset("eval", run.eval_prompts)
    dataset: Any
    try:
        if mixture.datasets:
            dataset = get_dataset(mixture)
        else:
            load: Any = datasets.load_dataset  # its overloads ask for literal arguments
            dataset = load(run.dataset_name, name=run.dataset_config, streaming=run.dataset_streaming)
    except (OSError, ValueError) as error:
        raise InvalidValue(f"dataset_name {run.dataset_name or mixture.datasets}: {error}") from error
    if run.dataset_train_split not in dataset:
        raise InvalidValue(
            f"the data has no split {run.dataset_train_split!r}, only {', '.join(dataset)}; set dataset_train_split"
        )
    return dataset[run.dataset_train_split], dataset.get(run.dataset_test_split)


def evaluation(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Any,
    rewards: list[Callable[..., list[float]]],
    arguments: Arguments,
) -> dict[str, float]:
    """Evaluate a model on the first prompts of a dataset.

    Returns:
        mean@k and pass@k, where a completion is right if the sum of its rewards is at least ``solved_at``, and the mean
        reward.
    """
    run, training, _, _ = arguments
    rows: list[dict[str, Any]] = list(dataset.take(run.eval_prompts))
    prompts = [row["prompt"] for row in rows]
    # TRL may train without a limit, but an evaluation needs one.
    limit = training.max_completion_length or 512
    sampling = Sampling(limit, training.temperature, seed=EVALUATION_SEED)
    batch_size = training.per_device_eval_batch_size
    completions = sample(model, tokenizer, prompts, run.eval_samples, sampling, batch_size)
    totals = [_total_rewards(row, texts, rewards) for row, texts in zip(rows, completions, strict=True)]
    is_right = [[total >= run.solved_at for total in prompt_totals] for prompt_totals in totals]
    k = run.eval_samples
    return {
        f"mean@{k}": float(mean_at_k(is_right).mean()),
        f"pass@{k}": float(pass_at_k(is_right, k).mean()),
        "reward": sum(map(sum, totals)) / (k * len(rows)),
    }


def _total_rewards(
    row: dict[str, Any], texts: list[str], rewards: list[Callable[..., list[float]]]
) -> list[float]:
    """Return the sum of rewards of each completion of one prompt; the functions are called as TRL calls them."""
    is_chat = not isinstance(row["prompt"], str)
    columns = {name: [value] * len(texts) for name, value in row.items() if name != "prompt"}
    columns["prompts"] = [row["prompt"]] * len(texts)
    columns["completions"] = [[{"role": "assistant", "content": text}] if is_chat else text for text in texts]
    scores = [function(**columns) for function in rewards]
    return [
        sum(score or 0.0 for score in completion_scores) for completion_scores in zip(*scores, strict=True)
    ]
