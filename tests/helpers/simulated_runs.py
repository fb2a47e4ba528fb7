"""Runs that are written by hand: a record with every fault that the doctor knows, and logs in TRL's form."""

import json
import math

import numpy as np
import torch

from bandpo.audit import Recorder

PROMPTS, GROUP, VOCABULARY, UPDATES = 8, 4, 24, 3

LENGTH = 12
"""Tokens of each answer, unless another length is asked for."""


def same(z, *_):
    return z


def simulate(folder, seed=0, *, batches=8, length=LENGTH, move=0.05, parts=False, **fault):
    """Write the record of a run whose logits are drawn anew for each prompt and place, so that entropies are exact.

    Args:
        folder: The folder of the record.
        seed: The seed of all that is drawn.
        batches: Generated batches.
        length: Tokens of each answer.
        move: Noise that an update adds to the logits.
        parts: Whether each update is on a part of its batch.
        **fault: Functions that replace what a healthy run has: ``engine(z, batch, g)`` the engine's logits,
            ``reports(z, batch)`` those whose log-probabilities it reports, ``old(z, g)`` and ``new(z, g)`` the
            trainer's, ``ids(drawn, g)`` the tokens, ``reward(ids, g)`` theirs, ``spoil(columns)`` the record.
    """
    g = torch.Generator().manual_seed(seed)
    with Recorder(folder, method="FixedClip(0.2)", anchor=fault.get("anchor", "trainer")) as recorder:
        for batch in range(batches):
            z = (0.5 + 3 * torch.rand(PROMPTS, 1, length, 1, generator=g)).expand(-1, GROUP, -1, -1)
            z = (z * torch.randn(PROMPTS, 1, length, VOCABULARY, generator=g)).flatten(0, 1)
            sampler = fault.get("engine", same)(z, batch, g)
            drawn = torch.multinomial(sampler.softmax(-1).flatten(0, 1), 1, generator=g).view(len(z), -1, 1)
            reported = fault["reports"](z, batch) if "reports" in fault else sampler
            ids = fault.get("ids", same)(drawn, g)
            if "ids" in fault:
                # The trainer sees a changed token before the next one, whose logits are others.
                follows_change = (ids != drawn).roll(1, 1)
                follows_change[:, 0] = False
                z = torch.where(follows_change, z + torch.randn(z.shape, generator=g), z)
            reward = fault.get("reward", even_share)(ids.squeeze(2), g)
            advantages = (reward.view(-1, GROUP) - reward.view(-1, GROUP).mean(1, keepdim=True)).flatten()
            old = logp_of(fault.get("old", same)(z, g), ids)
            for update in range(UPDATES):
                moved = z + update * move * torch.randn(z.shape, generator=g)
                new = fault.get("new", same)(moved, g).log_softmax(-1)
                columns = {
                    "logp": logp_of(new, ids),
                    "logp_old": old,
                    "logp_rollout": logp_of(reported, drawn),
                    "entropy": -(new.exp() * new).sum(-1),
                    "advantages": advantages,
                    "reward": reward,
                    "group": torch.arange(PROMPTS).repeat_interleave(GROUP),
                    "tokens": ids.squeeze(2),
                    "truncated": torch.zeros(len(z), dtype=torch.bool),
                    "version": batch,
                }
                columns = fault.get("spoil", same)(columns)
                if parts:
                    columns = {name: x[update::UPDATES] for name, x in columns.items() if name != "version"}
                    recorder.add(**columns, step=batch * UPDATES + update, version=batch * UPDATES)
                else:
                    recorder.add(**columns, step=batch, generation=batch, update=update)
    return folder


def logp_of(logits, ids):
    return logits.log_softmax(-1).gather(2, ids).squeeze(2)


def even_share(ids, g):
    return (ids % 2).float().mean(1)


def noise(size):
    return lambda z, *rest: z + size * torch.randn(z.shape, generator=rest[-1])


def nucleus(z, *_):
    ordered, places = z.softmax(-1).sort(-1, descending=True)
    kept = torch.zeros_like(z, dtype=torch.bool).scatter(-1, places, ordered.cumsum(-1) - ordered < 0.9)
    return z.masked_fill(~kept, -1e9)


def changed(**columns):
    """Return a ``spoil``: for each column a function of all columns; None leaves it out."""

    def spoil(recorded):
        new = {name: make(recorded) if make else None for name, make in columns.items()}
        return {name: x for name, x in (recorded | new).items() if x is not None}

    return spoil


def behind(z, batch, g):
    return noise(0.25 * min(batch, 4))(z, g)


def padded(name, at):
    """Add four places that nobody sampled, at the start or the end: the engine reports 0, the trainer is astonished."""

    def make(columns):
        values = {"logp": -6.0, "logp_old": -6.0, "logp_rollout": 0.0, "entropy": 1.0, "tokens": 0}
        extra = torch.full((len(columns[name]), 4), values[name], dtype=columns[name].dtype)
        return torch.cat([extra, columns[name]] if at == "start" else [columns[name], extra], 1)

    return make


def at_the(end):
    names = ("logp", "logp_old", "logp_rollout", "entropy", "tokens")
    return changed(**{name: padded(name, end) for name in names})


def one_late(name):
    return lambda d: d[name].roll(-1, 1)


def flipped_experts(z, batch, g):
    """Move the logits of a few places, as another expert does."""
    places = torch.rand((*z.shape[:2], 1), generator=g) < 0.03
    return torch.where(places, z + torch.randn(z.shape, generator=g), z)


