"""The paper's setting with all weights of SmolLM2-135M-Instruct, on one GPU, in pieces of some minutes.

    PYTHONPATH=research python -m studies.paper_setting_smollm2 rows.jsonl --minutes 11  # the next runs
    PYTHONPATH=research python -m studies.paper_setting_smollm2 rows.jsonl --count       # what is done and what is left
    PYTHONPATH=research python -m studies.paper_setting_smollm2 rows.jsonl --report report.md

A run is one rule at one rate with one seed. Batches of 32 × 8 answers are sampled from the current policy, and each
answer is used once, in four updates. The model learns sums in words, of which it solves one to three in a hundred at
first. The reference of a ratio is the policy before the first update on a batch, recomputed by the code that trains.

A piece makes whole runs until the next one would not fit into its minutes. A run that is interrupted leaves no row and
is made again. All rules of a seed have the same problems and random numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bandpo.audit.metrics import Audit, logged
from bandpo.core.batch import Batch
from bandpo.core.methods import Method
from bandpo.core.schedules import TrainingState
from bandpo.core.text import as_method
from bandpo_lab.errors import InvalidValue
from bandpo_lab.evals.metrics import pass_at_k
from bandpo_lab.files.writing import drop_unfinished_line, replacing
from bandpo_lab.models.embedded import smollm2_path
from bandpo_lab.study.provenance import commit, machine, now
from bandpo_lab.tasks.sums import Sum, problems
from bandpo_lab.toy.fast_loop import HELD_OUT_SAMPLES, MAX_GRAD_NORM, PASS_AT, group_advantages
from studies.paper_setting import ARMS, CLIP, Cell, Study, count_lines, page, read_rows, row_of
from studies.whole_llama import Llama, Sampled, Sampler

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

LEVEL = 0.5
"""The held-out reward at which runs are compared. A run of TRL reached 0.7 after 100 updates."""
SMALLEST = {"AUC": 0.02, "entropy": 0.05, "pass@32": 0.03}
"""The smallest effect of interest of each metric, as in `studies.paper_setting`."""
BATCHES = 40
"""The batches of a run. In a run of TRL on the same task, the reward rose from 0.00 to 0.8 in 25."""
RATES = (2.5e-6, 5e-6, 1e-5, 2e-5)
SECONDS = 35.0
"""The time of a run on the GPU, a guess until a first piece has run."""
STUDY = Study(
    "The paper's setting, with all weights of SmolLM2-135M-Instruct",
    [
        Cell("pilot", 0, 1, RATES, BATCHES, SECONDS, range(290, 292), (CLIP, "Clip-Higher", "no bound")),
        Cell("fresh", 0, 1, RATES, BATCHES, SECONDS, range(300, 312)),
    ],
    LEVEL,
    SMALLEST,
    Path(__file__).parent / "paper-setting-smollm2-predictions.md",
)
EVAL_EVERY = 8
"""The batches between two evaluations on held-out problems."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run."""

    prompts: int = 32
    samples: int = 8
    updates: int = 4
    tokens: int = 96
    """The largest number of tokens of an answer."""
    pool: int = 3276
    """The number of problems to train on, from which each batch is drawn."""
    held_out: int = 150


class Encoded(NamedTuple):
    """Problems with the tokens of their prompts, which all have one length."""

    problems: Sequence[Sum]
    prompts: Int[Tensor, "problems time"]


def encode(tokenizer: Any, chosen: Sequence[Sum]) -> Encoded:
    """Return problems with the tokens of their prompts in the model's chat format.

    Raises:
        ValueError: Two prompts have different lengths.
    """
    chats = [[{"role": "user", "content": problem.prompt}] for problem in chosen]
    rows = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        for chat in chats
    ]
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise InvalidValue(
            f"the prompts have {min(lengths)} to {max(lengths)} tokens, and must have one length"
        )
    return Encoded(chosen, torch.tensor(rows))


def reward(text: str, answer: str) -> float:
    """Return 1 if the last whole number of an answer is right, and 0 otherwise.

    This is what `bandpo_lab.evals.grading` decides on such answers (a test), without its ten milliseconds.

    >>> reward("20 + 5 is 25.", "25"), reward("25, or 26", "25"), reward("twenty-five", "25"), reward("025", "25")
    (1.0, 0.0, 0.0, 1.0)
    """
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))


# The run --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    log: Sequence[Mapping[str, float]]
    scores: Mapping[str, float]

    def curve(self, name: str) -> list[float]:
        """Return a metric by batch; NaN where it is not logged."""
        return [line.get(name, float("nan")) for line in self.log]


