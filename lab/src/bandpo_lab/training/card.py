"""The README.md of a run folder, in place of TRL's model card, which knows no local model, clip rule or scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCardData

from bandpo.audit.tables import Table
from bandpo_lab.models import SMOLLM2
from bandpo_lab.tasks import EMBEDDED

if TYPE_CHECKING:
    from bandpo_lab.training.arguments import Arguments
    from bandpo_lab.training.run_folder import RunFolder

FILES = {
    "model/": "the trained model and its tokenizer, for `from_pretrained`",
    "evaluation.json": "scores before and after",
    "metrics.jsonl": "one line of metrics per log step, for `bandpo audit` and `bandpo report`",
    "curves.png": "reward, entropy and clip rates over training",
    "config.yaml": "every setting, and the versions it ran with",
    "checkpoint-*/": "where `--resume` goes on from",
}


def run_card(arguments: Arguments, folder: RunFolder) -> str:
    """Markdown, with the header by which a hub knows a model."""
    run, training, model, mixture = arguments
    base = str(model.model_name_or_path)
    named = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}.get(base, base)
    on_a_hub = base != EMBEDDED and not Path(base).exists()
    data = [run.dataset_name] if run.dataset_name else [str(part.path) for part in mixture.datasets]
    settings = {
        "method": training.method,
        "updates per batch": training.updates_per_batch,
        "learning rate": training.learning_rate,
        "optimiser steps": training.max_steps
        if training.max_steps > 0
        else f"{training.num_train_epochs:g} epochs",
        "seed": training.seed,
    }
    header = ModelCardData(
        library_name="transformers", base_model=named if on_a_hub else None, tags=["bandpo", "grpo", "trl"]
    )
    missing = {"evaluation.json": not run.eval_prompts, "checkpoint-*/": training.save_strategy == "no"}
    files = [[f"`{name}`", what] for name, what in FILES.items() if not missing.get(name)]
    scores = folder.evaluations
    names = next(iter(scores.values()), {})
    rows = [[score, *(f"{of_one[score]:.3f}" for of_one in scores.values())] for score in names]
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {folder.path.name}",
        f"`{base}`, trained by `bandpo train` with GRPO on {', '.join(f'`{name}`' for name in data)}.",
        Table(["setting", "value"], [[k, f"`{v}`"] for k, v in settings.items()], prose=True).markdown(),
        *([Table(["score", *scores], rows).markdown()] if rows else []),
        Table(["file", "holds"], files, prose=True).markdown(),
        "The same run again: `bandpo train --config config.yaml --output_dir ANOTHER_FOLDER`.",
    ]
    return "\n\n".join(parts) + "\n"
