"""Train a policy with GRPO in a training loop of your own, with torch and bandpo only.

What it shows: `policy_loss` in a training loop with its inputs (new and old log-probabilities, advantages and a mask)
and metrics, and `Recorder`, which stores the tokens for `rlvet diagnose` and `bandpo audit`.

The task is to sort: the prompt has three digits, and the right answer has the same digits in ascending order, followed
by an end token. The policy is a transformer with two layers and random initial weights. The reward is the share of the
answer's four tokens that a completion has at the right positions; ``exact`` is the share of completions with all four.

What it needs: ``pip install ./packages/bandpo`` in a clone.

How to run it (about 15 seconds on one core)::

    python examples/own_loop.py
    python examples/own_loop.py --method "DAPO()" --record runs/own-loop && rlvet diagnose runs/own-loop

What one should see::

    step   1  reward 0.072  exact 0.000  clip_high 0.016  clip_low 0.253  ratio_mean 1.030
    step  10  reward 0.414  exact 0.004  clip_high 0.020  clip_low 0.125  ratio_mean 1.001
    ...
    step  60  reward 0.974  exact 0.895  clip_high 0.011  clip_low 0.011  ratio_mean 0.996
    reward rose from 0.21 to 0.95 under BandAbove()
"""

import argparse
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from bandpo import Batch, parse
from bandpo.audit import Recorder

DIGITS = 10
END = 10  # the end token of an answer
ASK = 11  # the last token of a prompt
VOCABULARY = 12
PROMPT_LENGTH = 3
ANSWER_LENGTH = PROMPT_LENGTH + 1
MAX_LENGTH = ANSWER_LENGTH + 1


class Block(nn.Module):
    """A transformer layer: causal attention, then a feed-forward network, each added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.network_norm = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, time, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_output(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.network(self.network_norm(x))


class Policy(nn.Module):
    """A causal transformer from token ids of shape (batch, time) to the logits of the next tokens."""

    def __init__(self, width: int = 48, layers: int = 2, heads: int = 4):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(PROMPT_LENGTH + 1 + MAX_LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, ids):
        positions = torch.arange(ids.shape[1])
        return self.head(self.blocks(self.token(ids) + self.position(positions)))


@torch.no_grad()
def sample(policy, prompts):
    """Sample a completion of ``MAX_LENGTH`` tokens for each prompt, at temperature 1 over the whole vocabulary."""
    ids = prompts
    for _ in range(MAX_LENGTH):
        logits = policy(ids)[:, -1]
        next_ids = torch.multinomial(logits.softmax(-1), 1)
        ids = torch.cat([ids, next_ids], dim=1)
    return ids[:, prompts.shape[1] :]


def log_probabilities(policy, prompts, completions):
    """Return the log-probability and the entropy of each completion token, both of shape (batch, time)."""
    ids = torch.cat([prompts, completions], dim=1)
    # Shifted by one, as the logits at a position are those of the next token.
    logits = policy(ids)[:, prompts.shape[1] - 1 : -1]
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(2, completions.unsqueeze(2)).squeeze(2), entropy.detach()


def answer_mask(completions):
    """Return a mask with 1 up to and including the first end token, and 0 after it."""
    ends = (completions == END).long()
    ends_before = ends.cumsum(1) - ends
    return (ends_before == 0).float()


def rewards_of(prompts, completions, mask):
    """Return the share of the answer's tokens that each completion has at the right positions."""
    digits = prompts[:, :PROMPT_LENGTH].sort(dim=1).values
    ends = torch.full_like(digits[:, :1], END)
    answers = torch.cat([digits, ends], dim=1)
    is_correct = (completions[:, :ANSWER_LENGTH] == answers) & (mask[:, :ANSWER_LENGTH] > 0)
    return is_correct.float().mean(1)


def train(arguments):
    """Train, print a line every 10 steps, and return the rewards of all steps."""
    torch.manual_seed(arguments.seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=arguments.learning_rate)
    method = parse(arguments.method)
    recorder = Recorder(arguments.record, method=method) if arguments.record else None
    rewards_by_step = []

    with recorder or nullcontext():
        for step in range(1, arguments.steps + 1):
            # A group consists of several completions of one prompt.
            digits = torch.randint(DIGITS, (arguments.prompts, PROMPT_LENGTH))
            asks = torch.full((arguments.prompts, 1), ASK)
            prompts = torch.cat([digits, asks], dim=1).repeat_interleave(arguments.group, dim=0)
            groups = torch.arange(arguments.prompts).repeat_interleave(arguments.group)

            completions = sample(policy, prompts)
            mask = answer_mask(completions)
            rewards = rewards_of(prompts, completions, mask)

            # GRPO's advantages: the rewards, normalised by mean and standard deviation of their group.
            grouped = rewards.view(-1, arguments.group)
            centred = grouped - grouped.mean(1, keepdim=True)
            advantages = (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()

            # The old log-probabilities are the same for all updates on this batch.
            with torch.no_grad():
                logp_old, _ = log_probabilities(policy, prompts, completions)

            for update in range(arguments.updates):
                logp, entropy = log_probabilities(policy, prompts, completions)
                # One batch for the loss and the record.
                batch = Batch.read(logp, logp_old, advantages, mask, entropy=entropy)
                loss, metrics = method.loss(batch)
                if recorder:
                    recorder.add(
                        batch,
                        tokens=completions,
                        reward=rewards,
                        group=groups,
                        truncated=(completions != END).all(1),
                        step=step,
                        generation=step,
                        update=update,
                    )
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()

            rewards_by_step.append(rewards.mean().item())
            if step == 1 or step % 10 == 0:
                # The metrics of the last update: in the first one every ratio is 1, and no token is clipped.
                names = ("clip_high", "clip_low", "ratio_mean")
                values = "  ".join(f"{name} {metrics[name]:.3f}" for name in names)
                exact = (rewards == 1).float().mean()
                print(
                    f"step {step:3}  reward {rewards_by_step[-1]:.3f}  exact {exact:.3f}  {values}",
                    flush=True,
                )
    return rewards_by_step


def main():
    """Parse the command line, train, and print the mean rewards of the first and last steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="BandAbove()", help="any clip rule or method of bandpo, as text")
    parser.add_argument("--steps", type=int, default=60, help="generated batches")
    parser.add_argument("--updates", type=int, default=4, help="optimizer steps on each batch")
    parser.add_argument("--prompts", type=int, default=32, help="prompts in a batch")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", help="folder for the tokens of every loss")
    arguments = parser.parse_args()

    rewards = train(arguments)
    tenth = max(1, len(rewards) // 10)
    first = sum(rewards[:tenth]) / tenth
    last = sum(rewards[-tenth:]) / tenth
    print(f"reward rose from {first:.2f} to {last:.2f} under {arguments.method}")
    if arguments.record:
        print(f"tokens are in {arguments.record}: rlvet diagnose {arguments.record}")


if __name__ == "__main__":
    main()
