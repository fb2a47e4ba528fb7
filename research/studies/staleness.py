"""The study of stale data with a small network: a plain loop around `bandpo.policy_loss`, three times as fast as TRL.

    PYTHONPATH=research python -m studies.staleness runs.jsonl --bases FOLDER
    PYTHONPATH=research python -m studies.staleness runs.jsonl --bases FOLDER --count

The first continues after the last run in the file.

A batch is sampled from the current policy and trained on ``lag`` batches later. The predictions are in
staleness-predictions.md, which was committed before the first run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from bandpo import (
    Band,
    BandAbove,
    Batch,
    FixedClip,
    Loosest,
    Method,
    Rows,
    TotalVariation,
    TwoSided,
    policy_loss,
)
from bandpo.audit.metrics import Audit
from bandpo_lab.evals.metrics import pass_at_k
from bandpo_lab.files.writing import drop_unfinished_line
from bandpo_lab.tasks.multiplication import MAX_COMPLETION_LENGTH, SCRATCHPAD, Product, problems, tokenizer
from rlvet.runs.files import read_jsonl
from studies.rewards import any_opener

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

CLIP, ABOVE = FixedClip(0.2), BandAbove().clip
ARMS = {
    "clip 0.2": CLIP,
    "Clip-Higher": FixedClip(0.2, 0.28),
    "clip [.8, 2]": FixedClip(0.2, 1.0),
    "Band": Band(),
    "BandAbove": ABOVE,
    "room by mass": TwoSided(lower=CLIP, upper=Loosest(CLIP, Band(TotalVariation(), 0.02))),
    "no upper bound": FixedClip(0.2, float("inf")),
    "relaxed Band": Loosest(Band(), FixedClip(0.2, 0.28)),
}
RANDOM = "blocked at random"
"""BandAbove, without a random share of the gradient of rare tokens with A > 0: the share that clip 0.2 blocked."""
CURVES = ("reward", "entropy", "scratchpad", "blocked", "clip would block")
"""The curves of a row, with a value for each batch.

- ``reward``: mean reward; ``entropy``: in nats per token; ``scratchpad``: share of completions with a scratchpad.
- ``blocked``: share of the gradient of rare tokens with A > 0 that the arm blocked in the batch that is trained on.
- ``clip would block``: the share that clip 0.2 would have blocked.
"""
PROMPTS, GROUP = 8, 16
HELD_OUT, ASKED = 32, 32
"""The numbers of problems and of samples of each, for the final pass@32."""
RARE, STD_EPSILON = 0.1, 1e-4
"""The probability below which a token is rare; the constant that TRL adds to a group's standard deviation."""
SHORT = 12
"""The tokens of the longest direct answer with its prompt, rounded up. Longer sequences have a separate pass."""


@dataclass(frozen=True)
class Cell:
    """A setting of the study: all its arms at all its rates and seeds."""

    name: str
    lag: int
    epochs: int
    minibatches: int
    rates: Sequence[float]
    arms: Sequence[str]
    batches: int = 60
    seeds: Sequence[int] = range(20, 32)