def another_prompt(z, *_):
    """Move the logits of the first places most, by the same in each batch."""
    moves = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5))
    return z + 1.5 * torch.exp(-torch.arange(z.shape[1]) / 2.0)[:, None] * moves


def without_some(z, *_):
    """Ban half of the vocabulary from the first places."""
    banned = (torch.arange(z.shape[1]) < 4)[:, None] & (torch.arange(VOCABULARY) < VOCABULARY // 2)
    return z.masked_fill(banned, -1e9)


def without_the_last(columns):
    """Leave out the last two answers, which are of the last group."""
    return {name: x[:-2] if isinstance(x, torch.Tensor) else x for name, x in columns.items()}


CUT = {"truncated": lambda d: torch.ones(PROMPTS * GROUP).bool()}
NO_VERSION = changed(version=None)
FAULTS = {
    "colder engine": ("temperature", {"engine": lambda z, *_: z / 0.7}),
    "raw log-probabilities": ("temperature", {"reports": lambda z, _: 0.7 * z}),
    "old temperature": ("temperature", {"old": lambda z, _: z / 1.4}),
    "top-p": ("top-p", {"engine": nucleus}),
    "top-p, raw": ("top-p", {"engine": nucleus, "reports": lambda z, _: z}),
    "stale": ("stale", {"engine": behind, "spoil": changed(version=lambda d: max(0, d["version"] - 4))}),
    "stale, no versions": ("stale", {"engine": behind, "spoil": NO_VERSION}),
    "bypass": ("stale", {"engine": behind, "spoil": changed(logp_old=lambda d: d["logp_rollout"])}),
    "dead sync": ("weight-sync", {"engine": behind}),
    "noisy engine": ("engine-mismatch", {"engine": noise(0.3)}),
    "retokenised": (
        "retokenised",
        {"ids": lambda x, g: torch.where(torch.rand(x.shape, generator=g) < 0.02, 0, x)},
    ),
    "shifted": ("shift", {"spoil": changed(logp_old=lambda d: d["logp_old"].roll(1, 1))}),
    "both shifted": (
        "shift",
        {"spoil": changed(logp=one_late("logp"), logp_old=one_late("logp_old"))},
    ),
    "prompt": ("mask", {"spoil": at_the("start")}),
    "padding": ("mask", {"spoil": at_the("end")}),
    "dropout": ("dropout", {"new": noise(0.3)}),
    "old rows": ("permuted", {"spoil": changed(logp_old=lambda d: d["logp_old"].roll(5, 0))}),
    "old positions": ("permuted", {"spoil": changed(logp_old=lambda d: d["logp_old"].flip(1))}),
    "reference": ("reference-as-old", {"old": noise(0.3)}),
    "old in half precision": ("precision", {"old": noise(0.01)}),
    "experts": ("routing", {"engine": flipped_experts}),
    "another prompt": ("prompt", {"engine": another_prompt}),
    "banned words": ("edited-logits", {"engine": without_some, "reports": lambda z, _: z}),
    "banned words, processed": ("edited-logits", {"engine": without_some}),
    "last micro-batch": ("micro-batch-lost", {"spoil": without_the_last}),
    "no step": ("no-step", {"move": 0.0}),
    "no advantages": ("no-signal", {"spoil": changed(advantages=lambda d: 0 * d["advantages"])}),
    "scale": ("advantage-scale", {"spoil": changed(advantages=lambda d: 4000 * d["advantages"])}),
    "sign": ("reward-sign", {"spoil": changed(advantages=lambda d: -d["advantages"])}),
    "groups": (
        "grouping",
        {
            "spoil": changed(
                advantages=lambda d: d["reward"] - d["reward"].view(GROUP, -1).mean(0).repeat(GROUP)
            )
        },
    ),
    "flat": ("reward-flat", {"spoil": changed(reward=lambda d: 0 * d["reward"])}),
    "flat and cut off": ("truncated", {"spoil": changed(reward=lambda d: 0 * d["reward"], **CUT)}),
    "random": ("reward-noise", {"length": 1, "reward": lambda ids, g: torch.rand(len(ids), generator=g)}),
    "nan": ("nan", {"spoil": changed(logp=lambda d: d["logp"].index_fill(0, torch.tensor(2), math.nan))}),
    "far": ("step-too-large", {"move": 4.0}),
    "cut off": ("truncated", {"spoil": changed(**CUT)}),
}
"""For each fault the code of the finding, and the arguments of `simulate`."""


def trl_log(folder, steps=300, **course):
    """Write TRL's log of a run whose reward rises all along.

    Args:
        folder: The folder of the log.
        steps: Log steps.
        **course: Metrics that are otherwise, each a function of 0 to 1.
    """
    g = np.random.default_rng(0)
    healthy = {
        "reward": lambda t: 0.1 + 0.6 * t,
        "entropy": lambda t: 1.2 - 0.3 * t,
        "grad_norm": lambda t: 0.3,
        "frac_reward_zero_std": lambda t: 0.2,
        "completions/clipped_ratio": lambda t: 0.02,
        "clip_ratio/region_mean": lambda t: 0.002,
    }
    rows = []
    for step in range(1, steps + 1):
        values = {name: f(step / steps) for name, f in (healthy | course).items()}
        values["reward"] = min(1.0, values["reward"] + 0.03 * g.standard_normal())
        rows.append({"step": step, "completions/mean_length": 90.0} | values)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    return folder
