"""Makes the three small records that the tests of `bandpo audit` read, and a reading of each by formulas of its own.

    python scripts/small_records.py readings FOLDER
    python scripts/small_records.py records FOLDER --rehearsal /tmp/r

The first trains with TRL's `GRPOTrainer` and with its asynchronous trainer, keeps the tensors of each loss as the
trainer got them, and writes ``FOLDER/readings.json``: the number of rare winners, and the share of their gradient that
each rule drops. These are computed with numpy alone, from the bounds as in the papers, and without a record. With
``--rehearsal`` both read verl's losses from a folder that `bandpo-lab rehearse --output-dir` wrote.

The second trains the same again with ``record=``, and writes the records.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RADIUS = 0.05
"""The radius of Band, and of the run's rule BandAbove."""
LARGEST_RATIO = 10.0
"""The largest upper bound of both."""
RARE = 0.1
METHOD = "BandAbove()"
"""The method of the runs of TRL. That of the rehearsal has the same upper bound."""
STEPS = {"trl": 16, "async": 16}
Losses = Sequence[Mapping[str, Any]]


def variety(completions: Sequence[str], **_: Any) -> list[float]:
    """Reward the number of different digits in an answer, so that rare tokens are among the winners."""
    return [len(set(answer) & set("0123456789")) / 10 for answer in completions]


def band_bounds(p: float) -> tuple[float, float]:
    """Return the ratios r at which ``p·log(1/r) + (1 − p)·log((1 − p)/(1 − r·p)) = RADIUS``, by bisection."""

    def divergence(ratio: float) -> float:
        rest = (1 - p) / max(1 - ratio * p, 1e-300)
        return -p * np.log(ratio) + (1 - p) * np.log(rest)

    def root(inside: float, outside: float) -> float:
        for _ in range(200):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if divergence(middle) <= RADIUS else (inside, middle)
        return inside

    lower = root(1.0, 1e-12)
    upper = root(1.0, min(LARGEST_RATIO, 1 / p) * (1 - 1e-12))
    return lower, upper


def reading(losses: Losses) -> dict[str, Any]:
    """Return the number of rare winners, and the share of their gradient r·A that each rule drops.

    Args:
        losses: Flat arrays ``old`` and ``new`` (nats) and ``advantages`` of the counted tokens of each loss.
    """
    old, new, advantages = (
        np.concatenate([np.asarray(loss[name], np.float64) for loss in losses])
        for name in ("old", "new", "advantages")
    )
    p, ratio = np.exp(old), np.exp(new - old)
    rare = (p < RARE) & (advantages > 0)
    size = (ratio * advantages)[rare]
    upper = np.array([band_bounds(x)[1] for x in p[rare]])
    beyond = {
        "the run": ratio[rare] > upper,
        "clip 0.2": ratio[rare] > 1.2,
        "Clip-Higher": ratio[rare] > 1.28,
    }
    beyond["Band"] = beyond["the run"]
    total = size.sum()
    dropped = {
        rule: float(size[chosen].sum() / total) if total > 0 else None for rule, chosen in beyond.items()
    }
    return {"tokens": int(rare.sum()), "dropped": dropped}