_SEVEN = [*ARMS][:7]
_FOUR = ["clip 0.2", "clip [.8, 2]", "BandAbove", "no upper bound"]
CELLS = [
    Cell("lag 4", 4, 1, 4, [7e-5, 1.4e-4, 2.8e-4, 5.6e-4], [*_SEVEN, RANDOM]),
    Cell("lag 8", 8, 1, 4, [7e-5, 1.4e-4, 2.8e-4], _SEVEN),
    Cell("long run", 4, 1, 4, [1.4e-4, 2.8e-4], ["Band", *_FOUR], batches=140),
    Cell("lag 0", 0, 1, 4, [1.4e-4, 2.8e-4, 5.6e-4], _FOUR),
    Cell("lag 4, one update", 4, 1, 1, [1.4e-4, 2.8e-4, 5.6e-4], _FOUR),
    Cell("lag 4, 4 x 4", 4, 4, 4, [7e-5, 1.4e-4, 2.8e-4], _FOUR),
    Cell("lag 0, 4 x 4", 0, 4, 4, [7e-5, 1.4e-4, 2.8e-4], _FOUR),
    Cell("lag 2", 2, 1, 4, [1.4e-4, 2.8e-4, 5.6e-4], _FOUR),
    Cell(
        "lag 0, 400 batches",
        0,
        4,
        4,
        [7e-5],
        ["clip 0.2", "Clip-Higher", "Band", "relaxed Band", "BandAbove"],
        batches=400,
        seeds=range(20, 26),
    ),
    Cell("lag 8, long run", 8, 1, 4, [7e-5, 1.4e-4, 2.8e-4], _FOUR, batches=140),
]
"""The cells in order. The last one was added after the results of the others were known."""
FURTHER = [replace(CELLS[1], rates=[3.5e-5, 5.6e-4]), replace(CELLS[2], rates=[7e-5])]
"""Rates that were added later, because the best rates were at the end of their range. No verdict uses them."""


class Run(NamedTuple):
    """A training run. Even seeds begin from base model a, odd ones from b."""

    cell: str
    arm: str
    rate: float
    seed: int


class Drawn(NamedTuple):
    """Sampled completions of prompts of one length."""

    prompts: Int[Tensor, "samples prompt"]
    tokens: Int[Tensor, "samples time"]
    mask: Float[Tensor, "samples time"]
    logp: Float[Tensor, "samples time"]
    advantages: Float[Tensor, " samples"]