class Trainer:
    """Runs with one model, whose first weights each run begins with.

    Args:
        folder: The folder of the model and its tokenizer.
        sizes: The sizes of the runs.
        device: The device.
        dtype: The dtype of the products.
        tokenizer: The tokenizer; by default the one in the folder.
    """

    def __init__(
        self, folder: Path, sizes: Sizes, device: str, dtype: torch.dtype, tokenizer: Any | None = None
    ):
        if tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokenizer: Any = tokenizer
        self.sizes = sizes
        self.model = Llama(folder, device, dtype)
        self.first = {name: weight.detach().clone() for name, weight in self.model.weights.items()}
        self.pool = encode(tokenizer, problems("train", sizes.pool))
        self.held_out = encode(tokenizer, problems("eval", sizes.held_out))
        self.sampler = Sampler(
            self.model,
            sizes.prompts * sizes.samples,
            self.pool.prompts.shape[1],
            sizes.tokens,
            self.tokenizer.eos_token_id,
        )

    def run(
        self, method: Method, rate: float, seed: int, batches: int, say: Callable[[str], None] = print
    ) -> Run:
        """Train from the first weights, and evaluate at the end and after each `EVAL_EVERY` batches."""
        began = time.monotonic()
        with torch.no_grad():
            for name, weight in self.model.weights.items():
                weight.copy_(self.first[name])
        optimizer = torch.optim.AdamW(
            self.model.weights.values(), rate, betas=(0.9, 0.999), weight_decay=0.01, fused=True
        )
        numbers = torch.Generator().manual_seed(seed)
        log: list[dict[str, float]] = []
        for batch in range(1, batches + 1):
            line = {"step": float(batch), **self._train_batch(method, optimizer, numbers, batch / batches)}
            if batch % EVAL_EVERY == 0 or batch == batches:
                line |= {f"eval/{name}": score for name, score in self.evaluate().items()}
                say(f"batch {batch} of {batches}: reward {line['reward']:.3f}, entropy {line['entropy']:.3f}")
            log.append(line)
        scores = {f"pass@{k}": log[-1][f"eval/pass@{k}"] for k in PASS_AT}
        return Run(log, scores | {"seconds": round(time.monotonic() - began, 1)})

    def _train_batch(
        self, method: Method, optimizer: torch.optim.Optimizer, numbers: torch.Generator, progress: float
    ) -> dict[str, float]:
        """Sample a batch, make the updates, and return the metrics."""
        began = time.monotonic()
        chosen = torch.randint(len(self.pool.problems), (self.sizes.prompts,), generator=numbers)
        chances = torch.rand(self.sampler.rows, self.sizes.tokens, generator=numbers)
        order = torch.randperm(self.sampler.rows, generator=numbers)
        sampled = self._sample(self.pool, chosen, chances)
        asked = [self.pool.problems[index] for index in chosen.tolist() for _ in range(self.sizes.samples)]
        rewards = self._rewards(sampled, asked)
        metrics = self._sampling_metrics(sampled, rewards) | {"seconds of sampling": time.monotonic() - began}
        prompts = self.pool.prompts[chosen].repeat_interleave(self.sizes.samples, 0)
        advantages = group_advantages(rewards, self.sizes.samples)
        metrics |= self._update(method, optimizer, prompts, sampled, advantages, order, progress)
        return metrics | {"seconds": time.monotonic() - began}

    def _sampling_metrics(self, sampled: Sampled, rewards: Float[Tensor, " answers"]) -> dict[str, float]:
        """Return the metrics of a sampled batch, under the names that TRL gives them where it has them."""
        is_end = sampled.tokens == self.tokenizer.eos_token_id
        deviations = rewards.view(-1, self.sizes.samples).std(1)
        return {
            "reward": float(rewards.mean()),
            "frac_reward_zero_std": float((deviations == 0).float().mean()),
            "entropy": float(sampled.entropy.sum() / sampled.mask.sum()),
            "completions/mean_length": float(sampled.mask.sum(1).float().mean()),
            "completions/clipped_ratio": float((~is_end).all(1).float().mean()),
        }

    def _update(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer,
        prompts: Int[Tensor, "answers prompt"],
        sampled: Sampled,
        advantages: Float[Tensor, " answers"],
        order: Int[Tensor, " answers"],
        progress: float,
    ) -> dict[str, float]:
        """Use each answer of a batch once, in ``sizes.updates`` updates, and return their metrics.

        Args:
            method: The method.
            optimizer: The optimizer.
            prompts: The prompt of each answer.
            sampled: The answers.
            advantages: Their advantages.
            order: The order in which they are used.
            progress: The part of the run that is done, on which the method may depend.
        """
        device = self.model.device
        prompts = prompts.to(device)
        advantages = advantages.to(device)
        minibatches = order.to(device).chunk(self.sizes.updates)
        # The ratio of the first update is 1: the reference comes from the code that trains, not from the sampler.
        with torch.no_grad():
            references = [self._logp(prompts[rows], sampled, rows)[0] for rows in minibatches]
        state = TrainingState(progress)
        resolved = method.resolve(state, strict=False)
        audits: list[Audit] = []
        norms: list[Tensor] = []
        for rows, reference in zip(minibatches, references, strict=True):
            logp, entropy = self._logp(prompts[rows], sampled, rows)
            mask = sampled.mask[rows, : logp.shape[1]]
            tokens = Batch.read(logp, reference, advantages[rows], mask, entropy=entropy, state=state)
            loss, _ = resolved.loss(tokens, aggregation=resolved.aggregation or "grpo")
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.weights.values(), MAX_GRAD_NORM))
            optimizer.step()
            audits.append(Audit.from_batch(tokens, method=resolved))
        audit = sum(audits[1:], audits[0])
        return {"grad_norm": fmean(float(norm) for norm in norms), **logged(audit.metrics())}

    def _sample(
        self, source: Encoded, chosen: Int[Tensor, " prompts"], chances: Float[Tensor, "answers time"]
    ) -> Sampled:
        """Sample answers to some problems."""
        device = self.model.device
        return self.sampler.sample(source.prompts[chosen].to(device), chances.to(device))

    def _rewards(self, sampled: Sampled, asked: Sequence[Sum]) -> Float[Tensor, " answers"]:
        """Return the reward of each answer."""
        rows = [ids[mask] for ids, mask in zip(sampled.tokens.cpu(), sampled.mask.cpu(), strict=True)]
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        scores = [reward(text, problem.answer) for text, problem in zip(texts, asked, strict=True)]
        return torch.tensor(scores)

    def _logp(
        self, prompts: Int[Tensor, "answers prompt"], sampled: Sampled, rows: Int[Tensor, " answers"]
    ) -> tuple[Float[Tensor, "answers time"], Float[Tensor, "answers time"]]:
        """Compute the log-probabilities of the tokens of some answers, with a gradient, and the entropy at each token.

        Both are in nats. The time ends with the longest of these answers.
        """
        longest = int(sampled.mask[rows].sum(1).max())
        tokens = sampled.tokens[rows, :longest]
        logits = self.model.logits(
            torch.cat([prompts, tokens[:, :-1]], 1), start=prompts.shape[1] - 1
        ).float()
        logp_all = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = -(logp_all.exp() * logp_all).sum(-1)
        mask = sampled.mask[rows, :longest]
        return logp_all.gather(-1, tokens[..., None])[..., 0] * mask, entropy * mask

    def evaluate(self) -> dict[str, float]:
        """Compute pass@k on held-out problems, with the same random numbers each time."""
        together = self.sampler.rows // HELD_OUT_SAMPLES
        numbers = torch.Generator().manual_seed(0)
        rewards: list[Tensor] = []
        for chosen in torch.arange(len(self.held_out.problems)).split(together):
            # The last call has the size of the others, so that one graph serves all.
            filled = torch.cat([chosen, chosen.new_zeros(together - len(chosen))])
            chances = torch.rand(together * HELD_OUT_SAMPLES, self.sizes.tokens, generator=numbers)
            sampled = self._sample(self.held_out, filled, chances)
            asked = [
                self.held_out.problems[index] for index in filled.tolist() for _ in range(HELD_OUT_SAMPLES)
            ]
            rewards.append(self._rewards(sampled, asked).view(together, -1)[: len(chosen)])
        return {f"pass@{k}": round(float(pass_at_k(torch.cat(rewards), k).mean()), 5) for k in PASS_AT}


