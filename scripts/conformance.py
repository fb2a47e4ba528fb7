"""Compare each loss that a framework ships with the method of that name here: equal, or different and by what.

    python scripts/conformance.py build/conformance              # all frameworks on the package index
    python scripts/conformance.py build/conformance slime prime-rl --source slime=../slime prime-rl=../prime-rl
    python scripts/conformance.py build/conformance --newest build/drift.md

Each framework has its own virtual environment in the folder, as in scripts/matrix.py. Settings that
scripts/conformance.txt does not name have the framework's defaults. The comparison is that of
`bandpo.testing.assert_is`. Results go to research/results/conformance.json with their date and the core, and
docs/measured/conformance.md is written from them: a framework that was not run again keeps its date. A framework that
is not on the index is run from a clone, and the page names its commit. Exits with 1 if a difference is unexplained or a
loss failed.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import framework_losses
from bandpo import Method, parse
from bandpo.certificate.plain import Comparison, compare_loss
from bandpo.certificate.tokens import loss_batches
from bandpo.certificate.variants import COUNTS_EMPTY, Variant
from framework_losses import Loss
from marked import write_between_marks
from matrix import ENVIRONMENTS, ROOT, Environment, admitted, date, install, stamp

PAGE = ROOT / "docs/measured/conformance.md"
RESULTS = ROOT / "research/results/conformance.json"
LOSSES = ROOT / "scripts/conformance.txt"
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
    "verl": Framework(framework_losses.verl, distribution="verl", version="0.9.1", with_dependencies=True),
    "SkyRL": Framework(
        framework_losses.skyrl,
        ENVIRONMENTS["skyrl"].packages,
        distribution="skyrl",
        version="0.3.0",
        bare=("skyrl-gym",),
    ),
    "ms-swift": Framework(
        framework_losses.ms_swift,
        ("msgspec",),
        distribution="ms-swift",
        version="4.6.0",
        with_dependencies=True,
    ),
    "liger-kernel": Framework(
        framework_losses.liger,
        ("transformers",),
        distribution="liger-kernel",
        version="0.8.5",
        remark="The module `LigerFusedLinearGRPOLoss`, which TRL calls with `use_liger_kernel`. The kernel "
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
        remark="`grpo_loss_fn` of the actor. Services that it imports are replaced where they are imported.",
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
    """The method to compare with, or the reason why there is none."""
    weighted: bool
    """True if the loss is also compared with importance weights."""

    @property
    def has_method(self) -> bool:
        """Return True if there is a method to compare with."""
        return self.method.endswith(")")

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


def results_inside(framework: str) -> dict[str, Any]:
    """Compare each loss of a framework, within the framework's environment."""
    results = {}
    for line in lines_of_losses():
        if line.framework != framework:
            continue
        result: dict[str, Any] = {"settings": line.settings, "method": line.method}
        if line.has_method:
            try:
                loss = FRAMEWORKS[framework].loss(**read_settings(line.settings))
                method = parse(line.method, Method)
                result["plain"] = compare(loss, method)
                if line.weighted:
                    result["weighted"] = compare(loss, method, weighted=True)
            except Exception as error:  # one loss that fails must not stop the others
                result["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        results[line.name] = result
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


def sentences(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sentences of the page about a loss."""
    if "plain" not in result:
        sentence = verdict(result)
        yield f"{sentence[0].upper()}{sentence[1:]}."
        return
    plain = result["plain"]
    method = f"`{result['method']}`"
    if is_equal(result):
        yield f"Equal to {method}."
    else:
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


def _weighted_verdict(weighted: Mapping[str, Any]) -> str:
    if weighted["differences"] is None:
        return f"unexplained: {weighted['cause']}"
    return "; ".join(weighted["differences"]) or "equal"


def overview(results: Mapping[str, Any]) -> list[str]:
    """Return the table of all frameworks, as lines of Markdown."""
    lines = ["", "| framework | version | compared | equal | differ | date |", "|---|---|---:|---:|---:|---|"]
    for name, framework in results.items():
        compared = [result for result in framework["losses"].values() if "plain" in result]
        equal = sum(is_equal(result) for result in compared)
        cells = (
            f"[{name}](#{name.lower()})",
            framework["version"],
            len(compared),
            equal,
            len(compared) - equal,
            date(framework, results),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
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


def write(results: Mapping[str, Any]) -> None:
    """Write the committed results and the page."""
    ordered = {name: results[name] for name in FRAMEWORKS if name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    write_between_marks(PAGE, "overview", overview(ordered))
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
            yield f"- `{loss}` ({result['settings']}) against `{result['method']}`: was {before}, is now {after}"
    for loss in old.keys() - new.keys():
        yield f"- `{loss}`: was {_describe(old[loss])}, is no longer compared"


def _describe(result: Mapping[str, Any]) -> str:
    """Return the verdict with its notes."""
    notes = [verdict(result)]
    if "plain" in result and result["plain"]["counts_empty"]:
        notes.append("empty sequences count")
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
        print(START, json.dumps(results_inside(*arguments.names)), sep="\n")
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