def trl_losses(folder: Path, record: Path | None) -> Losses:
    """Train with TRL's `GRPOTrainer`, and return the tokens of each loss."""
    from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
    from bandpo_lab.tasks.multiplication import base_model_path, dataset

    losses: list[dict[str, Any]] = []

    class Kept(BandGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self.kept = None if self._probing else inputs
            return super()._compute_loss(model, inputs)

        def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
            outputs = super()._get_per_token_logps_and_entropies(*arguments, **named)
            inputs = getattr(self, "kept", None)
            if inputs is not None:
                self.kept = None
                new = outputs[0].detach()
                old = inputs.get("old_per_token_logps")
                old = new if old is None else old
                mask = inputs["completion_mask"].bool()
                advantages = inputs["advantages"].unsqueeze(1).expand_as(new)
                losses.append({"old": old[mask], "new": new[mask], "advantages": advantages[mask]})
            return outputs

    settings: dict[str, Any] = {} if record is None else {"record": str(record)}
    config = BandGRPOConfig(
        str(folder),
        method=METHOD,
        num_generations=16,
        max_completion_length=24,
        per_device_train_batch_size=32,
        steps_per_generation=8,
        learning_rate=1e-3,
        max_steps=STEPS["trl"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    Kept(str(base_model_path()), variety, args=config, train_dataset=dataset("train", 64)).train()
    return losses


def async_losses(folder: Path, record: Path | None) -> Losses:
    """Train with TRL's asynchronous trainer on old data, and return the tokens of each loss."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from bandpo.integrations.trl import BandAsyncGRPOConfig, BandAsyncGRPOTrainer
    from bandpo_lab.tasks import multiplication
    from bandpo_lab.training.async_on_cpu import OldSampler, trl_on_a_cpu

    losses: list[dict[str, Any]] = []

    class Kept(BandAsyncGRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            kept: dict[str, Any] = {}

            def keeping(**features: Any) -> Any:
                outputs = model(**features)
                kept["new"] = outputs.log_probs.detach().flatten()
                return outputs

            loss = super().compute_loss(keeping, inputs, *arguments, **named)
            if not self._probing:
                selected = inputs["token_index"] >= 0
                losses.append(
                    {
                        "old": inputs["old_log_probs"][selected],
                        "new": kept["new"][inputs["token_index"][selected]],
                        "advantages": inputs["advantages"][selected],
                    }
                )
            return loss

    path = str(multiplication.base_model_path())
    worker = OldSampler(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
        [dict(row) for row in multiplication.dataset("train", 64)],  # pyright: ignore[reportArgumentType, reportCallIssue]
        variety,
        lag=3,
        num_generations=8,
        prompts=4,
        max_new_tokens=24,
    )
    settings: dict[str, Any] = {} if record is None else {"record": str(record)}
    config = BandAsyncGRPOConfig(
        str(folder),
        method=METHOD,
        per_device_train_batch_size=32,
        num_generations=8,
        max_steps=STEPS["async"],
        max_staleness=8,
        token_budget=0,
        learning_rate=1e-3,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
        report_to="none",
        **settings,
    )
    with trl_on_a_cpu():
        Kept(
            model=path,
            reward_funcs=variety,
            args=config,
            train_dataset=multiplication.dataset("train", 64),
            rollout_worker=worker,
            weight_transfer=worker,
        ).train()
    return losses


def verl_calls(rehearsal: Path) -> list[dict[str, Any]]:
    """Return the losses of the first run of a rehearsal of verl, as its workers got them, in their order."""
    import torch

    return [torch.load(path, weights_only=True) for path in sorted((rehearsal / "losses-first").glob("*.pt"))]


def verl_losses(rehearsal: Path) -> Losses:
    """Return the tokens of each loss of a rehearsal of verl."""
    losses: list[dict[str, Any]] = []
    for call in verl_calls(rehearsal):
        mask = call["response_mask"].bool()
        names = {"old": "old_log_prob", "new": "log_prob", "advantages": "advantages"}
        losses.append({name: call[key][mask] for name, key in names.items()})
    return losses


def _beginning(log_probs: Sequence[float]) -> tuple[float, ...]:
    """Return the first log-probabilities of an answer, rounded, by which it is found again."""
    return tuple(round(x, 4) for x in log_probs[:4])


def record_verl(rehearsal: Path, record: Path) -> None:
    """Write a record of the losses of a rehearsal of verl, with the ids of the answers that its sampler wrote."""
    import torch

    from bandpo.audit import Recorder

    samples = [json.loads(line) for line in (rehearsal / "samples-first.jsonl").read_text().splitlines()]
    by_logp = {_beginning(sample["log_probs"]): sample["response"] for sample in samples}
    log = (rehearsal / "metrics-first.jsonl").read_text().splitlines()
    method = json.loads(log[0])["data"]["bandpo"]["method"]
    with Recorder(record, method=method, anchor="rollout", framework="verl, rehearsed") as recorder:
        for number, call in enumerate(verl_calls(rehearsal)):
            old = call["old_log_prob"]
            ids = torch.zeros_like(old, dtype=torch.int64)
            for row, log_probs in enumerate(old.tolist()):
                answer = by_logp[_beginning(log_probs)]
                ids[row, : len(answer)] = torch.tensor(answer)[: ids.shape[1]]
            recorder.add(
                logp=call["log_prob"],
                logp_old=old,
                logp_rollout=old,
                advantages=call["advantages"],
                mask=call["response_mask"],
                tokens=ids,
                step=number,
            )
    tokenizer = rehearsal / "model/tokenizer.json"
    if tokenizer.is_file():
        shutil.copy(tokenizer, record)


def main() -> None:
    """Make the readings or the records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("readings", "records"))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--rehearsal", type=Path, help="A folder that bandpo-lab rehearse --output-dir wrote."
    )
    options = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    with_records = options.what == "records"
    file = options.folder / "readings.json"
    readings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name, train in {"trl": trl_losses, "async": async_losses}.items():
        record = options.folder / name if with_records else None
        with tempfile.TemporaryDirectory() as run:
            losses = train(Path(run), record)
        readings[name] = reading(losses)
    if options.rehearsal:
        if with_records:
            record_verl(options.rehearsal, options.folder / "verl")
        readings["verl"] = reading(verl_losses(options.rehearsal))
    if not with_records:
        options.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(readings, indent=1) + "\n"
        file.write_text(text, encoding="utf-8")
    print(json.dumps(readings, indent=1))


if __name__ == "__main__":
    main()
