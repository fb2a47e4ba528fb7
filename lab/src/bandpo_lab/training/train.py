"""One training run, from settings to a finished run folder."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import datasets
import torch
from transformers import AutoTokenizer
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import PrinterCallback
from trl import get_dataset, get_peft_config, get_quantization_config

from bandpo.errors import InvalidValue
from bandpo.integrations.trl import BandGRPOTrainer
from bandpo_lab.console import echo
from bandpo_lab.evals.generate import Sampling, sample
from bandpo_lab.evals.metrics import mean_at_k, pass_at_k
from bandpo_lab.evals.rows import check_prepared
from bandpo_lab.files import check_writable
from bandpo_lab.models import model_path
from bandpo_lab.tasks import task_module
from bandpo_lab.training.arguments import Arguments, reward_functions
from bandpo_lab.training.callbacks import EvaluateEvery, MetricsLog, ProgressBar
from bandpo_lab.training.checkpoints import WholeCheckpoints
from bandpo_lab.training.processes import Processes
from bandpo_lab.training.run_folder import RunFolder
from bandpo_lab.training.stale import StaleBatches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVALUATION_SEED = 1234


class RunTrainer(WholeCheckpoints, StaleBatches, BandGRPOTrainer):
    """`BandGRPOTrainer` with a lag, whose checkpoints are written whole or not at all."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """None: TRL's, made with each checkpoint, knows no local model, clip rule or scores."""


def run_training(arguments: Arguments) -> RunFolder:
    """Train, evaluating before and after, and leave everything in ``output_dir``.

    With ``resume``, goes on from the newest whole checkpoint to the same weights an uninterrupted run would have
    reached (bit for bit on one machine), and does nothing where the run had finished. An error that ends the run is
    in the folder's error.log, with its traceback.

    Raises:
        ValueError: settings that cannot work together, or an unusable run folder; before anything is evaluated or
            trained, and the folder is not used up.
        FileProblem: another process is at work in the folder.
        RunProblem: the newest whole checkpoint cannot be loaded, or there are checkpoints and none is whole; they stay
            where they are. Or another process of this training does not answer.
    """
    run, training, _, _ = arguments
    check_prepared_data(arguments)
    rewards = reward_functions(run)
    per_batch = training.updates_per_batch
    if training.save_strategy == "steps" and training.save_steps % per_batch:
        raise InvalidValue(
            f"save_steps={training.save_steps} would cut a batch's {per_batch} updates in two, and a resumed run would "
            f"leave the trajectory; use a multiple of {per_batch}"
        )
    if training.record:
        check_writable(Path(training.record))
    processes = Processes.of(training)
    folder = RunFolder(training.output_dir or "", processes)
    with folder.held(), processes.lost_are_named():
        folder.check(arguments)
        if not processes.from_main(lambda: folder.finished):
            _run(arguments, folder, rewards)
    return folder


def _run(arguments: Arguments, folder: RunFolder, rewards: list[Callable[..., list[float]]]) -> None:
    run, training, _, _ = arguments
    if run.threads:
        torch.set_num_threads(run.threads)
    train_set, test_set = load_data(arguments)
    can_evaluate = test_set is not None and run.eval_prompts and rewards
    if run.eval_every and not can_evaluate:
        raise InvalidValue("eval_every needs a test split, eval_prompts above 0 and a reward function")
    trainer, tokenizer = _trainer(arguments, train_set, test_set, rewards)

    def scores() -> dict[str, float]:
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
        trainer.add_callback(EvaluateEvery(folder, run.eval_every, scores))
    checkpoint = folder.begin()
    try:
        evaluate("before")
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        folder.save_model(trainer)
        evaluate("after")
        folder.finish(arguments.training.effective_method)
    except Exception:
        folder.record_error()
        raise


