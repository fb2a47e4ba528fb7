"""Faults of advantages, rewards and masks, healthy runs beside them, and how often `rlvet diagnose` is right.

    PYTHONPATH=benchmarks/doctor python benchmarks/doctor/advantage_faults.py --seeds 100 101 --healthy 40

Every setting is drawn at random: the size of groups (2 to 16) and of batches, the kind of reward, the estimator, the
number of processes and of updates. The policy is a table of bigrams with a bias for each prompt, so that a run takes
a fraction of a second. Its tokens are drawn from it, its engine computes with a little noise, and it is trained.

A fault is right where the first finding has a code of its own and the cause says what is wrong.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bandpo import policy_loss
from bandpo.audit import Recorder
from rlvet import diagnose
from rlvet.checks.diagnosis import Diagnosis

PAD, EOS, VOCABULARY = 0, 1, 32
PROMPT_LENGTH = 4
METHOD = "FixedClip(0.2, 0.28)"
FIRST_BROKEN_BATCH = 3
"""The batch from which a fault shows that begins midway."""


@dataclass(frozen=True)
class Setting:
    """The settings that vary between runs."""

    seed: int = 0
    group: int = 8
    prompts: int = 8
    batches: int = 6
    updates: int = 2
    processes: int = 1
    """The number of processes. Each records its sequences in its own file."""
    length: int = 16
    reward: str = "dense"
    """One of `REWARDS`."""
    judge_noise: float = 0.0
    """The standard deviation of the noise in the reward."""
    estimator: str = "GRPO"
    """One of `ESTIMATORS`."""
    holes: bool = False
    """True if the mask excludes some tokens within an answer, as it does for the output of a tool."""
    rewards_known: bool = True
    """True if rewards and groups are recorded."""


@dataclass(frozen=True)
class Fault:
    """A fault that `train` introduces, and the diagnosis that counts as right."""

    codes: tuple[str, ...]
    """The first finding must have one of these codes."""
    cause: str
    """A regular expression that the cause must match."""
    rewards: tuple[str, ...] = ()
    """Kinds of reward with which the fault shows; all if empty."""
    estimators: tuple[str, ...] = ("GRPO", "GRPO, ddof 0", "Dr. GRPO", "RLOO")
    """Estimators with which the fault shows."""
    smallest_group: int = 2
    processes: tuple[int, ...] = (1, 2, 4)


REWARDS = (
    "binary",
    "signs",
    "dense",
    "negative",
    "components",
    "length penalty",
    "latency penalty",
    "sparse",
)

ESTIMATORS = (
    "GRPO",
    "GRPO, ddof 0",
    "Dr. GRPO",
    "RLOO",
    "batch",
    "batch, by tokens",
    "group mean, batch deviation",
    "critic",
    "no baseline",
)

FAULTS: Mapping[str, Fault] = {
    "batch in place of group": Fault(("grouping", "advantages"), "batch"),
    "wrong groups": Fault(("grouping", "advantages"), "group|prompt"),
    "positive-only": Fault(("advantages",), "negative|below 0|positive"),
    "negatives dropped": Fault(
        ("advantages",),
        "negative|below|positive|missing",
        rewards=("dense", "binary", "negative"),
        smallest_group=4,
    ),
    "ties to ±1": Fault(
        ("advantages",),
        "equal|tie",
        rewards=("binary", "signs", "sparse"),
        estimators=("GRPO", "GRPO, ddof 0"),
    ),
    "filter after advantages": Fault(("advantages", "grouping"), "missing|left out|filter", smallest_group=4),
    "permuted over the batch": Fault(("advantages", "grouping"), "order|permut|other"),
    "permuted within groups": Fault(("advantages",), "order|permut|other", smallest_group=3),
    "shifted by a row": Fault(("advantages", "grouping"), "order|row|other"),
    "one rank negated": Fault(("advantages", "reward-sign"), "process|rows", processes=(2, 4)),
    "one rank permuted": Fault(("advantages", "reward-sign", "grouping"), "process|rows", processes=(2, 4)),
    "one rank zero": Fault(("advantages", "no-signal"), "process|rows", processes=(2, 4)),
    "one rank, in one file": Fault(("advantages", "reward-sign"), "process|rows", processes=(1,)),
    "sign flipped": Fault(("reward-sign",), "lower"),
    "sign flipped midway": Fault(("reward-sign",), "step"),
    "permuted midway": Fault(("advantages", "grouping"), "step"),
    "zero midway": Fault(("no-signal", "advantages"), "step"),
    "every advantage 1": Fault(("no-signal", "advantages"), r"\b1\b"),
    "random reward": Fault(("reward-noise",), "same answer", rewards=("binary",)),
    "end token outside the loss": Fault(("mask",), "end"),
    "losses without a token": Fault(("mask",), "no token|without"),
    "prompt inside the loss": Fault(("mask",), "prompt"),
}


@dataclass
class Batch:
    """A generated batch."""

    ids: Tensor
    """Prompts with answers, padded after the end, (sequences, time)."""
    mask: Tensor
    """True for the tokens that count, (sequences, time)."""
    group: Tensor
    reward: Tensor
    advantages: Tensor
    """One per sequence, or per token, (sequences,) or (sequences, time)."""
    truncated: Tensor
    process: Tensor
    """The number of the process that generated each sequence, (sequences,)."""

    def select(self, rows: Tensor) -> Batch:
        """Return the batch of the sequences with these indices."""
        return Batch(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class Policy(torch.nn.Module):
    """A bigram policy: logits from the previous token, plus a bias computed from the prompt."""

    def __init__(self, g: torch.Generator):
        super().__init__()
        table = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=g)
        table[:, PAD] = -math.inf
        table[:, EOS] = 3.0
        self.table = torch.nn.Parameter(table)
        self.of_prompt = torch.nn.Parameter(0.7 * torch.randn(VOCABULARY, VOCABULARY, generator=g))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities of the next token at each position, (sequences, time, vocabulary)."""
        bias = self.of_prompt[ids[:, :PROMPT_LENGTH]].mean(1, keepdim=True)
        logits = self.table[ids] + bias
        return logits.log_softmax(-1)


