"""A small GRPO loop in torch whose engine is a copy of the policy, with a sync that can be dropped.

It trains a recurrent policy over 16 tokens. The reward is the share of even tokens in an answer, so that each batch has
a signal. The engine samples and reports log-probabilities, in bfloat16 if asked for; the log has the metrics of verl's
rollout correction.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

TOKENS, LENGTH, PROMPTS, GROUP = 16, 8, 8, 8


class Policy(nn.Module):
    """A GRU over tokens, whose first state is an embedding of the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.Embedding(PROMPTS, 32)
        self.tokens = nn.Embedding(TOKENS + 1, 32)
        self.cell = nn.GRUCell(32, 32)
        self.head = nn.Linear(32, TOKENS)

    def log_probabilities(self, prompts: Tensor, ids: Tensor) -> Tensor:
        """Return the log-probabilities of the tokens of answers, (answers, LENGTH)."""
        state = self.prompts(prompts)
        last = torch.full_like(prompts, TOKENS)
        columns = []
        for position in range(ids.shape[1]):
            state = self.cell(self.tokens(last), state)
            logp = self.head(state).float().log_softmax(-1)
            last = ids[:, position]
            columns.append(logp.gather(1, last[:, None]))
        return torch.cat(columns, 1)

    @torch.no_grad()
    def sample(self, prompts: Tensor, generator: torch.Generator) -> Tensor:
        """Sample answers, (answers, LENGTH)."""
        state = self.prompts(prompts)
        last = torch.full_like(prompts, TOKENS)
        columns = []
        for _ in range(LENGTH):
            state = self.cell(self.tokens(last), state)
            probabilities = self.head(state).float().softmax(-1)
            last = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
            columns.append(last)
        return torch.stack(columns, 1)


class Loop(NamedTuple):
    """The settings of a run."""

    seed: int
    sync_every: int = 1
    """Steps from one sync of the weights to the next; 0 if the engine keeps its first weights."""
    low_precision: bool = False
    """True if the engine computes in bfloat16."""
    learning_rate: float = 1e-3
    steps: int = 60
    decay: bool = False
    """True if the learning rate falls to 0 linearly."""


def train(loop: Loop) -> list[dict[str, float]]:
    """Train, and return the log."""
    torch.manual_seed(loop.seed)
    generator = torch.Generator().manual_seed(loop.seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), loop.learning_rate)
    engine = copy.deepcopy(policy)
    if loop.low_precision:
        engine = engine.bfloat16()
    rows = []
    for step in range(1, loop.steps + 1):
        rate = loop.learning_rate * (1 - (step - 1) / loop.steps if loop.decay else 1.0)
        optimizer.param_groups[0]["lr"] = rate
        if loop.sync_every and (step - 1) % loop.sync_every == 0:
            # Copies into bfloat16 round the weights.
            engine.load_state_dict(policy.state_dict())
        prompts = torch.arange(PROMPTS).repeat_interleave(GROUP)
        ids = engine.sample(prompts, generator)
        reward = (ids % 2 == 0).float().mean(1)
        grouped = reward.view(PROMPTS, GROUP)
        centred = grouped - grouped.mean(1, keepdim=True)
        advantages = (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
        with torch.no_grad():
            rollout = engine.log_probabilities(prompts, ids)
        logp = policy.log_probabilities(prompts, ids)
        log_ratio = (logp - rollout).detach()
        ratio = log_ratio.exp()
        weights = ratio.clamp(max=2.0)
        loss = -(weights * advantages[:, None] * (logp - logp.detach()).exp()).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        normed = weights / weights.mean()
        row = {
            "step": float(step),
            "critic/score/mean": reward.mean(),
            "actor/pg_loss": loss.detach(),
            "actor/grad_norm": norm,
            "actor/lr": rate,
            "rollout_corr/k3_kl": (ratio - 1 - log_ratio).mean(),
            "rollout_corr/rollout_is_mean": weights.mean(),
            "rollout_corr/rollout_is_eff_sample_size": 1 / normed.square().mean(),
        }
        rows.append({name: float(value) for name, value in row.items()})
    return rows
