"""Sabotages of a loss that a user hands to `bandpo.testing.assert_is` or to `bandpo.certify`."""

import re
from functools import partial

import torch
from integrations.sabotages.table import Row

import method_references as reference
from bandpo import FixedClip, certify, policy_loss
from bandpo.core.batch import Batch
from bandpo.testing import assert_is


def averaged(values, mask, average):
    """Compute the mean over tokens, or over sequences without the empty ones, of means or of sums."""
    if average == "seq-mean-token-mean":
        return reference.mean_of_sequence(values, mask).sum() / mask.any(1).sum()
    if average == "seq-mean-token-sum":
        return (values * mask).sum() / mask.any(1).sum()
    return (values * mask).sum() / mask.sum()


def textbook(formula, average="token-mean"):
    """Return a loss for `assert_is` by a formula of `method_references`."""

    def loss(logp, logp_old, advantages, mask, *, weights=None):
        values = formula(logp, logp_old, advantages[:, None], mask)
        return averaged(values if weights is None else values * weights, mask, average)

    return loss


# --- assert_is


def ppo_with(change):
    """PPO's loss, token by token, of a ratio, advantages and more that a function changes."""

    def loss(logp, logp_old, advantages, mask):
        return change(logp, logp_old, advantages[:, None].expand_as(mask), mask)

    return loss


def surrogate(logp, logp_old, advantages, mask, **clip):
    return averaged(reference.ppo(logp, logp_old, advantages, mask, **clip), mask, "token-mean")


def clamped(logp, logp_old, advantages, mask, limit=20.0):
    ratio = (logp - logp_old).clamp(-limit, limit).exp()
    return averaged(reference.surrogate(ratio, 0.8, 1.2, advantages), mask, "token-mean")


MUTANTS = {
    "a wider bound": (partial(surrogate, high=0.28), "clips at 0.8 and 1.28"),
    "a bound wider by 0.01": (partial(surrogate, high=0.21), "clips at 0.8 and 1.21"),
    "a narrower lower bound": (partial(surrogate, low=0.19), "clips at 0.81 and 1.2"),
    "no clip": (lambda p, q, a, mask: -averaged((p - q).exp() * a, mask, ""), "no clip"),
    "a dual clip": (partial(surrogate, dual=3.0), "dual clip of 3"),
    "the mean over sequences": (
        lambda p, q, a, mask: averaged(reference.ppo(p, q, a, mask), mask, "seq-mean-token-mean"),
        "averages per sequence",
    ),
    "a sum": (lambda p, q, a, mask: (reference.ppo(p, q, a, mask) * mask).sum(), "sums over all tokens"),
    "a factor": (lambda *tensors: 1.001 * surrogate(*tensors), "every token is 1.001 times as expected"),
    "the sign": (lambda *tensors: -surrogate(*tensors), "every token is -1 times as expected"),
    "a clamp of the ratio": (clamped, "log r clamped to ±20"),
    "no mask": (lambda p, q, a, mask: reference.ppo(p, q, a, mask).sum() / mask.sum(), "another mask"),
    "a detached loss": (lambda p, q, a, mask: surrogate(p.detach(), q, a, mask) + 0 * p.sum(), "no gradient"),
    "an entropy bonus": (
        lambda p, q, a, mask: surrogate(p, q, a, mask) + 0.01 * averaged(p, mask, ""),
        "every token",
    ),
    "the old policy of the next token": (
        lambda p, q, a, mask: surrogate(p, q.roll(1, 1), a, mask),
        "tokens that the method blocks have a gradient",
    ),
    "the ratio of two tokens": (
        lambda p, q, a, mask: averaged(
            reference.surrogate((p - q + (p - q).roll(1, 1)).exp(), 0.8, 1.2, a), mask, "token-mean"
        ),
        "",
    ),
    "not a number": (lambda p, q, a, mask: surrogate(p, q, a, mask) * torch.nan, "not finite"),
    "a mean where A = 0": (lambda p, q, a, mask: surrogate(p, q, a - a.mean(), mask), ""),
}


# --- bandpo.certify


