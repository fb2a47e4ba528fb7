"""`bandpo-lab eval`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bandpo._terminal import printable_lines
from bandpo.cli import INTERRUPTED, stop
from bandpo.errors import InvalidValue
from bandpo_lab.console import echo
from bandpo_lab.data.sets import Golds
from bandpo_lab.files import SEAL, check_writable, digest, sealed

if TYPE_CHECKING:
    from bandpo_lab.evals.generate import Sampler, Sampling
    from bandpo_lab.evals.report import Scores


def eval_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Name or folder of the model, or what the server calls it. By default the embedded model."
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
        typer.Option(
            "--output-dir", "--output_dir", help="Where samples and report go; by default runs/eval-MODEL."
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Address of an OpenAI-compatible server, such as http://localhost:8000/v1."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Probability mass kept at each step.")] = 1.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Longest completion; by default 4096, or what the embedded problems need."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Completions drawn at once: 64; requests in flight: 32.")
    ] = None,
    golds: Annotated[
        Golds, typer.Option(help="What to do with problems whose right answer cannot be graded.")
    ] = "keep",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems of the data.")] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Jinja file to use in place of the model's chat template."
        ),
    ] = None,
    regrade: Annotated[
        bool, typer.Option("--regrade", help="Grade the samples in --output-dir again, and draw none.")
    ] = False,
) -> None:
    """Sample, grade and report: mean@n, pass@k, maj@n. The same command again goes on where it stopped."""
    from bandpo_lab.evals.generate import Sampling
    from bandpo_lab.evals.golds import Gold, unreadable
    from bandpo_lab.evals.problems import embedded_problems, read_problems
    from bandpo_lab.evals.report import score
    from bandpo_lab.evals.run import evaluate as run
    from bandpo_lab.evals.run import regrade as grade_again
    from bandpo_lab.models import model_path
    from bandpo_lab.tasks import EMBEDDED
    from bandpo_lab.tasks.multiplication import MAX_COMPLETION_LENGTH

    if server is not None and model is None:
        raise InvalidValue("--server needs the name of the model, as the server calls it")
    folder = output_dir or Path("runs") / f"eval-{Path(model).name if model else 'base-model'}"
    if regrade:
        samples = grade_again(folder)
        asked = {s.problem: Gold(s.problem, s.gold, s.data_source) for s in samples}
        _report(folder, score(samples, kept=unreadable(list(asked.values()))))
        return
    check_writable(folder)
    problems = (read_problems(data) if data else embedded_problems())[:limit]
    bad = unreadable([Gold(p.id, p.answer, p.data_source) for p in problems])
    for gold in bad:
        echo(f"{gold.gold.id}: {gold.reason} ({golds})", err=True)
    if golds == "drop":
        ids = {gold.gold.id for gold in bad}
        problems = [p for p in problems if p.id not in ids]
        if not problems:
            raise InvalidValue("no problem is left whose right answer can be graded: see --golds keep")
    if max_new_tokens is None:
        max_new_tokens = 4096 if data else MAX_COMPLETION_LENGTH
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    try:
        template = None if chat_template is None else chat_template.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{chat_template} cannot be read as a chat template: {error}") from error
    settings = {
        "model": model or "embedded base model",
        "generator": "server" if server else "transformers",
        "chat_template": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
    }
    named = model if server and model else model_path(model or EMBEDDED)
    if not server:
        settings |= _content(Path(named))
    generator = _generator(named, sampling, server, batch_size, template)
    try:
        samples = run(generator, problems, n, folder, settings=settings)
    except KeyboardInterrupt:
        stop(
            f"interrupted; the samples so far are kept in {folder}, and the same command goes on from there",
            INTERRUPTED,
        )
    _report(folder, score(samples, **{"dropped" if golds == "drop" else "kept": bad}))


def _content(model: Path) -> dict[str, str]:
    """Hashes of a folder's weights, with their configuration, and of its tokenizer; a hub's model has a name alone.

    Raises:
        ValueError: The folder is of a training run, and a file has changed since it was saved.
    """
    kinds: dict[str, list[str]] = {"weights": [], "tokenizer": []}
    saved = sealed(model.parent)
    for file in sorted(path for path in model.rglob("*") if path.is_file()):
        found, name = digest(file), file.relative_to(model.parent).as_posix()
        if saved.get(name, found) != found:
            raise InvalidValue(
                f"{file} has changed since it was saved: train again, or remove {model.parent}/{SEAL}"
            )
        kind = (
            "tokenizer"
            if re.match(r"tokenizer|vocab|merges|special|added|chat_template", file.name)
            else "weights"
        )
        kinds[kind].append(found)
    return {
        kind: hashlib.sha256("".join(found).encode()).hexdigest() for kind, found in kinds.items() if found
    }


def _report(folder: Path, scores: Mapping[str, Scores]) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    from bandpo_lab.evals.report import as_json, as_markdown

    report = as_markdown(scores)
    (folder / "report.json").write_text(json.dumps(as_json(scores), indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(report, encoding="utf-8")
    Console().print(Markdown(printable_lines(report), hyperlinks=False))
    echo(f"\nsamples  {folder / 'samples.jsonl'}\nreport   {folder / 'report.md'}")


def _generator(
    model: str, sampling: Sampling, server: str | None, batch_size: int | None, template: str | None
) -> Sampler:
    if server is not None:
        from bandpo_lab.evals.server import ServerSampler

        if template is not None:
            raise InvalidValue(
                "a server applies its own chat template: give --chat-template to the server instead"
            )
        return ServerSampler(server, model, sampling, concurrency=batch_size or 32)
    inner = Path(model) / "model"
    if (inner / "config.json").exists() and not (Path(model) / "config.json").exists():
        raise InvalidValue(
            f"{model} is a run folder, and no model; its model is in {inner}: bandpo-lab eval {inner}"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from bandpo_lab.evals.generate import TransformersSampler

    try:
        # Without a value for trust_remote_code, transformers asks on the terminal whether to run a model's code.
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:  # of several packages
        where = "" if Path(model).is_dir() else "there is no such folder, and the hub's answer is: "
        raise InvalidValue(
            f"{model} cannot be loaded as a model: {where}{str(error).splitlines()[0]}"
        ) from error
    if template is not None:
        tokenizer.chat_template = template
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TransformersSampler(loaded.to(device), tokenizer, sampling, batch_size=batch_size or 64)
