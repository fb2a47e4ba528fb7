"""Rehearse each shipped recipe for verl once, and write the table of docs/rehearsal.md.

    python scripts/rehearse_recipes.py build/rehearsals                    # all that the folder has no result of
    python scripts/rehearse_recipes.py build/rehearsals paper/rule/dcpo    # one, by its file
    python scripts/rehearse_recipes.py build/rehearsals --list             # what would be done, and how long it takes

Each file of a recipe is rehearsed once, on top of the paper's main experiment, with made-up data and models. Where
another file's rehearsal is the same run, only the settings are checked. What passed on this code is not done again, so
a call that was stopped goes on. The table is written once every recipe has a result of this code. Exits with 1 if a
rehearsal failed.
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
from bandpo_lab.authors import STYLES
from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.rehearsal import rehearse
from bandpo_lab.rehearsal.inputs import write_rows
from bandpo_lab.rehearsal.preflight import validate
from bandpo_lab.rehearsal.shrink import compose
from marked import write_between_marks

ROOT = Path(__file__).parents[1]
USUAL = 65.0
"""Seconds of one rehearsal where two cores have nothing else to do (docs/rehearsal.md)."""

MAIN = {"model": "qwen2.5-3b-instruct", "rule": "band-kl", "variant": "recommended"}
"""The paper's main experiment."""

BESIDE: dict[str, dict[str, str]] = {
    "paper/arm/filter-groups": {"variant": "authors"},
    "paper/arm/dapo": {"variant": "authors", "rule": "clip-higher"},
    "paper/task/commonsenseqa": {"variant": "authors"},
    "paper/task/apps": {"variant": "authors"},
}
"""The experiment under an arm or a task, where it is not the main one: as the recipes' README has it."""

MORE = {
    "dapo/overlong": ["+dapo=[dynamic-sampling,overlong]"],  # as the README has it: both
    "paper/task/apps": ["+paper/task=apps", "recipe.sandbox=http://localhost:8080/run_code"],
}
"""What follows the experiment, where it is not the file alone."""

CHECKED = {
    "paper/recommended": "rehearsed with each rule",
    "paper/model/qwen2.5-3b-instruct": "rehearsed with each rule",
    "paper/task/apps": "its reward needs a server of Sandbox Fusion",
}
"""What is not rehearsed, and why; its settings are checked at full size."""


def recipes() -> list[str]:
    """Each recipe for verl by its file, without the ending."""
    found = {path.relative_to(SHIPPED) for path in SHIPPED.glob("**/*.yaml")}
    other = {Path("runtime-env.yaml"), Path("paper/accelerate.yaml"), Path("paper/trl.yaml")}
    return sorted(str(path.with_suffix("")) for path in found - other)


def overrides(recipe: str) -> list[str]:
    """Return the overrides with which `bandpo-lab rehearse --` rehearses a recipe, in the order of launch.sh."""
    group, _, name = recipe.rpartition("/")
    experiment = MAIN | BESIDE.get(recipe, {})
    own = MORE.get(recipe, [f"+{group}={name}"])
    if group == "paper":
        experiment["variant"], own = name, []
    elif (kind := group.removeprefix("paper/")) in experiment:
        experiment[kind], own = name, []
    model, rule, variant = experiment.values()
    return [f"+paper/model={model}", f"+paper/rule={rule}", f"+paper={variant}", *own]