def batch(seed=0, rows=12, columns=10, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    old = -6 * torch.rand(rows, columns, generator=generator, dtype=dtype) - 0.05
    logp = (old + 0.5 * torch.randn(rows, columns, generator=generator, dtype=dtype)).clamp(max=-1e-3)
    advantages = torch.randn(rows, 1, generator=generator, dtype=dtype)
    mask = torch.arange(columns) < torch.randint(2, columns + 1, (rows, 1), generator=generator)
    return logp, old, advantages.expand(rows, columns), mask.to(dtype)


def ppo(low=0.2, high=0.2, clamp=20.0, scale=1.0, offset=0.0, advantage=lambda a: a, rows=1.0):
    """Compute PPO's loss as a training loop would."""

    def loss(logp, old, advantages, mask):
        ratio = (logp - old).clamp(-clamp, clamp).exp()
        a = advantage(advantages)
        each = -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a) + offset * logp
        return scale * (rows * each * mask).sum() / mask.sum()

    return loss


def certified(loss, given=None, layout=None, weights=None, **settings):
    logp, *rest = given or batch()
    return certify(
        lambda x: loss(x, *rest), Batch.read(logp, *rest, layout=layout, weights=weights), **settings
    )


CHANGED = {
    "another clip": (ppo(0.2, 0.28), r"it is that of FixedClip\(low=0.2, high=0.28\)"),
    "no clip": (ppo(1.0, 9e9), r"it is that of Unclipped\(\)"),
    "a hard-coded clip": (
        ppo(0.01, 0.01),
        "0 tokens that the method blocks have a gradient, .* that it keeps have none",
    ),
    "a clamp": (ppo(clamp=0.1), "that it keeps have none: another clip or mask, or a clamp of the ratio"),
    "a factor": (ppo(scale=0.5), "every token is 0.5 times as expected"),
    "advantages clamped": (
        ppo(advantage=lambda a: a.clamp(-0.3, 0.3)),
        "each sequence has a factor of its own",
    ),
    "a sign": (ppo(scale=-1.0), "every token is -1 times as expected"),
    "a term": (ppo(offset=0.1), "is added to every token"),
    "padding": (lambda x, *rest: ppo()(x, *rest[:2], torch.ones_like(rest[2])), "another mask"),
    "another average": (
        lambda x, old, a, mask: policy_loss(x, old, a, mask, method=FixedClip(), aggregation="grpo").loss,
        "each sequence has a factor of its own",
    ),
    "nothing": (lambda x, *rest: 0 * x.sum(), "no gradient reached the log-probabilities"),
    "not finite": (lambda x, *rest: x.sum() * float("inf"), "it is not finite"),
    "another loss": (
        lambda x, old, a, mask: -(x * a * mask).sum() / mask.sum(),
        "that the method blocks have a gradient",
    ),
}


def check_mutant(change, folder, monkeypatch):
    assert_is(ppo_with(change), "PPO()")


def certify_changed(loss, folder, monkeypatch):
    certified(loss, method="FixedClip(0.2)")


def two_differences(folder, monkeypatch):
    assert_is(textbook(partial(reference.ppo, dual=3.0), "seq-mean-token-mean"), "PPO()")


def per_sequence(folder, monkeypatch):
    assert_is(textbook(reference.gspo, "seq-mean-token-mean"), "GRPO(3e-4, 4e-4)")


def per_token(folder, monkeypatch):
    assert_is(textbook(reference.ppo, "seq-mean-token-mean"), "GSPO(0.2, 0.2)")


WHERE = r"(?=(.|\n)*batch '(near|usual|far)', sequence \d+, token \d+: \S+, expected )(.|\n)*"
ROWS = {}
for index, (name, (change, cause)) in enumerate(MUTANTS.items()):
    sentence = rf"{WHERE}Likely difference: .*{re.escape(cause)}"
    ROWS[f"assert_is: {name}"] = Row(
        partial(check_mutant, change), sentence, AssertionError, slow=index % 3 > 0
    )
for name, run, cause in (
    ("two differences", two_differences, "averages per sequence; dual clip of 3"),
    ("a level of sequences", per_sequence, "ratio of the sequence"),
    ("a level of tokens", per_token, "ratio of each token"),
):
    ROWS[f"assert_is: {name}"] = Row(run, f"{WHERE}Likely difference: {cause}", AssertionError)
for name, (loss, cause) in CHANGED.items():
    sentence = rf"gradient differs from FixedClip.*{cause}.*sequence \d+, token \d+: "
    ROWS[f"certify: {name}"] = Row(partial(certify_changed, loss), sentence)