@torch.no_grad()
def generate(policy: Policy, prompts: Tensor, length: int, g: torch.Generator) -> Tensor:
    """Return prompts with answers, padded after the end token."""
    ids = prompts
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(length):
        p = policy(ids)[:, -1].exp()
        new = torch.multinomial(p, 1, generator=g).squeeze(1).masked_fill(ended, PAD)
        ids = torch.cat([ids, new[:, None]], 1)
        ended = ended | (new == EOS)
    return ids


def rewards_of(answers: Tensor, setting: Setting, fault: str, g: torch.Generator) -> Tensor:
    """Return the reward of each answer, (sequences,). Even tokens earn reward."""
    counted = answers > EOS
    lengths = counted.sum(1).clamp(min=1)
    even = (counted & (answers % 2 == 0)).sum(1) / lengths
    noise = torch.rand(len(answers), generator=g)
    if fault == "random reward":
        return noise.round()
    kinds = {
        "binary": (even > 0.5).float(),
        "signs": 2 * (even > 0.5).float() - 1,
        "dense": even,
        "negative": -(1 - even) * lengths,
        "components": 0.5 * (even > 0.5).float() + 0.3 * even + 0.2 * (answers == EOS).any(1).float(),
        "length penalty": (even > 0.5).float() - 0.02 * lengths,
        "latency penalty": (even > 0.5).float() - 0.05 * noise,
        "sparse": ((even > 0.7) & (lengths > 3)).float(),
    }
    return kinds[setting.reward] + setting.judge_noise * torch.randn(len(answers), generator=g)