def _trainer(
    arguments: Arguments, train_set: Any, test_set: Any, rewards: list[Callable[..., list[float]]]
) -> tuple[RunTrainer, PreTrainedTokenizerBase]:
    """The trainer, with everything made once that its settings could forbid, and the tokenizer."""
    run, training, model, _ = arguments
    try:
        for tracker in get_reporting_integration_callbacks(training.report_to):
            tracker()
    except (ValueError, ImportError, RuntimeError) as error:  # no such tracker, or its package is missing
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
        # Other files of weights are pickles.
        "use_safetensors": True,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **cast("dict[str, Any]", training.model_init_kwargs or {}),
    }
    training.disable_tqdm = True  # bandpo shows a bar of its own
    trainer = RunTrainer(
        model=path,
        reward_funcs=[*rewards, *filter(None, [run.reward_model_name_or_path])],
        args=training,
        train_dataset=train_set,
        eval_dataset=test_set if training.eval_strategy != "no" else None,
        processing_class=tokenizer,
        callbacks=[ProgressBar()],
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.remove_callback(PrinterCallback)
    if not trainer.is_fsdp_enabled:  # FSDP makes it later, of sharded parameters
        try:
            trainer.create_optimizer()
        except (ValueError, TypeError) as error:
            raise InvalidValue(f"the optimizer refuses its settings: {error}") from error
    for callback in trainer.callback_handler.callbacks:
        if getattr(callback, "_initialized", True) is False:
            try:
                callback.setup(training, trainer.state, trainer.model)
            except Exception as error:  # each service has errors of its own
                raise InvalidValue(f"report_to: {type(callback).__name__} cannot begin: {error}") from error
    return trainer, tokenizer


def check_prepared_data(arguments: Arguments) -> None:
    """Compare the files of `bandpo-lab data prepare` that a run trains on with their digests; others are not judged.

    Raises:
        ValueError: a file has changed since it was prepared; the message names it.
    """
    run, _, _, mixture = arguments
    for file in _data_files(run.dataset_name or ""):
        check_prepared(file)
    for part in mixture.datasets:
        named = part.data_files or "*"
        by_split = named.values() if isinstance(named, Mapping) else [named]
        patterns = [text for texts in by_split for text in ([texts] if isinstance(texts, str) else texts)]
        folder = Path(part.data_dir or (part.path if Path(part.path).is_dir() else "."))
        if part.data_files is None and not (part.data_dir or Path(part.path).is_dir()):
            continue
        for pattern in patterns:
            for file in glob.glob(str(folder / pattern), recursive=True):
                check_prepared(Path(file))


def _data_files(name: str) -> list[Path]:
    """Return the Parquet files that the name of a data set leads to, where it is a path."""
    path = Path(name)
    if path.is_dir():
        return sorted(path.rglob("*.parquet"))
    return [path] if path.is_file() else []


def load_data(arguments: Arguments) -> tuple[Any, Any]:
    """The train split and, where there is one, the test split."""
    run, _, _, mixture = arguments
    if run.dataset_name and (task := task_module(run.dataset_name)):
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
    """mean@k and pass@k of the sum of rewards, on the first prompts of ``dataset``, and the mean reward."""
    run, training, _, _ = arguments
    rows: list[dict[str, Any]] = list(dataset.take(run.eval_prompts))
    prompts = [row["prompt"] for row in rows]
    # Without a limit TRL has none. An evaluation needs one.
    limit = training.max_completion_length or 512
    sampling = Sampling(limit, training.temperature, seed=EVALUATION_SEED)
    batch_size = training.per_device_eval_batch_size
    completions = sample(model, tokenizer, prompts, run.eval_samples, sampling, batch_size)
    totals = [_total_rewards(row, texts, rewards) for row, texts in zip(rows, completions, strict=True)]
    right = [[total >= run.solved_at for total in per_prompt] for per_prompt in totals]
    k = run.eval_samples
    return {
        f"mean@{k}": float(mean_at_k(right).mean()),
        f"pass@{k}": float(pass_at_k(right, k).mean()),
        "reward": sum(map(sum, totals)) / (k * len(rows)),
    }


def _total_rewards(
    row: dict[str, Any], texts: list[str], rewards: list[Callable[..., list[float]]]
) -> list[float]:
    """The summed rewards of one prompt's completions, called as TRL calls them."""
    chat = not isinstance(row["prompt"], str)
    columns = {name: [value] * len(texts) for name, value in row.items() if name != "prompt"}
    columns["prompts"] = [row["prompt"]] * len(texts)
    columns["completions"] = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    scores = [function(**columns) for function in rewards]
    return [sum(score or 0.0 for score in of_one) for of_one in zip(*scores, strict=True)]
