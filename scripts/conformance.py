"""Each loss that a framework ships, beside the method of that name here: equal, or what makes the difference.

    python scripts/conformance.py build/conformance              # those that the package index has
    python scripts/conformance.py build/conformance slime prime-rl --source slime=../slime prime-rl=../prime-rl
    python scripts/conformance.py build/conformance verl --source verl=../verl

Each framework has a virtual environment of its own in the folder, as in scripts/matrix.py, and its own defaults for
what the settings in scripts/conformance.txt do not say. Both sides get the same float32 batches, and the gradient of
each token is compared. Where they differ, known differences are tried on our side, one and then several at a time,
until the two agree. Writes the framework's table in results/conformance.md, and what differs in
docs/measured/conformance.md. One that the index does not have is run from a clone, whose commit the pages name; the
table of a clone of another is printed and no more. Exits with 1 if a difference is unexplained.

A loss is a line of scripts/conformance.txt: framework, its settings, the method here if there is one, and ``weights``
where importance weights are given or ``rollout`` where the paper refers the ratio to the rollout engine. A known
difference is a line of `KNOWN`.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import framework_losses
from bandpo import Method, parse, policy_loss
from bandpo.objectives import DropOutside, DualClip
from framework_losses import Batch, Loss
from marked import write_between_marks
from matrix import ENVIRONMENTS, ROOT, Environment, admitted, install

PAGE = ROOT / "docs/measured/conformance.md"
WHOLE = ROOT / "results/conformance.md"
PAIRS = ROOT / "scripts/conformance.txt"
ROWS = "== rows\n"
"""Comes before the rows: frameworks print too."""
COUNTING_EMPTY = {
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
"""Averages that count sequences without a counted token, by those that leave them out; see `bandpo.aggregate`."""


class Framework(NamedTuple):
    """Where a framework's losses come from."""

    loss: Callable[..., Loss]
    environment: Environment
    """What the loss needs, the framework itself included where the index has it."""
    distribution: str = ""
    """Its name on the index."""
    paths: tuple[str, ...] = (".",)
    """Folders of a clone to import from."""


FRAMEWORKS = {
    "TRL": Framework(
        framework_losses.trl,
        Environment(("trl==1.16.0", admitted("transformers"), admitted("datasets"))),
        "trl",
    ),
    "verl": Framework(framework_losses.verl, Environment(("verl==0.9.1",)), "verl"),
    "SkyRL": Framework(
        framework_losses.skyrl,
        replace(ENVIRONMENTS["skyrl"], bare=("skyrl==0.3.0", "skyrl-gym")),
        "skyrl",
    ),
    "ms-swift": Framework(framework_losses.ms_swift, Environment(("ms-swift==4.6.0", "msgspec")), "ms-swift"),
    "slime": Framework(
        framework_losses.slime,
        Environment(("megatron-core==0.16.1", "transformers", "omegaconf", "ray", "httpx")),
    ),
    "prime-rl": Framework(
        framework_losses.prime_rl,
        Environment(("beartype", "prime-pydantic-config", "loguru", "tomli-w", "transformers", "wandb")),
        paths=("src", "packages/prime-rl-configs/src"),
    ),
}


def batches(weighted: bool) -> Iterator[Batch]:
    """Policies that hardly moved, that moved as in training, and that have nothing in common (ratios to e^±40).

    Both signs of advantage, lengths from 1 up, and one sequence without a counted token.
    """
    shape = (128, 40)  # enough that some ratio lies between 1.2 and 1.21
    for seed, (moved, rarest) in enumerate(((0.01, 8.0), (0.5, 8.0), (math.inf, 40.0))):
        random = torch.Generator().manual_seed(seed)
        uniform = torch.rand((3, *shape), generator=random)
        normal = torch.randn((3, *shape), generator=random)
        old, far = -rarest * uniform[:2] ** 2 - 1e-3
        logp = far if moved == math.inf else (old + moved * normal[0]).clamp(max=-1e-3)
        lengths = (1 + uniform[2, :, :1] * shape[1]).int()
        lengths[3] = 0
        mask = (torch.arange(shape[1]) < lengths).float()
        # Frameworks have importance weights of 1 in padding.
        rollout = (old + 0.2 * mask * normal[1]).clamp(max=-1e-3)
        weights = (old - rollout).exp().clamp(max=2.0) if weighted else None
        yield Batch(logp, old, rollout, normal[2, :, :1].expand(shape), mask, weights)


