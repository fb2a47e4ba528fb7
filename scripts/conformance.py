"""Make the atlas of losses: for each loss that a framework ships, the method here that has the nearest gradient.

    python scripts/conformance.py build/conformance              # all frameworks on the package index
    python scripts/conformance.py build/conformance slime prime-rl --source slime=../slime prime-rl=../prime-rl
    python scripts/conformance.py build/conformance --newest build/drift.md

Each framework has its own virtual environment in the folder, as in scripts/matrix.py. Settings that
scripts/conformance.txt does not name have the framework's defaults. The search is that of `Atlas` in scripts/atlas.py.
The comparison with the method of the loss's name is that of `bandpo.testing.assert_is`. Each setting of
scripts/conformance_options.txt is changed by a lot, and those that change no gradient are listed. Results go to
research/results/conformance.json with their date and the core, and docs/atlas.md is written from them: a
framework that was not run again keeps its date. A framework that is not on the index is run from a clone, and the page
names its commit. Exits with 1 if a difference is unexplained or a loss failed.

``--newest`` takes the newest release of each framework, or the newest commit if it is not on the index. It writes the
changes since the committed results as Markdown, or an empty file if there are none; the results are not updated.

A loss is a line of scripts/conformance.txt. A known difference is a line of `KNOWN_CHANGES` in
bandpo/certificate/variants.py.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import framework_losses
from atlas import PADDED, Atlas, numbers_of, random_batches, recorded_batches
from bandpo import Method, parse
from bandpo.certificate.plain import Comparison, compare_loss
from bandpo.certificate.tokens import loss_batches
from bandpo.certificate.variants import COUNTING_EMPTY, COUNTS_EMPTY, Variant
from framework_losses import Loss
from marked import write_between_marks
from matrix import ENVIRONMENTS, ROOT, Environment, admitted, date, install, stamp

PAGE = ROOT / "docs/atlas.md"
RESULTS = ROOT / "research/results/conformance.json"
LINT = ROOT / "packages/rlvet/src/rlvet/data/without_effect.json"
LOSSES = ROOT / "scripts/conformance.txt"
OPTIONS = ROOT / "scripts/conformance_options.txt"
RECORDED = "recorded.pt"
"""The tokens of the records, which the environments of the frameworks cannot read."""
NO_NAMESAKE = "none of this name"
"""What a line of scripts/conformance.txt has in place of a method, if there is no method of the loss's name."""
LINTED = {
    "TRL": ("trl", "loss_type"),
    "verl": ("verl", "loss_mode"),
    "SkyRL": ("skyrl", "policy_loss_type"),
}
"""For `rlvet lint`, which knows the settings without effect: its key of a framework, and what selects a loss."""
OPTION_BATCHES = ("wide", "far", "sequences near", "sequences apart")
"""The batches on which settings are changed."""
MOVED = 0.001
"""A change of a share that is reported."""
START = "== results"
"""The line before the results in the output of a process. Frameworks print before it."""


@dataclass(frozen=True)
class Framework:
    """A framework: its losses, and how to install it."""

    loss: Callable[..., Loss]
    """A function of `framework_losses`."""
    needs: tuple[str, ...] = ()
    """The packages that its losses import, to install with their dependencies."""
    distribution: str = ""
    """The name on the package index; empty if it is not on the index."""
    version: str = ""
    """The release of the committed results."""
    bare: tuple[str, ...] = ()
    """Further packages to install without dependencies."""
    with_dependencies: bool = False
    """True if the framework is installed with its dependencies."""
    repository: str = ""
    """The repository of a framework that is not on the index."""
    paths: tuple[str, ...] = (".",)
    """The folders of a clone to import from."""
    remark: str = ""
    """A remark for the page: the parts that are compared, and the imports that are replaced."""

    def environment(self, version: str) -> Environment:
        """Return the environment for a release."""
        if not self.distribution:
            return Environment(self.needs)
        pinned = f"{self.distribution}=={version}"
        if self.with_dependencies:
            return Environment((pinned, *self.needs))
        return Environment(self.needs, bare=(pinned, *self.bare))