def advantages_of(reward: Tensor, setting: Setting, mask: Tensor, *, ties: bool = False) -> Tensor:
    """Compute advantages from rewards, (sequences,), in which each group is contiguous.

    Args:
        reward: Rewards, (sequences,).
        setting: The settings of the run, which name the estimator.
        mask: True for the tokens that count, (sequences, time).
        ties: If True, the advantages of a group with equal rewards are rounding errors divided by their deviation.
    """
    reward = reward.double()
    estimator = setting.estimator
    lengths = mask.sum(1).double()
    grouped = reward.view(-1, setting.group)
    if ties:
        grouped = grouped + 1e-9 * torch.randn(grouped.shape, generator=torch.Generator().manual_seed(1))
    centred = (grouped - grouped.mean(1, keepdim=True)).flatten()
    deviation = grouped.std(1, keepdim=True, unbiased=estimator == "GRPO")
    scale = (deviation + (0 if ties else 1e-4)).expand_as(grouped).flatten()
    if estimator in ("GRPO", "GRPO, ddof 0"):
        return (centred / scale).float()
    if estimator == "Dr. GRPO":
        return centred.float()
    if estimator == "RLOO":
        return (centred * setting.group / (setting.group - 1)).float()
    if estimator == "batch":
        return ((reward - reward.mean()) / (reward.std() + 1e-6)).float()
    if estimator == "batch, by tokens":
        mean = (reward * lengths).sum() / lengths.sum()
        variance = ((reward - mean).square() * lengths).sum() / lengths.sum()
        return ((reward - mean) / (variance.sqrt() + 1e-6)).float()
    if estimator == "group mean, batch deviation":
        return (centred / (reward.std() + 1e-4)).float()
    if estimator == "critic":
        position = mask.cumsum(1)
        value = reward.mean() + (reward[:, None] - reward.mean()) * position / (1 + mask.sum(1, keepdim=True))
        value = value + 0.05 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
        return (reward[:, None] - value).float()
    return reward.float()