def code() -> str:
    """A digest of both packages' code and recipes: a result holds for these."""
    digest = hashlib.sha256()
    for package in (Path(bandpo.__file__).parent, SHIPPED.parent):
        for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".yaml")):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def write_choices(folder: Path) -> Path:
    """A folder for `recipe.data` with questions and lettered choices, as the authors' second task has them."""
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
    """One rehearsal, or the check of settings; a recipe that cannot be rehearsed or composed has not passed."""
    chosen = overrides(recipe)
    if recipe == "paper/task/commonsenseqa":
        chosen.append(f"recipe.data={write_choices(folder.resolve() / 'data')}")
    try:
        if why := CHECKED.get(recipe):
            check = validate(compose(chosen, SHIPPED, "ppo_trainer"))
            return {
                "ok": check.ok,
                "verdict": f"settings {'accepted' if check.ok else check.detail}; not rehearsed: {why}",
            }
        found = rehearse(chosen, config_dir=SHIPPED, stand_in=True)
    except ValueError as error:
        return {"ok": False, "verdict": str(error)}
    failed = [f"{check.name}: {check.detail}" for check in found.checks if not check.ok]
    print("\n".join([f"   {found.verdict}; {found.folder}", *failed]), flush=True)
    return {
        "ok": found.ok,
        "verdict": found.verdict,
        "checks": {check.name: check.detail for check in found.checks},
    }


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """What the folder has of this code."""
    now, found = code(), {}
    for recipe in recipes():
        path = _file(folder, recipe)
        if path.exists() and (one := json.loads(path.read_text())).get("code") == now:
            found[recipe] = one
    return found


def _file(folder: Path, recipe: str) -> Path:
    return folder / f"{recipe.replace('/', '-')}.json"


SHOWN = ("clip", "loss by hand", "reward")
"""The checks of which the table has what they found: what the rule did, the loss, and the reward."""


def write_table(found: dict[str, dict[str, Any]]) -> None:
    """Replace what stands between the markers: a row for each recipe, with its verdict and what its rehearsal did."""
    lines = ["| recipe | verdict | the rule | the loss | the reward |", "|---|---|---|---|---|"]
    for recipe, one in sorted(found.items()):
        checks = one.get("checks", {})
        cells = [
            one["verdict"].replace("REHEARSAL PASSED: ", "passed, "),
            *(checks.get(name, "") for name in SHOWN),
        ]
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    write_between_marks(ROOT / "docs/rehearsal.md", "rehearsals", lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the results go")
    parser.add_argument(
        "recipes", nargs="*", metavar="recipe", help=f"of {', '.join(recipes())}; all if none"
    )
    parser.add_argument("--list", action="store_true", help="print what would be done, and do nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.recipes) - set(recipes()):
        parser.error(f"no recipe {', '.join(sorted(unknown))}; choose from {', '.join(recipes())}")
    passed = {recipe for recipe, one in results(arguments.folder).items() if one["ok"]}
    # One that is named is done again.
    todo = arguments.recipes or [recipe for recipe in recipes() if recipe not in passed]
    whole = [recipe for recipe in todo if recipe not in CHECKED]
    print(
        f"{len(whole)} rehearsals and {len(todo) - len(whole)} checks of settings, about {len(whole) * USUAL / 60:.0f} "
        f"minutes on two cores with nothing else to do; {len(passed)} passed before on this code ({code()})",
        flush=True,
    )
    if arguments.list:
        for recipe in todo:
            print(
                f"{recipe}: {' '.join(overrides(recipe))} {'(settings only)' if recipe in CHECKED else ''}".rstrip()
            )
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    began = code()
    failed, seconds = [], []
    for recipe in todo:
        print(f"== {recipe}: {' '.join(overrides(recipe))}", flush=True)
        started = time.monotonic()
        found = result(recipe, arguments.folder)
        took = time.monotonic() - started
        _file(arguments.folder, recipe).write_text(
            json.dumps(found | {"code": began, "seconds": round(took)})
        )
        if not found["ok"]:
            failed.append(recipe)
        if recipe not in CHECKED:
            seconds.append(took)
            left = (len(whole) - len(seconds)) * sum(seconds) / len(seconds) / 60
            print(f"   {took:.0f} s; about {left:.0f} minutes left", flush=True)
    found = results(arguments.folder)
    if set(found) == set(recipes()):
        write_table(found)
        print("docs/rehearsal.md has the table")
    else:
        print(f"no result of this code yet: {', '.join(sorted(set(recipes()) - set(found)))}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