def gradient(loss: Loss, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of the loss by each token's log-probability; and the loss."""
    logp = batch.logp.clone().requires_grad_()
    value = loss(replace(batch, logp=logp))
    return torch.autograd.grad(value, logp)[0], value.detach()


def agree(one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Which tokens have one gradient, to 1e-4 of it or of a weight of 1: float32 has e^40 to 5e-6."""
    largest = torch.maximum(one.abs(), other.abs())
    return ((one - other).abs() <= 1e-4 * (largest + 1 / mask.sum())) | (mask == 0)


@dataclass(frozen=True)
class Call:
    """A call of `bandpo.policy_loss`, with what frameworks do besides."""

    method: Method
    of_rollout: bool = False
    aggregation: str | None = None
    count_empty: bool = False
    weighted: bool = True
    sums_penalties: bool = False
    clamp: float = math.inf
    sequence_clamp: float = math.inf

    def __call__(self, batch: Batch) -> Tensor:
        old, logp = batch.rollout if self.of_rollout else batch.old, batch.logp
        weights = batch.weights if self.weighted else None
        # What a clamp holds has no gradient.
        moved = (logp - old).detach()
        count = batch.mask.sum(1, keepdim=True).clamp(min=1)
        mean = (moved * batch.mask).sum(1, keepdim=True) / count
        logp = logp.where(moved.abs() <= self.clamp, old + moved.clamp(-self.clamp, self.clamp))
        logp = logp.where(mean <= self.sequence_clamp, logp.detach() - (mean - self.sequence_clamp))
        average = self.aggregation or self.method.aggregation or "token-mean"
        by_length = average == "seq-mean-token-sum-norm"
        how: dict[str, Any] = {
            "aggregation": COUNTING_EMPTY.get(average, average) if self.count_empty else average,
            "normalizer": float(logp.shape[1]) if by_length else None,
        }
        advantages = batch.advantages
        if self.sums_penalties:  # the mean over tokens is in the advantages
            advantages, how = advantages / batch.mask.sum(), {"aggregation": "sum"}
        return policy_loss(logp, old, advantages, batch.mask, method=self.method, weights=weights, **how).loss

    def changed(self, **changes: Any) -> Call:
        return replace(self, **changes)

    def dual_clipped(self, max_ratio: float) -> Call:
        return replace(
            self, method=replace(self.method, objective=DualClip(max_ratio, self.method.objective))
        )

    def limited(self, max_weight: float) -> Call:
        if not isinstance(self.method.objective, DropOutside):
            return self
        objective = replace(self.method.objective, max_weight=max_weight)
        return replace(self, method=replace(self.method, objective=objective))


COUNTS_EMPTY = "empty sequences count in the mean"
KNOWN: tuple[dict[str, Callable[[Call], Call]], ...] = (
    {
        "averages over tokens": lambda call: call.changed(aggregation="token-mean"),
        "averages per sequence": lambda call: call.changed(aggregation="seq-mean-token-mean"),
        "sums the penalty over tokens": lambda call: call.changed(sums_penalties=True),
    },
    {
        "dual clip of 3": lambda call: call.dual_clipped(3.0),
        "dual clip of 10": lambda call: call.dual_clipped(10.0),
    },
    {
        "weight at most 3": lambda call: call.limited(3.0),
        "weight without limit": lambda call: call.limited(math.inf),
    },
    {
        "log r clamped to ±20": lambda call: call.changed(clamp=20.0),
        "the sequence's mean log r clamped at 10": lambda call: call.changed(sequence_clamp=10.0),
    },
    {"importance weights left out": lambda call: call.changed(weighted=False)},
    {
        "ratio to the trainer's old policy": lambda call: call.changed(of_rollout=False),
        "ratio to the rollout engine's policy": lambda call: call.changed(of_rollout=True),
    },
    {COUNTS_EMPTY: lambda call: call.changed(count_empty=True)},
)
"""Known differences, in groups of which at most one acts."""
MOST = 4  # at a time: no loss here needs more than three


class Verdict(NamedTuple):
    """How a framework's loss differs from a method here."""

    changes: list[str] | None
    """What would make the gradients equal; None if nothing known does."""
    reported: bool
    """Whether the reported loss is the same then."""

    def __str__(self) -> str:
        if self.changes is None:
            return "**differs, unexplained**"
        differences = [change for change in self.changes if change != COUNTS_EMPTY]
        said = f"differs: {'; '.join(differences)}" if differences else "equal"
        return said + " ¹" * (COUNTS_EMPTY in self.changes) + " ²" * (not self.reported)


def compare(theirs: Loss, ours: Call, *, weighted: bool = False) -> Verdict:
    """Find the fewest known differences that make the gradients equal on every batch."""
    cases = [(batch, *gradient(theirs, batch)) for batch in batches(weighted)]
    choices = [[None, *group] for group in KNOWN]
    chosen = [[name for name in one if name] for one in itertools.product(*choices)]
    functions = {name: function for group in KNOWN for name, function in group.items()}
    for changes in sorted(chosen, key=len):
        if len(changes) > MOST:
            break
        call, reported = ours, True
        for change in changes:
            call = functions[change](call)
        for batch, expected, value in cases:
            found, loss = gradient(call, batch)
            if not agree(found, expected, batch.mask).all():
                break
            reported &= bool(torch.isclose(loss, value, rtol=1e-3, atol=1e-5))
        else:
            return Verdict(changes, reported)
    return Verdict(None, False)


def settings(text: str) -> dict[str, Any]:
    """``loss_type=grpo epsilon=0.2`` as keywords: numbers as numbers, the rest as text."""

    def read(value: str) -> Any:
        try:
            return ast.literal_eval(value)
        except ValueError:
            return value

    return {key: read(value) for key, value in (word.split("=") for word in text.split())}


def rows(name: str) -> list[str]:
    """What the page says of a framework; in the environment that has it."""
    found, absent = [], []
    for line in PAIRS.read_text().splitlines():
        framework, theirs, method, given = (cell.strip() for cell in line.split("|"))
        if framework == name and method:
            loss = FRAMEWORKS[name].loss(**settings(theirs))
            ours = Call(parse(method, Method), of_rollout="rollout" in given)
            verdict = compare(loss, ours, weighted="weights" in given)
            besides = ", with importance weights" if "weights" in given else ""
            found.append(f"| `{theirs}`{besides} | `{method}` | {verdict} |")
        elif framework == name:
            absent.append(f"`{theirs}`")
    return [*found, "", f"Not here: {', '.join(absent)}."] if absent else found


def run(name: str, folder: Path, source: Path | None) -> list[str]:
    """Make the environment and compare in it."""
    framework = FRAMEWORKS[name]
    python = install(framework.environment, folder / name, "")
    # Some decorate losses with torch.compile, which takes minutes here and changes nothing.
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    if source:
        environment["PYTHONPATH"] = os.pathsep.join(str(source / path) for path in framework.paths)
        asked = ["git", "-C", source, "rev-parse", "--short=12", "HEAD"]
    else:
        asked = [python, "-m", "pip", "show", framework.distribution]
    said = subprocess.check_output(asked, text=True).split()
    version = f"commit {said[0]}" if source else said[said.index("Version:") + 1]
    command = [python, __file__, folder, name, "--inside"]
    printed = subprocess.check_output(command, text=True, env=environment, cwd=folder)
    head = [f"## {name}, {version}", "", "| its loss | method here | gradient |", "|---|---|---|"]
    return ["", *head, *printed.partition(ROWS)[2].splitlines(), ""]


def differing(lines: list[str]) -> list[str]:
    """Of a framework's table the rows that differ, and how many do not."""
    head, compared = lines[:3], [line for line in lines if line.startswith("| `")]
    found = [line for line in compared if not re.search(r"\| equal[ ¹²]* \|$", line)]
    weighted = ", with importance weights"
    shown = [line for line in found if weighted not in line or line.replace(weighted, "") not in found]
    said = f"{len(compared) - len(found)} of {len(compared)} losses are the method of their name."
    return [*head, said, *(["", *lines[3:5], *shown] if found else []), ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the environments go")
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"of {list(FRAMEWORKS)}; those of the index if none"
    )
    parser.add_argument("--source", nargs="+", default=[], metavar="NAME=FOLDER", help="clones to run from")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(ROWS + "\n".join(rows(*arguments.names)))
        return
    sources = {
        name: Path(folder).resolve() for name, folder in (one.split("=", 1) for one in arguments.source)
    }
    released = [name for name, framework in FRAMEWORKS.items() if framework.distribution]
    names = arguments.names or released
    if unknown := (set(names) | sources.keys()) - FRAMEWORKS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(FRAMEWORKS)}")
    if absent := set(names) - {*released, *sources}:
        parser.error(f"the index has no {', '.join(sorted(absent))}: clone it, and give --source NAME=FOLDER")
    folder, unexplained = arguments.folder.resolve(), []
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        lines = run(name, folder, sources.get(name))
        print("\n".join(lines), flush=True)
        if name not in sources or name not in released:
            write_between_marks(WHOLE, name, lines)
            write_between_marks(PAGE, name, differing(lines))
        unexplained += [line for line in lines if "unexplained" in line]
    if unexplained:
        sys.exit("\n".join(["a difference that is not in KNOWN:", *unexplained]))


if __name__ == "__main__":
    main()