def with_fault(batch: Batch, fault: str, number: int, setting: Setting, g: torch.Generator) -> Batch:
    """Return a batch whose advantages or mask have the fault."""
    a = batch.advantages
    reward = batch.reward
    rows = len(batch.ids)
    midway = number >= FIRST_BROKEN_BATCH
    permutation = torch.randperm(rows, generator=g)
    if fault == "batch in place of group":
        a = advantages_of(reward, replace(setting, estimator="batch"), batch.mask)
    elif fault == "wrong groups":
        a = torch.empty_like(a)
        a[permutation] = advantages_of(reward[permutation], setting, batch.mask[permutation])
    elif fault == "positive-only":
        a = a.clamp(min=0)
    elif fault == "ties to ±1":
        a = advantages_of(reward, setting, batch.mask, ties=True)
    elif fault == "permuted over the batch" or (fault == "permuted midway" and midway):
        a = a[permutation]
    elif fault == "permuted within groups":
        order = torch.rand(rows // setting.group, setting.group, generator=g).argsort(1)
        a = a.view(-1, setting.group).gather(1, order).flatten()
    elif fault == "shifted by a row":
        a = a.roll(1)
    elif fault == "one rank negated":
        a = torch.where(batch.process == 1, -a, a)
    elif fault == "one rank permuted":
        of_rank = (batch.process == 1).nonzero().squeeze(1)
        a = a.clone()
        a[of_rank] = a[of_rank[torch.randperm(len(of_rank), generator=g)]]
    elif fault == "one rank zero":
        a = a.masked_fill(batch.process == 1, 0.0)
    elif fault == "one rank, in one file":
        a = torch.where(torch.arange(rows) >= rows // 2, -a, a)
    elif fault == "sign flipped" or (fault == "sign flipped midway" and midway):
        a = -a
    elif fault == "zero midway" and midway:
        a = torch.zeros_like(a)
    elif fault == "every advantage 1":
        a = torch.ones_like(a)
    batch = replace(batch, advantages=a)

    if fault == "filter after advantages":
        longest = batch.mask.sum(1) > batch.mask.sum(1).float().quantile(0.75)
        return batch.select((~longest).nonzero().squeeze(1))
    if fault == "negatives dropped":
        return batch.select((a > 0).nonzero().squeeze(1))
    if fault == "end token outside the loss":
        return replace(batch, mask=batch.mask & (batch.ids != EOS))
    if fault == "prompt inside the loss":
        counted = batch.mask.clone()
        counted[:, 1:PROMPT_LENGTH] = True
        return replace(batch, mask=counted)
    return batch


def train(folder: Path, fault: str = "", setting: Setting = Setting()) -> None:
    """Train a policy, and write a record of it to a folder.

    Args:
        fault: A name of `FAULTS`; empty for a healthy run.
    """
    g = torch.Generator().manual_seed(setting.seed)
    policy = Policy(g)
    optimizer = torch.optim.SGD(policy.parameters(), 1.0)
    with ExitStack() as stack:
        recorders = []
        for process in range(setting.processes):
            recorder = Recorder(folder, method=METHOD, framework="bench", process=process)
            recorders.append(stack.enter_context(recorder))
        for number in range(setting.batches):
            engine = Policy(g)
            engine.load_state_dict(policy.state_dict())
            batch = _sample_batch(engine, fault, setting, g)
            batch = with_fault(batch, fault, number, setting, g)
            _update(policy, optimizer, batch, number, recorders, fault, setting, g)


def _sample_batch(engine: Policy, fault: str, setting: Setting, g: torch.Generator) -> Batch:
    """Sample a batch of answers, with their rewards and advantages."""
    prompts = torch.randint(2, VOCABULARY, (setting.prompts, PROMPT_LENGTH), generator=g)
    prompts = prompts.repeat_interleave(setting.group, 0)
    rows = len(prompts)
    ids = generate(engine, prompts, setting.length, g)
    answers = ids[:, PROMPT_LENGTH:]
    mask = torch.cat([torch.zeros(rows, PROMPT_LENGTH, dtype=torch.bool), answers != PAD], 1)
    if setting.holes:
        position = torch.arange(ids.shape[1])
        mask = mask & ((position - PROMPT_LENGTH) % 5 != 3) | (ids == EOS)
    reward = rewards_of(answers, setting, fault, g)
    return Batch(
        ids=ids,
        mask=mask,
        group=torch.arange(setting.prompts).repeat_interleave(setting.group),
        reward=reward,
        advantages=advantages_of(reward, setting, mask),
        truncated=~(answers == EOS).any(1),
        process=torch.arange(rows) * setting.processes // rows,
    )


def _update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    number: int,
    recorders: list[Recorder],
    fault: str,
    setting: Setting,
    g: torch.Generator,
) -> None:
    """Record a batch and train on it."""
    with torch.no_grad():
        old = policy(batch.ids[:, :-1]).gather(2, batch.ids[:, 1:, None]).squeeze(2)
        old = old.masked_fill(~batch.mask[:, 1:], 0.0)
        rollout = (old + 1e-3 * torch.randn(old.shape, generator=g)).clamp(max=0.0)
    for update in range(setting.updates):
        all_logp = policy(batch.ids[:, :-1])  # (sequences, time, vocabulary)
        entropy = -(all_logp.exp() * all_logp.masked_fill(all_logp.isinf(), 0.0)).sum(-1)
        logp = all_logp.gather(2, batch.ids[:, 1:, None]).squeeze(2)
        mask = batch.mask[:, 1:]
        logp = logp.masked_fill(~mask, 0.0)
        advantages = batch.advantages if batch.advantages.dim() == 1 else batch.advantages[:, 1:]
        if fault == "losses without a token" and number % 2:
            mask = torch.zeros_like(mask)
        for process, recorder in enumerate(recorders):
            rows = batch.process == process
            if not rows.any():
                continue
            rewards: dict[str, Any] = {}
            if setting.rewards_known:
                rewards = {"reward": batch.reward[rows], "group": batch.group[rows]}
            recorder.add(
                logp=logp[rows],
                logp_old=old[rows],
                logp_rollout=rollout[rows],
                advantages=advantages[rows],
                mask=mask[rows],
                entropy=entropy[rows],
                tokens=batch.ids[rows, 1:],
                truncated=batch.truncated[rows],
                step=number,
                version=number,
                generation=number,
                update=update,
                **rewards,
            )
        if not mask.any():
            continue
        loss = policy_loss(logp, old, advantages, mask, method=METHOD).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def setting_of(seed: int, fault: Fault | None = None) -> Setting:
    """Draw all settings at random, among those with which the fault shows."""
    draw = random.Random(seed)
    processes = draw.choice(fault.processes if fault else (1, 2, 4))
    smallest = fault.smallest_group if fault else 2
    group = draw.choice([size for size in (2, 3, 4, 6, 8, 12, 16) if size >= smallest])
    fewest_prompts = max(4, processes) if fault else 1
    prompts = draw.choice([n for n in (1, 2, 4, 6, 8, 16, 32) if n >= fewest_prompts])
    noisy = draw.random() < 0.2
    return Setting(
        seed,
        group=group,
        prompts=prompts,
        batches=draw.randint(6, 12),
        updates=draw.choice((1, 2, 4)),
        processes=min(processes, prompts),
        length=draw.choice((12, 16, 24)),
        reward=draw.choice((fault and fault.rewards) or REWARDS),
        judge_noise=0.02 if noisy and not (fault and fault.rewards) else 0.0,
        estimator=draw.choice(fault.estimators if fault else ESTIMATORS),
        holes=draw.random() < 0.2 and (fault is None or "mask" not in fault.codes),
        rewards_known=fault is not None or draw.random() < 0.85,
    )


def train_and_diagnose(fault: str, setting: Setting) -> Diagnosis:
    """Train in a temporary folder, and diagnose the record."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(Path(folder), fault, setting)
        return diagnose(folder)


def score(fault: Fault, diagnosis: Diagnosis) -> str:
    """Return ``right``, ``wrong``, or ``silent`` if every finding is a note."""
    findings = [finding for finding in diagnosis.findings if finding.severity != "note"]
    if not findings:
        return "silent"
    first = findings[0]
    text = f"{first.cause}; since step {first.onset}" if first.onset is not None else first.cause
    is_right = first.code in fault.codes and re.search(fault.cause, text) is not None
    return "right" if is_right else "wrong"


def main() -> None:
    """Train and diagnose the runs that the command line selects, and print a line for each run and the scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--healthy", type=int, default=20, help="healthy runs")
    parser.add_argument("--first", type=int, default=1000, help="seed of the first of them")
    parser.add_argument("--only", default="", help="a fault's name")
    options = parser.parse_args()
    torch.set_num_threads(1)

    scores: Counter[str] = Counter()
    for seed in options.seeds:
        for number, (name, fault) in enumerate(FAULTS.items()):
            if options.only and name != options.only:
                continue
            setting = setting_of(1000 * seed + number, fault)
            diagnosis = train_and_diagnose(name, setting)
            verdict = score(fault, diagnosis)
            scores[verdict] += 1
            print(f"{verdict:7} {name}: {diagnosis.headline[:150]} [{setting}]", flush=True)
    alarms = 0
    for seed in range(options.first, options.first + options.healthy):
        setting = setting_of(seed)
        diagnosis = train_and_diagnose("", setting)
        if not diagnosis.healthy:
            alarms += 1
            print(f"alarm   {diagnosis.headline[:150]} [{setting}]", flush=True)
        to_inspect = [finding for finding in diagnosis.findings if finding.severity == "look"]
        if to_inspect:
            print(f"look    {to_inspect[0].code}: {to_inspect[0].cause[:150]} [{setting}]", flush=True)
    print(f"faults: {dict(scores)}; alarms in {alarms} of {options.healthy} healthy runs")


if __name__ == "__main__":
    main()