FRAMEWORKS = {
    "TRL": Framework(
        framework_losses.trl,
        (admitted("transformers"), admitted("datasets")),
        distribution="trl",
        version="1.16.0",
        with_dependencies=True,
    ),
    "verl": Framework(
        framework_losses.verl,
        distribution="verl",
        version="0.9.1",
        with_dependencies=True,
        remark="The losses are called without the trainer's batch sizes. In its trainer a mean over sequences divides "
        "by the number of sequences of the mini-batch, so that empty ones count. `seq-mean-token-sum-norm` divides by "
        "the width of the batch, or by `loss_scale_factor`.",
    ),
    "SkyRL": Framework(
        framework_losses.skyrl,
        ENVIRONMENTS["skyrl"].packages,
        distribution="skyrl",
        version="0.3.0",
        bare=("skyrl-gym",),
        remark="Its trainer divides the advantages by the number of tokens before the loss, with the average over "
        "tokens. The limits of `clip_cov`, 1 and 5, are compared with such advantages, and select no token of these "
        "batches.",
    ),
    "ms-swift": Framework(
        framework_losses.ms_swift,
        ("msgspec",),
        distribution="ms-swift",
        version="4.6.0",
        with_dependencies=True,
        remark="Without the penalty by the reference policy, which is on by default.",
    ),
    "liger-kernel": Framework(
        framework_losses.liger,
        ("transformers",),
        distribution="liger-kernel",
        version="0.8.5",
        remark="The module `LigerFusedLinearGRPOLoss`, without the penalty by the reference policy, which is on by "
        "default. ms-swift calls it with `use_liger_kernel`, as TRL 0.29 did; TRL 1.16 does not. The kernel "
        "`triton_grpo_loss` needs a GPU, and is not compared.",
    ),
    "unsloth-zoo": Framework(
        framework_losses.unsloth_zoo,
        ("transformers", "datasets", "psutil", "tqdm", "regex", "protobuf", "pillow", "requests"),
        distribution="unsloth-zoo",
        version="2026.10.9",
        remark="`grpo_compute_loss`, uncompiled, without the package `unsloth`.",
    ),
    "OpenRLHF": Framework(
        framework_losses.openrlhf,
        ENVIRONMENTS["openrlhf"].packages,
        distribution="openrlhf",
        version="0.11.2",
        remark="`PolicyLoss`. DeepSpeed, FlashAttention and pylatexenc are replaced where they are imported.",
    ),
    "AReaL": Framework(
        framework_losses.areal,
        (
            "transformers",
            "datasets",
            "ray",
            "omegaconf",
            "hydra-core",
            "aiohttp",
            "colorlog",
            "pillow",
            "torchdata",
            "pyzmq",
        ),
        distribution="areal",
        version="1.0.4",
        remark="`grpo_loss_fn` of the actor. Services that it imports are replaced where they are imported. The mask "
        "of `m2po` is that of the ratio between the engine's policy and the trainer's old one, which are one here.",
    ),
    "torchtitan": Framework(
        framework_losses.torchtitan,
        ("tyro", "datasets", "tokenizers", "einops", "safetensors"),
        distribution="torchtitan",
        version="0.3.0",
        remark="The losses of `torchtitan.experiments.rl`, whose old policy is the generator's. vLLM and kernels for "
        "GPUs are replaced where they are imported.",
    ),
    "slime": Framework(
        framework_losses.slime,
        ("megatron-core==0.16.1", "transformers", "omegaconf", "ray", "httpx"),
        repository="https://github.com/THUDM/slime",
    ),
    "miles": Framework(
        framework_losses.miles,
        ("transformers", "omegaconf", "ray", "httpx", "aiohttp", "pydantic", "torchdata", "datasets"),
        repository="https://github.com/radixark/miles",
    ),
    "prime-rl": Framework(
        framework_losses.prime_rl,
        ("beartype", "prime-pydantic-config", "loguru", "tomli-w", "transformers", "wandb"),
        repository="https://github.com/PrimeIntellect-ai/prime-rl",
        paths=("src", "packages/prime-rl-configs/src"),
    ),
    "NeMo-RL": Framework(
        framework_losses.nemo_rl,
        (
            "transformers==5.10.4",
            "pyzmq",
            "ray",
            "wandb",
            "pydantic",
            "matplotlib",
            "rich",
            "tensorboard",
            "tensordict",
            "omegaconf",
        ),
        repository="https://github.com/NVIDIA-NeMo/RL",
        remark="`ClippedPGLossFn` without the penalty by the reference policy, which is on by default. Loggers are "
        "replaced where they are imported.",
    ),
    "ROLL": Framework(
        framework_losses.roll,
        (
            "transformers",
            "ray",
            "tensordict",
            "codetiming",
            "omegaconf",
            "hydra-core",
            "datasets",
            "dacite",
            "peft",
        ),
        repository="https://github.com/alibaba/ROLL",
        remark="The losses of the workers of its RLVR pipeline, with advantages that are 0 in the padding, as the "
        "pipeline has them. Telemetry is replaced where it is imported.",
    ),
}


