"""Rehearse each shipped recipe for verl once, and write the table of research/reports/one-card.md.

    python scripts/rehearse_recipes.py build/rehearsals                    # all that did not pass with this code
    python scripts/rehearse_recipes.py build/rehearsals paper/rule/dcpo    # one recipe, by its file
    python scripts/rehearse_recipes.py build/rehearsals --list             # the plan with an estimated time

Each recipe file is rehearsed once, on top of the paper's main experiment, with synthetic data and small models. If the
rehearsal of another file is the same run, only the settings are checked. Recipes that passed with this code are not
repeated, so an interrupted call can be continued. Each result goes to research/results/rehearsals.json at once, with
its date and the core, and the table is written from that file: a row that was not made again keeps its date. Exits with
1 if a rehearsal failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import bandpo
import rlvet
from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.data.authors import STYLES
from bandpo_lab.rehearsal import rehearse
from bandpo_lab.rehearsal.inputs import write_rows
from bandpo_lab.rehearsal.preflight import validate
from bandpo_lab.rehearsal.shrink import compose
from marked import write_between_marks
from matrix import ROOT, date, stamp

PAGE = ROOT / "research/reports/one-card.md"
RESULTS = ROOT / "research/results/rehearsals.json"
USUAL = 65.0
"""The seconds of a rehearsal on two idle cores, about."""

MAIN = {"model": "qwen2.5-3b-instruct", "rule": "band-kl", "variant": "recommended"}
"""The paper's main experiment."""

BESIDE: dict[str, dict[str, str]] = {
    "paper/arm/filter-groups": {"variant": "authors"},
    "paper/arm/dapo": {"variant": "authors", "rule": "clip-higher"},
    "paper/task/commonsenseqa": {"variant": "authors"},
    "paper/task/apps": {"variant": "authors"},
}
"""The base experiments of arms and tasks that differ from the main one, as in the recipes' README."""

MORE = {
    "dapo/overlong": ["+dapo=[dynamic-sampling,overlong]"],  # both, as in the README
    "paper/task/apps": ["+paper/task=apps", "recipe.sandbox=http://localhost:8080/run_code"],
}
"""The overrides after the experiment, for recipes that need more than their file."""

CHECKED = {
    "paper/recommended": "rehearsed with each rule",
    "paper/model/qwen2.5-3b-instruct": "rehearsed with each rule",
    "paper/task/apps": "its reward needs a server of Sandbox Fusion",
}
"""The recipes that are not rehearsed, with the reason. Their settings are checked at full size."""


def recipes() -> list[str]:
    """Return the names of all recipes for verl: their files without the suffix."""
    files = {path.relative_to(SHIPPED) for path in SHIPPED.glob("**/*.yaml")}
    excluded = {
        Path("runtime-env.yaml"),
        Path("paper/accelerate.yaml"),
        Path("paper/trl.yaml"),
        Path("small/one-card-trl.yaml"),
    }
    return sorted(str(path.with_suffix("")) for path in files - excluded)


def overrides(recipe: str) -> list[str]:
    """Return the overrides with which `bandpo-lab rehearse --` rehearses a recipe, in the order of launch.sh."""
    group, _, name = recipe.rpartition("/")
    experiment = MAIN | BESIDE.get(recipe, {})
    kind = group.removeprefix("paper/")
    extra = MORE.get(recipe, [f"+{group}={name}"])
    # A model, rule or variant replaces that of the experiment; other recipes are added to it.
    if group == "paper":
        experiment["variant"] = name
        extra = []
    elif kind in experiment:
        experiment[kind] = name
        extra = []
    model, rule, variant = experiment.values()
    return [f"+paper/model={model}", f"+paper/rule={rule}", f"+paper={variant}", *extra]


def code_digest() -> str:
    """Return a digest of the code and the recipes of the three packages, for which a result is valid."""
    digest = hashlib.sha256()
    for package in (Path(bandpo.__file__).parent, Path(rlvet.__file__).parent, SHIPPED.parent):
        for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".yaml")):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def write_choices(folder: Path) -> Path:
    """Write synthetic multiple-choice questions in the format of the authors' second task; return the folder."""
    for name, numbers in (("commonsenseqa-train", range(100, 116)), ("arc-challenge", range(200, 204))):
        style = STYLES[name]
        rows = [
            {
                "prompt": [{"role": "user", "content": style.template.format(problem=_question(number))}],
                "data_source": style.data_source,
                "ability": "commonsense",
                "reward_model": {"style": "rule", "ground_truth": "ABCDE"[number % 5]},
                "extra_info": {"index": number},
            }
            for number in numbers
        ]
        path = folder / "authors/verl" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(rows, path)
    return folder