# A piece --------------------------------------------------------------------------------------------------------------


def run_piece(file: Path, trainer: Trainer, minutes: float, study: Study = STUDY) -> int:
    """Make the runs that a file does not have, until the next would not fit; return how many were made.

    The time of the next run is taken to be that of the longest so far.
    """
    end = time.monotonic() + 60 * minutes
    file.touch()
    drop_unfinished_line(file)
    done = read_rows(file)
    longest = 0.0
    count = 0
    for cell, key in study.runs():
        if key in done:
            continue
        began = time.monotonic()
        if began + longest > end:
            break
        print(f"{key.cell}: {key.arm} at {key.rate:g}, seed {key.seed}", flush=True)
        run = trainer.run(as_method(ARMS[key.arm]), key.rate, key.seed, cell.batches)
        row = row_of(key, run, study.level) | {
            "seconds per batch": round(fmean(run.curve("seconds")), 3),
            "of which sampling": round(fmean(run.curve("seconds of sampling")), 3),
            "time": now(),
            "commit": commit(),
            "machine": torch.cuda.get_device_name() if trainer.model.device.type == "cuda" else machine(),
            "torch": torch.__version__,
        }
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        longest = max(longest, time.monotonic() - began)
        count += 1
    return count


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a piece, or write what the options ask for."""
    parser = argparse.ArgumentParser(prog="python -m studies.paper_setting_smollm2")
    parser.add_argument("rows", type=Path, help="one line for each run; made if it is not there")
    parser.add_argument("--minutes", type=float, default=11.0, help="the time of this piece")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--count", action="store_true", help="only print what is done, and what the rest costs"
    )
    parser.add_argument("--report", type=Path, help="only write the report to this file")
    options = parser.parse_args(arguments)
    if options.count or options.report:
        rows = read_rows(options.rows) if options.rows.exists() else {}
        if options.count:
            print("\n".join(count_lines(rows, STUDY, "GPU-hours")))
        else:
            with replacing(options.report) as unfinished:
                unfinished.write_text(page(rows, STUDY), encoding="utf-8")
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} sees no GPU; --device cpu takes about a minute for each batch"
        )
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    trainer = Trainer(smollm2_path(), Sizes(), options.device, dtype)
    made = run_piece(options.rows, trainer, options.minutes)
    print(f"{made} runs made")


if __name__ == "__main__":
    main()