class Line(NamedTuple):
    """A line of scripts/conformance.txt."""

    framework: str
    name: str
    """The name of the loss. With the framework's, it is the heading on the page and its permanent anchor."""
    settings: str
    """The settings of the framework."""
    method: str
    """The method of its name, `NO_NAMESAKE`, or the reason why the loss is not run."""
    weighted: bool
    """True if the loss is also compared with importance weights."""

    @property
    def has_method(self) -> bool:
        """Return True if there is a method of its name."""
        return self.method.endswith(")")

    @property
    def is_run(self) -> bool:
        """Return True if the loss is run."""
        return self.has_method or self.method == NO_NAMESAKE

    @property
    def anchor(self) -> str:
        """Return the anchor of the loss on the page."""
        return f"{self.framework} {self.name}".lower().replace(" ", "-")


def lines_of_losses() -> list[Line]:
    """Read scripts/conformance.txt."""
    lines = []
    for line in LOSSES.read_text().splitlines():
        if not line.startswith("#"):
            framework, name, settings, method, weights = (cell.strip() for cell in line.split("|"))
            lines.append(Line(framework, name, settings, method, weights == "weights"))
    return lines


def options_of(framework: str) -> dict[str, list[Any]]:
    """Return the settings of a framework's losses, each with values that are far from its default."""
    options: dict[str, list[Any]] = {}
    for line in OPTIONS.read_text().splitlines()[1:]:
        name, option, values = (cell.strip() for cell in line.split("|"))
        if name == framework:
            options[option] = [read_settings(f"value={value}")["value"] for value in values.split()]
    return options


def read_settings(text: str) -> dict[str, Any]:
    """Read ``loss_type=grpo epsilon=0.2`` as keywords: numbers as numbers, the rest as text."""

    def read(value: str) -> Any:
        try:
            return ast.literal_eval(value)
        except ValueError:
            return value

    return {key: read(value) for key, value in (word.split("=", 1) for word in text.split())}


# --- comparing --------------------------------------------------------------------------------------------------------


def compare(loss: Loss, method: Method, *, weighted: bool = False) -> dict[str, Any]:
    """Compare a framework's loss with a method, and return an entry of research/results/conformance.json.

    If the loss counts empty sequences in its mean, this is noted separately and not reported as a difference.
    """
    expected = Variant(method, of_rollout=method.old_policy == "rollout")
    batches = list(loss_batches(weighted=weighted))
    comparison = compare_loss(loss, expected, batches)
    counts_empty = COUNTS_EMPTY in (comparison.differences or ())
    if counts_empty:
        comparison = compare_loss(loss, expected.changed(counts_empty=True), batches)
    return {"counts_empty": counts_empty} | _as_json(comparison)


def _as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "differences": None if comparison.differences is None else list(comparison.differences),
        "same_value": comparison.same_value,
        "shares": {name: float(f"{share:.4f}") for name, share in comparison.shares.items()},
        "cause": comparison.cause,
    }


def nearest(atlas: Atlas, loss: Loss, line: Line) -> dict[str, Any]:
    """Return the method that is nearest to a loss, and the known changes that make it equal if it is not."""
    namesake = line.method if line.has_method else None
    found = atlas.nearest(loss, numbers_of(read_settings(line.settings)), namesake)
    if not found["identical"]:
        average = found["average"]
        method = Variant(
            parse(found["method"], Method),
            of_rollout=found["engine"],
            aggregation=None if average == PADDED else average,
            sums_padding=average == PADDED,
            factor=found["factor"],
        )
        changes = compare_loss(loss, method, atlas.batches).differences
        found["changes"] = None if changes is None else list(changes)
    return found


def without_effect(atlas: Atlas, line: Line) -> list[str]:
    """Return the settings that change no token's gradient of a loss, whatever their value."""
    make = FRAMEWORKS[line.framework].loss
    settings = read_settings(line.settings)
    gradient = atlas.gradient(make(**settings))
    names = []
    for option, values in options_of(line.framework).items():
        changed = []
        for value in values:
            try:
                other = atlas.gradient(make(**settings | {option: value}))
            except Exception:  # a value that the framework refuses beside the others is not without effect
                changed.append(True)
            else:
                changed.append(bool(atlas.different(other, gradient).any()))
        if not any(changed):
            names.append(option)
    return names