def _question(number: int) -> str:
    first = number - number % 5
    choices = "\n".join(f"({letter}) {first + i}" for i, letter in enumerate("ABCDE"))
    return f"Question: Which number follows {number - 1}?\n\nChoices:\n{choices}"


def result(recipe: str, folder: Path) -> dict[str, Any]:
    """Rehearse a recipe or check its settings, and return the result. An error counts as a failure."""
    arguments = overrides(recipe)
    if recipe == "paper/task/commonsenseqa":
        arguments.append(f"recipe.data={write_choices(folder.resolve() / 'data')}")
    try:
        if reason := CHECKED.get(recipe):
            check = validate(compose(arguments, SHIPPED, "ppo_trainer"))
            return {
                "ok": check.ok,
                "verdict": f"settings {'accepted' if check.ok else check.detail}; not rehearsed: {reason}",
                "checks": {},
            }
        report = rehearse(arguments, config_dir=SHIPPED, stand_in=True)
    except ValueError as error:
        return {"ok": False, "verdict": str(error), "checks": {}}
    failed = [f"{check.name}: {check.detail}" for check in report.checks if not check.ok]
    print("\n".join([f"   {report.verdict}; {report.folder}", *failed]), flush=True)
    details = {check.name: check.detail for check in report.checks}
    return {
        "ok": report.ok,
        "verdict": report.verdict,
        "checks": {name: details[name] for name in SHOWN if name in details},
    }


def committed() -> dict[str, dict[str, Any]]:
    """Return the committed results, by recipe."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


SHOWN = ("clip", "loss by hand", "reward")
"""The checks whose details the table shows: the effect of the rule, the loss and the reward."""


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return what the page says of the results: a row for each recipe with its verdict, `SHOWN` and its date."""
    rehearsed = [result for recipe, result in results.items() if recipe not in CHECKED]
    accepted = [recipe for recipe in CHECKED if recipe in results and results[recipe]["ok"]]
    lines = [
        f"{sum(result['ok'] for result in rehearsed)} of {len(rehearsed)} rehearsals passed, and the settings of "
        f"{len(accepted)} other recipes were accepted.",
        "",
        "| recipe | verdict | the rule | the loss | the reward | date |",
        "|---|---|---|---|---|---|",
    ]
    for recipe, content in results.items():
        checks = content["checks"]
        cells = [
            content["verdict"].replace("REHEARSAL PASSED: ", "passed, "),
            *(checks.get(name, "") for name in SHOWN),
            date(content, results),
        ]
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return lines


def write(results: dict[str, dict[str, Any]]) -> None:
    """Write the committed results and the table of the page."""
    ordered = {recipe: results[recipe] for recipe in recipes() if recipe in results}
    RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_between_marks(PAGE, "rehearsals", table(ordered))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder for the data that is made for them")
    parser.add_argument(
        "recipes", nargs="*", metavar="recipe", help=f"recipes of {', '.join(recipes())}; by default all"
    )
    parser.add_argument("--list", action="store_true", help="print the plan, and do nothing else")
    arguments = parser.parse_args()
    if unknown := set(arguments.recipes) - set(recipes()):
        parser.error(f"no recipe {', '.join(sorted(unknown))}; choose from {', '.join(recipes())}")
    digest = code_digest()
    earlier = committed().items()
    passed = {recipe for recipe, content in earlier if content["ok"] and content["code"] == digest}
    # Recipes that are named are repeated even if they passed.
    todo = arguments.recipes or [recipe for recipe in recipes() if recipe not in passed]
    rehearsals = [recipe for recipe in todo if recipe not in CHECKED]
    print(
        f"{len(rehearsals)} rehearsals and {len(todo) - len(rehearsals)} checks of settings, "
        f"about {len(rehearsals) * USUAL / 60:.0f} minutes on two cores with nothing else to do; "
        f"{len(passed)} passed before on this code ({digest})",
        flush=True,
    )
    if arguments.list:
        for recipe in todo:
            print(
                f"{recipe}: {' '.join(overrides(recipe))} {'(settings only)' if recipe in CHECKED else ''}".rstrip()
            )
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    seconds = []
    for recipe in todo:
        print(f"== {recipe}: {' '.join(overrides(recipe))}", flush=True)
        start = time.monotonic()
        content = result(recipe, arguments.folder)
        duration = time.monotonic() - start
        write(committed() | {recipe: {**stamp(), "code": digest, "seconds": round(duration)} | content})
        if not content["ok"]:
            failed.append(recipe)
        if recipe not in CHECKED:
            seconds.append(duration)
            left = (len(rehearsals) - len(seconds)) * sum(seconds) / len(seconds) / 60
            print(f"   {duration:.0f} s; about {left:.0f} minutes left", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