def forward(
    model: Any, ids: Int[Tensor, "rows time"], past: Tensor | None = None, cached: int = 0
) -> Float[Tensor, "rows time vocabulary"]:
    """Return the logits of a Qwen2 model, bit for bit those of transformers, but much faster for single tokens.

    Args:
        model: The model.
        ids: The new tokens.
        past: The cache of keys and values (layers, 2, rows, heads, all time, size), which is updated.
        cached: The number of tokens that are already in the cache.
    """
    config, inner = model.config, model.model
    norm = partial(functional.rms_norm, normalized_shape=(config.hidden_size,), eps=config.rms_norm_eps)
    heads = config.num_attention_heads
    rows, time = ids.shape
    cos, sin = inner.rotary_emb(model.lm_head.weight, torch.arange(cached, cached + time)[None])

    def rotate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    x = inner.embed_tokens(ids)
    for depth, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        y = norm(x, weight=layer.input_layernorm.weight)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (project(y).view(rows, time, heads, -1).transpose(1, 2) for project in projections)
        q, k = rotate(q), rotate(k)
        if past is not None:
            past[depth, 0, :, :, cached : cached + time] = k
            past[depth, 1, :, :, cached : cached + time] = v
            k, v = past[depth, :, :, :, : cached + time]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=time > 1)
        x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
        y = norm(x, weight=layer.post_attention_layernorm.weight)
        x = x + mlp.down_proj(functional.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
    return model.lm_head(norm(x, weight=inner.norm.weight))


@torch.no_grad()
def draw(model: Any, prompts: Tensor, chances: Float[Tensor, "samples time"]) -> tuple[Tensor, ...]:
    """Sample completions at temperature 1. The random numbers ``chances[:, t]`` select token t.

    Returns:
        Tokens, mask, log-probabilities (samples, time), and the mean entropy in nats per token.
    """
    config, (samples, longest), start = model.config, chances.shape, prompts.shape[1]
    tokens = torch.full(chances.shape, config.pad_token_id)
    mask, logp, entropy = torch.zeros(3, *chances.shape)
    alive, heads = torch.arange(samples), config.num_attention_heads
    size = config.hidden_size // heads
    past = torch.empty(config.num_hidden_layers, 2, samples, heads, start + longest, size)
    logits = forward(model, prompts.repeat_interleave(samples // len(prompts), 0), past)[:, -1]
    for t in range(longest):
        every = logits.log_softmax(-1)
        edges = every.exp().cumsum(-1)[:, :-1].contiguous()
        token = torch.searchsorted(edges, chances[alive, t, None])
        tokens[alive, t], logp[alive, t] = token[:, 0], every.gather(-1, token)[:, 0]
        mask[alive, t], entropy[alive, t] = 1.0, -(every.exp() * every).sum(-1)
        going = token[:, 0] != config.eos_token_id
        if t + 1 == longest or not going.any():
            break
        if not going.all():
            alive, token, past = alive[going], token[going], past[:, :, going]
        logits = forward(model, token, past, start + t)[:, -1]
    return tokens, mask, logp, (entropy * mask).sum() / mask.sum()


def push(model: Any, batch: Drawn, method: Method, dropped: float, luck: torch.Generator) -> list[Audit]:
    """Add the gradient of one minibatch, averaged over tokens and sequences, and return audits of the clip.

    Args:
        model: The policy.
        batch: The minibatch.
        method: The method.
        dropped: The share of rare tokens with A > 0 whose gradient is dropped at random.
        luck: The random generator for this.
    """
    audits = []
    prompt = batch.prompts.shape[1]
    total = prompt + batch.mask.sum(1)
    for rows in (total <= SHORT, total > SHORT):
        if not rows.any():
            continue
        prompts, tokens, mask, old = (x[rows] for x in batch[:4])
        length = int(mask.sum(1).max())
        tokens, mask, old = tokens[:, :length], mask[:, :length], old[:, :length]
        logits = forward(model, torch.cat([prompts, tokens], 1))[:, prompt - 1 : -1]
        logp = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        advantages = batch.advantages[rows, None].expand_as(old)
        rare_winners = (advantages > 0) & (old.exp() < RARE)
        lost = rare_winners & (torch.rand(old.shape, generator=luck) < dropped)
        advantages = advantages.masked_fill(lost, 0.0)
        # Each row is one sequence, so the batch is not packed.
        loss, _ = policy_loss(
            logp,
            old,
            advantages,
            mask,
            method=method,
            aggregation="grpo",
            normalizer=len(batch.mask),
            layout=Rows(),
        )
        loss.backward()
        audits.append(
            Audit.from_batch(
                Batch.read(logp, old, advantages, mask, layout=Rows()),
                method=method,
                counterfactuals={"clip": CLIP},
            )
        )
    return audits


def train(cell: Cell, run: Run, base: Path, yoke: Sequence[float | None]) -> dict[str, Any]:
    """Train one run, and return its row: curves, and scores of the final policy.

    Args:
        cell: The setting.
        run: The run.
        base: The folder of the base model.
        yoke: For `RANDOM`, the share of the gradient of rare tokens with A > 0 to drop, for each batch.
    """
    from transformers import AutoModelForCausalLM

    began, text = time.process_time(), tokenizer()
    model = AutoModelForCausalLM.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), run.rate, betas=(0.9, 0.99), weight_decay=0.0)
    # All arms and rates of a seed use the same random numbers.
    numbers, luck = (torch.Generator().manual_seed(seed) for seed in (run.seed, run.seed + 1000))
    method = Method(ARMS.get(run.arm, ABOVE))
    pool, samples = problems("train", 6480), PROMPTS * GROUP
    curves: dict[str, list[float | None]] = {name: [] for name in CURVES}

    def rollout(
        asked: Sequence[Product], each: int, chances: Tensor
    ) -> tuple[Drawn, Tensor, dict[str, float | None]]:
        """Return samples, their rewards (problems, each), and the values of three curves."""
        prompts = torch.tensor([text(p.prompt).input_ids for p in asked])
        tokens, mask, logp, entropy = draw(model, prompts, chances)
        texts = text.batch_decode(tokens, skip_special_tokens=True)
        rewards = torch.tensor(any_opener(texts, [p.answer for p in asked for _ in range(each)]))
        groups = rewards.view(-1, each)
        centred = groups - groups.mean(1, keepdim=True)
        advantages = (centred / (groups.std(1, keepdim=True) + STD_EPSILON)).flatten()
        point: dict[str, float | None] = {
            "reward": float(rewards.mean()),
            "entropy": float(entropy),
            "scratchpad": sum(t.startswith(SCRATCHPAD) for t in texts) / len(texts),
        }
        return Drawn(prompts.repeat_interleave(each, 0), tokens, mask, logp, advantages), groups, point

    waiting: deque[Drawn] = deque()
    for _ in range(cell.batches):
        asked = [pool[k] for k in torch.randint(len(pool), (PROMPTS,), generator=numbers)]
        chances = torch.rand(samples, MAX_COMPLETION_LENGTH, generator=numbers)
        order = torch.stack([torch.randperm(samples, generator=numbers) for _ in range(cell.epochs)])
        batch, _, point = rollout(asked, GROUP, chances)
        waiting.append(batch)
        audits: list[Audit] = []
        if len(waiting) > cell.lag:
            old = waiting.popleft()
            dropped = (yoke[len(curves["blocked"])] if yoke else None) or 0.0
            for part in order.view(cell.epochs * cell.minibatches, -1):
                optimizer.zero_grad()
                audits += push(model, Drawn(*(x[part] for x in old)), method, dropped, luck)
                if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                    optimizer.step()
            metrics = sum(audits[1:], audits[0]).metrics()
            point["blocked"] = metrics.get("blocked_mass_below_0.1")
            point["clip would block"] = metrics.get("if/clip/blocked_mass_below_0.1")
        for name, value in point.items():
            curves[name].append(value if value is None else round(value, 3))
    chances = torch.rand(HELD_OUT * ASKED, MAX_COMPLETION_LENGTH, generator=torch.Generator().manual_seed(0))
    _, rewards, _ = rollout(problems("eval", HELD_OUT), ASKED, chances)
    return {
        **run._asdict(),
        "seconds": round(time.process_time() - began, 1),
        "end": round(float(rewards.mean()), 4),
        "pass@32": round(float(pass_at_k(rewards, ASKED).mean()), 4),
        **{name: [x if x is None else round(x, 3) for x in values] for name, values in curves.items()},
    }


def runs(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Run]]:
    """Yield all runs in order: cell by cell, with all arms and rates of a seed before the next seed."""
    for cell in cells:
        for seed in cell.seeds:
            for rate in cell.rates:
                for arm in cell.arms:
                    yield cell, Run(cell.name, arm, rate, seed)