def results_inside(framework: str, folder: Path) -> dict[str, Any]:
    """Make the entries of a framework's losses, within the framework's environment."""
    results = {}
    lines = lines_of_losses()
    names = [line.method for line in lines if line.has_method]
    recorded = torch.load(folder / RECORDED, weights_only=False)  # this script wrote it
    atlas = Atlas([*random_batches(), *recorded], names)
    few = Atlas([batch for batch in atlas.batches if batch.name in OPTION_BATCHES])
    for line in lines:
        if line.framework != framework:
            continue
        result: dict[str, Any] = {"settings": line.settings, "method": line.method}
        results[line.name] = result
        if not line.is_run:
            continue
        try:
            loss = FRAMEWORKS[framework].loss(**read_settings(line.settings))
            result["nearest"] = nearest(atlas, loss, line)
            result["without_effect"] = without_effect(few, line)
            if line.has_method:
                method = parse(line.method, Method)
                result["plain"] = compare(loss, method)
                if line.weighted:
                    result["weighted"] = compare(loss, method, weighted=True)
        except Exception as error:  # one loss that fails must not stop the others
            result["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"{framework} {line.name}: {_describe(result)}", file=sys.stderr, flush=True)
    return results


def run(name: str, folder: Path, version: str, source: Path | None) -> dict[str, Any]:
    """Create the environment of a framework, and compare its losses there."""
    framework = FRAMEWORKS[name]
    python = install(framework.environment(version), folder / name, "")
    # Some frameworks decorate losses with torch.compile, which takes minutes and does not change the result.
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    if source:
        environment["PYTHONPATH"] = os.pathsep.join(str(source / path) for path in framework.paths)
        commit = subprocess.check_output(["git", "-C", source, "rev-parse", "--short=12", "HEAD"], text=True)
        version = f"commit {commit.strip()}"
    torch.save(list(recorded_batches()), folder / RECORDED)
    command = [python, __file__, folder, name, "--inside"]
    printed = subprocess.check_output(command, text=True, env=environment, cwd=folder)
    return {"version": version, **stamp(), "losses": json.loads(printed.partition(START)[2])}


# --- the page ---------------------------------------------------------------------------------------------------------


def verdict(result: Mapping[str, Any]) -> str:
    """Return the verdict on a loss in one word, or its differences."""
    if "error" in result:
        return f"could not be run: {result['error']}"
    if "plain" not in result:
        return f"not compared: {result['method']}"
    differences = result["plain"]["differences"]
    if differences is None:
        return f"unexplained: {result['plain']['cause']}"
    return "; ".join(differences) or "equal"


def is_equal(result: Mapping[str, Any]) -> bool:
    """Return True if the loss has the method's gradient."""
    return verdict(result) == "equal"


def statement(found: Mapping[str, Any]) -> str:
    """Return the nearest method of an entry, as it would be called."""
    method = parse(found["method"], Method)
    average = _counting_only(found["average"])
    parts = [f"`{found['method']}`"]
    if average == PADDED:
        parts.append("that sums the padding too")
    elif average != method.aggregation:
        parts.append(f"with `aggregation='{average}'`")
    if found["factor"] != 1:
        parts.append(f"times {found['factor']:g}")
    if found["old_policy"] == "engine":
        parts.append("relative to the engine's policy")
    elif found["old_policy"] == "trainer" and method.old_policy == "rollout":
        parts.append("relative to the trainer's old policy")
    return " ".join(parts)


def _counting_only(average: str) -> str:
    """Return the name of an average that leaves out sequences without a counted token."""
    return {counting: plain for plain, counting in COUNTING_EMPTY.items()}.get(average, average)


def nearness(found: Mapping[str, Any]) -> str:
    """Return in a few words how near the nearest method is."""
    if found["identical"]:
        return "identical"
    if found["changes"]:
        return f"identical but for: {'; '.join(found['changes'])}"
    if found["condition"]:
        return f"identical where {found['condition']}"
    return f"nearest, {_mean(found['agree']):.1%} of the tokens"


def _mean(shares: Mapping[str, float]) -> float:
    return sum(shares.values()) / len(shares)


def sentences(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sentences of the page about a loss."""
    yield from _gradient_sentences(result)
    if names := result.get("without_effect"):
        yield f"No effect: {', '.join(f'`{name}`' for name in names)}."


def _gradient_sentences(result: Mapping[str, Any]) -> Iterator[str]:
    found = result.get("nearest")
    if found is not None:
        yield from _nearest_sentences(found)
    if "plain" not in result:
        if found is None:
            sentence = verdict(result)
            yield f"{sentence[0].upper()}{sentence[1:]}."
        return
    plain = result["plain"]
    method = f"`{result['method']}`"
    same_method = found is not None and found["method"] == result["method"]
    if is_equal(result) and not same_method:
        yield f"Equal to {method}."
    elif not is_equal(result) and not same_method:
        shares = plain["shares"]
        difference = f"Unexplained: {plain['cause']}" if plain["differences"] is None else verdict(result)
        yield (
            f"Not {method}: {difference}. The gradient differs at {shares['usual']:.1%} of the tokens where the policy "
            f"moved as in training, at {shares['near']:.1%} where it hardly moved, at {shares['far']:.1%} where the "
            "policies have nothing in common."
        )
    if plain["counts_empty"]:
        yield "Empty sequences count in the mean."
    if plain["differences"] is not None and not plain["same_value"]:
        yield "The reported number is another one."
    weighted = result.get("weighted")
    if weighted is not None:
        same = weighted["differences"] == plain["differences"]
        if same:
            yield "The same with importance weights."
        else:
            yield f"With importance weights: {_weighted_verdict(weighted)}."


def _nearest_sentences(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sentences about the nearest method."""
    if found["identical"]:
        yield f"Identical to {statement(found)}."
    else:
        agree = found["agree"]
        if found["changes"]:
            yield f"Identical to {statement(found)}, but for: {'; '.join(found['changes'])}."
        elif found["condition"]:
            yield f"Identical to {statement(found)} where {found['condition']}."
        else:
            yield f"Nearest to {statement(found)}."
        yield (
            f"The gradient agrees at {agree['usual']:.1%} of the tokens where the policy moved as in training, at "
            f"{agree['near']:.1%} where it hardly moved, at {agree['far']:.1%} where the policies have nothing in "
            f"common, and at {_recorded(agree):.1%} of recorded tokens; of the tokens that either blocks, both block "
            f"{found['blocked']:.1%}."
        )
        if "first" in found:
            first = found["first"]
            yield (
                f"The first token that differs has p = {first['p']:g}, r = {first['ratio']:g} and "
                f"A = {first['advantage']:g}: its gradient is {first['loss']:g}, that of the method "
                f"{first['method']:g}."
            )
    for other in found["others"][:1]:
        yield f"Where {other['condition']}, also identical to `{other['method']}` with the same average."


def _recorded(agree: Mapping[str, float]) -> float:
    """Return the share of agreement on recorded tokens, as the mean over the records."""
    return _mean({name: share for name, share in agree.items() if name.startswith("record")})


def _weighted_verdict(weighted: Mapping[str, Any]) -> str:
    if weighted["differences"] is None:
        return f"unexplained: {weighted['cause']}"
    return "; ".join(weighted["differences"]) or "equal"


def overview(results: Mapping[str, Any]) -> list[str]:
    """Return the table of all frameworks, as lines of Markdown."""
    lines = [
        "",
        "| framework | version | losses | identical | but for a change | under a condition | nearest | date |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, framework in results.items():
        found = [result["nearest"] for result in framework["losses"].values() if "nearest" in result]
        kinds = [_kind(one) for one in found]
        cells = (
            f"[{name}](#{name.lower()})",
            framework["version"],
            len(kinds) or sum("plain" in result for result in framework["losses"].values()),
            # The losses of a framework whose nearest methods are not known yet were only compared with their namesakes.
            *(kinds.count(kind) if kinds else "–" for kind in KINDS),
            date(framework, results),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return [*lines, ""]


KINDS = ("identical", "changed", "condition", "nearest")


def _kind(found: Mapping[str, Any]) -> str:
    """Return the column of the overview for a loss."""
    if found["identical"]:
        return "identical"
    if found["changes"]:
        return "changed"
    return "condition" if found["condition"] else "nearest"


def same_functions(results: Mapping[str, Any]) -> list[str]:
    """Return the table of the losses that are one function, by their settings, as lines of Markdown."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    texts: dict[tuple[Any, ...], str] = {}
    for name, framework in results.items():
        for loss, result in framework["losses"].items():
            found = result.get("nearest")
            if found is None or not found["identical"]:
                continue
            average = _counting_only(found["average"])
            method = replace(parse(found["method"], Method), aggregation=None)
            key = (method, average, found["factor"], found["old_policy"])
            anchor = f"{name} {loss}".lower().replace(" ", "-")
            texts.setdefault(key, statement(found))
            groups.setdefault(key, []).append(f"[{name} {loss}](#{anchor})")
    lines = ["", "| the method here | the losses |", "|---|---|"]
    for key, losses in sorted(groups.items(), key=lambda group: -len(group[1])):
        if len(losses) > 1:
            lines.append(f"| {texts[key]} | {', '.join(losses)} |")
    return [*lines, ""]


def sections(results: Mapping[str, Any]) -> list[str]:
    """Return the sections of all frameworks and losses, as lines of Markdown. Their anchors are permanent."""
    lines = []
    for name, framework in results.items():
        remark = FRAMEWORKS[name].remark
        lines += ["", f"## {name}", "", f"Version: {framework['version']}. {remark}".rstrip()]
        for loss, result in framework["losses"].items():
            lines += [
                "",
                f"### {name} {loss}",
                "",
                f"`{result['settings']}`",
                "",
                " ".join(sentences(result)),
            ]
    return [*lines, ""]


def lint_table(results: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Return the losses that do not read a setting, by framework and setting, for `rlvet lint`."""
    table: dict[str, dict[str, list[str]]] = {}
    for name, (key, selects) in LINTED.items():
        rows: dict[str, list[set[str]]] = {}
        for result in results[name]["losses"].values():
            loss = read_settings(result["settings"]).get(selects)
            if loss is not None and "without_effect" in result:
                rows.setdefault(loss, []).append(set(result["without_effect"]))
        table[key] = {}
        for option in options_of(name):
            losses = sorted(loss for loss, unread in rows.items() if all(option in one for one in unread))
            if losses:
                table[key][option] = losses
    return table


def write(results: Mapping[str, Any]) -> None:
    """Write the committed results, the page, and the table of `rlvet lint`."""
    ordered = {name: results[name] for name in FRAMEWORKS if name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    LINT.write_text(json.dumps(lint_table(ordered), indent=1) + "\n")
    write_between_marks(PAGE, "overview", overview(ordered))
    write_between_marks(PAGE, "same", same_functions(ordered))
    write_between_marks(PAGE, "losses", sections(ordered))


# --- what newest releases changed -------------------------------------------------------------------------------------


def newest_version(distribution: str) -> str:
    """Ask the package index for the newest release."""
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--ignore-requires-python", "--quiet")
    command = [sys.executable, "-m", "pip", "install", *options, "--report", "-", distribution]
    return json.loads(subprocess.check_output(command, text=True))["install"][0]["metadata"]["version"]


def newest_clone(name: str, folder: Path) -> Path:
    """Clone the newest commit of a framework that is not on the index."""
    clone = folder / f"{name}-clone"
    if not clone.exists():
        subprocess.run(
            ["git", "clone", "--quiet", "--depth", "1", FRAMEWORKS[name].repository, clone], check=True
        )
    return clone


def drift(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the changes between two results, as lines of Markdown; empty if there are none.

    A new version with the same verdicts is not a change.
    """
    lines = []
    for name, new in after.items():
        old = before.get(name, {"version": "none", "losses": {}})
        if "error" in new:
            changes = [f"- could not be run: {new['error']}"]
        else:
            changes = list(_changes(old["losses"], new["losses"]))
        if changes:
            lines += [f"## {name}: {old['version']} → {new['version']}", "", *changes, ""]
    return lines


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for loss, result in new.items():
        before = _describe(old[loss]) if loss in old else "not there"
        after = _describe(result)
        if before != after:
            yield f"- `{loss}` ({result['settings']}), by name `{result['method']}`: was {before}, is now {after}"
        elif loss in old and (moved := _moved(old[loss], result)):
            yield f"- `{loss}` ({result['settings']}): {moved}"
    for loss in old.keys() - new.keys():
        yield f"- `{loss}`: was {_describe(old[loss])}, is no longer compared"


def _moved(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return which shares of agreement with the nearest method changed; empty if none did."""
    if "nearest" not in old or "nearest" not in new:
        return ""
    before, after = old["nearest"]["agree"], new["nearest"]["agree"]
    moved = [name for name in after if abs(after[name] - before.get(name, 2)) > MOVED]
    return ", ".join(
        f"agreed at {before.get(name, 0):.2%} of {name}, now at {after[name]:.2%}" for name in moved
    )


def _describe(result: Mapping[str, Any]) -> str:
    """Return the verdict with its notes."""
    notes = [verdict(result)]
    if "nearest" in result and "error" not in result:
        notes = [f"{statement(result['nearest'])} ({nearness(result['nearest'])})"]
        if "plain" in result:
            notes.append(f"to its namesake {verdict(result)}")
    if "plain" in result and result["plain"]["counts_empty"]:
        notes.append("empty sequences count")
    if names := result.get("without_effect"):
        notes.append(f"without effect {' '.join(names)}")
    if "weighted" in result:
        notes.append(f"with importance weights: {_weighted_verdict(result['weighted'])}")
    return ", ".join(notes)


def run_newest(names: list[str], folder: Path, *, discard: bool = False) -> dict[str, Any]:
    """Compare the newest release or commit of each framework. If one fails, the others are still compared.

    Args:
        names: Names of `FRAMEWORKS`.
        folder: The folder for the environments.
        discard: If True, remove each environment after its use.
    """
    results: dict[str, Any] = {}
    for name in names:
        framework = FRAMEWORKS[name]
        version = "unknown"
        try:
            if framework.distribution:
                version = newest_version(framework.distribution)
            source = None if framework.distribution else newest_clone(name, folder)
            results[name] = run(name, folder, version, source)
        except (subprocess.CalledProcessError, ValueError) as error:
            results[name] = {"version": version, "error": f"{type(error).__name__}: {error}", "losses": {}}
        print(f"{name}: {results[name]['version']}", flush=True)
        if discard:
            shutil.rmtree(folder / name, ignore_errors=True)
    return results


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder for the environments")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="name",
        help=f"frameworks of {list(FRAMEWORKS)}; by default all on the index",
    )
    parser.add_argument("--source", nargs="+", default=[], metavar="NAME=FOLDER", help="clones to run from")
    parser.add_argument(
        "--newest", type=Path, metavar="REPORT", help="write the changes of the newest releases to this file"
    )
    parser.add_argument(
        "--discard", action="store_true", help="with --newest: remove each environment after its use"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        (framework,) = arguments.names
        print(START, json.dumps(results_inside(framework, arguments.folder)), sep="\n")
        return
    sources = {}
    for source in arguments.source:
        name, clone = source.split("=", 1)
        sources[name] = Path(clone).resolve()
    released = [name for name, framework in FRAMEWORKS.items() if framework.distribution]
    if unknown := (set(arguments.names) | sources.keys()) - FRAMEWORKS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(FRAMEWORKS)}")
    if on_index := sources.keys() & set(released):
        parser.error(
            f"{', '.join(sorted(on_index))} is installed from the package index; leave out its --source"
        )
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    committed = json.loads(RESULTS.read_text())

    if arguments.newest:
        if sources:
            parser.error("--newest clones the frameworks that are not on the index; leave out --source")
        newest = run_newest(arguments.names or list(FRAMEWORKS), folder, discard=arguments.discard)
        changes = drift(committed, newest)
        arguments.newest.write_text("\n".join(changes))
        print("\n".join(changes) or "nothing has changed")
        return

    if arguments.discard:
        parser.error("--discard goes with --newest")
    names = arguments.names or released
    if absent := set(names) - {*released, *sources}:
        parser.error(
            f"{', '.join(sorted(absent))} is not on the package index: clone it, and give --source NAME=FOLDER"
        )
    problems = []
    for name in names:
        results = run(name, folder, FRAMEWORKS[name].version, sources.get(name))
        # Results are written at once, in case a later framework fails.
        committed[name] = results
        write(committed)
        for loss, result in results["losses"].items():
            print(f"{name} {loss}: {_describe(result)}", flush=True)
            if "error" in result or "unexplained" in _describe(result):
                problems.append(f"{name} {loss}: {_describe(result)}")
    if problems:
        sys.exit("\n".join(["unexplained, or could not be run:", *problems]))


if __name__ == "__main__":
    main()
