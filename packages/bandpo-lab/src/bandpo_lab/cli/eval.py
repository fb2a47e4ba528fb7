"""`bandpo-lab eval`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bandpo_lab.data.sets import Golds
from bandpo_lab.errors import InvalidValue
from bandpo_lab.files.writing import SEAL, check_writable, digest, sealed
from bandpo_lab.output.console import echo
from rlvet._terminal import printable_lines
from rlvet.cli import INTERRUPTED, stop

if TYPE_CHECKING:
    from bandpo_lab.evals.generate import Sampler, Sampling
    from bandpo_lab.evals.report import Scores


def eval_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Name or folder of the model, or its name on the server. By default the embedded model."
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="File that `bandpo-lab data prepare` wrote; repeatable. By default 64 embedded problems."
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Completions per problem.")] = 32,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", help="Folder for samples and report; by default runs/eval-MODEL."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Address of an OpenAI-compatible server, such as http://HOST:8000/v1."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Probability mass kept at each step.")] = 1.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest completion in tokens; by default 4096 or what the model's context leaves beside the longest "
            "prompt, and 40 for the embedded problems."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Completions per batch, by default 64; with a server simultaneous requests, by default 32.",
        ),
    ] = None,
    golds: Annotated[
        Golds, typer.Option(help="Problems whose right answer cannot be graded: drop or keep.")
    ] = "keep",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems of the data.")] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Jinja file to use in place of the model's chat template."
        ),
    ] = None,
    regrade: Annotated[
        bool, typer.Option("--regrade", help="Grade the samples in --output-dir again, without sampling.")
    ] = False,
) -> None:
    """Sample, grade and report mean@n, pass@k and maj@n. If interrupted, the same command resumes."""
    from bandpo_lab.evals.generate import Sampling, TransformersSampler
    from bandpo_lab.evals.golds import Gold, find_bad_golds
    from bandpo_lab.evals.problems import embedded_problems, read_problems
    from bandpo_lab.evals.report import score
    from bandpo_lab.evals.run import evaluate
    from bandpo_lab.evals.run import regrade as regrade_samples
    from bandpo_lab.models.embedded import model_path
    from bandpo_lab.tasks import EMBEDDED
    from bandpo_lab.tasks.multiplication import MAX_COMPLETION_LENGTH

    if server is not None and model is None:
        raise InvalidValue("--server needs the model's name on the server as the argument MODEL")
    folder = output_dir or Path("runs") / f"eval-{Path(model).name if model else 'base-model'}"
    if regrade:
        samples = regrade_samples(folder)
        all_golds = {s.problem: Gold(s.problem, s.gold, s.data_source) for s in samples}
        bad_golds = find_bad_golds(list(all_golds.values()))
        _report(folder, score(samples, kept_golds=bad_golds))
        return
    check_writable(folder)

    # The problems, and those of them whose gold cannot be used.
    problems = (read_problems(data) if data else embedded_problems())[:limit]
    bad_golds = find_bad_golds([Gold(p.id, p.answer, p.data_source) for p in problems])
    for bad in bad_golds:
        echo(f"{bad.gold.id}: {bad.reason} ({golds})", err=True)
    if golds == "drop":
        bad_ids = {bad.gold.id for bad in bad_golds}
        problems = [problem for problem in problems if problem.id not in bad_ids]
        if not problems:
            raise InvalidValue("no problem is left whose right answer can be graded: see --golds keep")

    # The sampler and its settings.
    default_length = 4096 if data else MAX_COMPLETION_LENGTH
    length = default_length if max_new_tokens is None else max_new_tokens
    sampling = Sampling(length, temperature, top_p, seed)
    try:
        template = None if chat_template is None else chat_template.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{chat_template} cannot be read as a chat template: {error}") from error
    settings = {
        "model": model or "embedded base model",
        "generator": "server" if server else "transformers",
        "chat_template": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
    }
    path_or_name = model if server and model else model_path(model or EMBEDDED)
    if not server:
        settings |= _model_hashes(Path(path_or_name))
    sampler = _sampler(path_or_name, sampling, server, batch_size, template)
    if max_new_tokens is None and isinstance(sampler, TransformersSampler):
        sampler.fit_to_context([problem.prompt for problem in problems])
        fitting = sampler.sampling.max_new_tokens
        if fitting < default_length:
            echo(
                f"max_new_tokens is {fitting}, not {default_length}: the longest prompt and the completion fill the "
                "model's context",
                err=True,
            )
    try:
        samples = evaluate(sampler, problems, n, folder, settings=settings)
    except KeyboardInterrupt:
        stop(
            f"interrupted; the samples so far are kept in {folder}, and the same command goes on from there",
            INTERRUPTED,
        )
    if golds == "drop":
        scores = score(samples, dropped_golds=bad_golds)
    else:
        scores = score(samples, kept_golds=bad_golds)
    _report(folder, scores)


def _model_hashes(model: Path) -> dict[str, str]:
    """Return a hash of the weights and configuration in a model's folder, and one of its tokenizer.

    The dictionary is empty if the model is a name on a hub.

    Raises:
        ValueError: The folder is of a training run, and a file has changed since it was saved.
    """
    digests: dict[str, list[str]] = {"weights": [], "tokenizer": []}
    saved_digests = sealed(model.parent)
    for file in sorted(path for path in model.rglob("*") if path.is_file()):
        file_digest = digest(file)
        name = file.relative_to(model.parent).as_posix()
        if saved_digests.get(name, file_digest) != file_digest:
            raise InvalidValue(
                f"{file} has changed since it was saved: train again, or remove {model.parent}/{SEAL}"
            )
        is_tokenizer = re.match(r"tokenizer|vocab|merges|special|added|chat_template", file.name)
        digests["tokenizer" if is_tokenizer else "weights"].append(file_digest)
    return {
        kind: hashlib.sha256("".join(files).encode()).hexdigest() for kind, files in digests.items() if files
    }


def _report(folder: Path, scores: Mapping[str, Scores]) -> None:
    """Write the report to the folder and print it."""
    from rich.console import Console
    from rich.markdown import Markdown

    from bandpo_lab.evals.report import as_json, as_markdown

    report = as_markdown(scores)
    (folder / "report.json").write_text(json.dumps(as_json(scores), indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(report, encoding="utf-8")
    Console().print(Markdown(printable_lines(report), hyperlinks=False))
    echo(f"\nsamples  {folder / 'samples.jsonl'}\nreport   {folder / 'report.md'}")


def _sampler(
    model: str, sampling: Sampling, server: str | None, batch_size: int | None, template: str | None
) -> Sampler:
    """Return the sampler for a server, or for a model that is loaded into this process.

    Raises:
        ValueError: The model cannot be loaded, or there is a chat template for a server.
    """
    if server is not None:
        from bandpo_lab.evals.server import ServerSampler

        if template is not None:
            raise InvalidValue(
                "a server applies its own chat template: give --chat-template to the server instead"
            )
        return ServerSampler(server, model, sampling, concurrency=batch_size or 32)
    model_folder = Path(model) / "model"
    if (model_folder / "config.json").exists() and not (Path(model) / "config.json").exists():
        raise InvalidValue(
            f"{model} is the folder of a run, not of a model; its model is in {model_folder}: "
            f"bandpo-lab eval {model_folder}"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from bandpo_lab.evals.generate import TransformersSampler

    try:
        # Without a value for trust_remote_code, transformers asks on the terminal whether to run a model's code.
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        loaded_model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:  # several packages raise errors of their own
        context = "" if Path(model).is_dir() else "there is no such folder, and the hub's answer is: "
        raise InvalidValue(
            f"{model} cannot be loaded as a model: {context}{str(error).splitlines()[0]}"
        ) from error
    if template is not None:
        tokenizer.chat_template = template
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TransformersSampler(loaded_model.to(device), tokenizer, sampling, batch_size=batch_size or 64)