def read_runs(file: Path) -> dict[Run, dict[str, Any]]:
    """Return the rows of the finished runs."""
    return {Run(*(row[name] for name in Run._fields)): row for _, row in read_jsonl(file)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the runs that the file of results does not contain, one after the other in one thread."""
    parser = argparse.ArgumentParser(prog="python -m studies.staleness")
    parser.add_argument("results", type=Path, help="one line for each run; made if it is not there")
    parser.add_argument("--bases", type=Path, required=True, help="folder of the base models `a` and `b`")
    parser.add_argument("--count", action="store_true", help="only say how much is done")
    asked = parser.parse_args(arguments)
    asked.results.touch()
    drop_unfinished_line(asked.results)
    done = read_runs(asked.results)
    if asked.count:
        for cell in (*CELLS, *FURTHER):
            is_done = [run in done for _, run in runs([cell])]
            print(f"{cell.name}: {sum(is_done)} of {len(is_done)} runs")
        return
    torch.set_num_threads(1)  # the order of sums, hence the bits, would depend on their number
    with asked.results.open("a") as lines:
        for cell, run in runs([*CELLS, *FURTHER]):
            if run in done:
                continue
            yoke = done[run._replace(arm="clip 0.2")]["blocked"] if run.arm == RANDOM else []
            done[run] = row = train(cell, run, asked.bases / "ab"[run.seed % 2], yoke)
            lines.write(json.dumps(row) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
