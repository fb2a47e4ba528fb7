"""Rehearse each shipped recipe for verl once, and write the table of docs/rehearsal.md.

    python scripts/rehearse_recipes.py build/rehearsals                    # all of them: about a minute each
    python scripts/rehearse_recipes.py build/rehearsals paper/rule/dcpo    # some

Each model, rule and option is rehearsed once, on top of the paper's main experiment. Data and models are stand-ins.
Results that the folder already has stay in the table. Exits with 1 if a rehearsal failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import bandpo
from bandpo.cli.recipes import SHIPPED
from bandpo.lab.rehearsal import CannotRehearse, rehearse
from marked import write_between_marks

ROOT = Path(__file__).parents[1]
MAIN = {"paper/model": "qwen2.5-3b-instruct", "paper/rule": "band-kl"}
"""The paper's main experiment."""


def parts() -> list[str]:
    """Each model, rule and option by its file, without the ending."""
    found = (path.relative_to(SHIPPED).with_suffix("") for path in SHIPPED.glob("*/*/*.yaml"))
    options = (path.relative_to(SHIPPED).with_suffix("") for path in SHIPPED.glob("dapo/*.yaml"))
    return sorted(str(path) for path in (*found, *options))


def overrides(part: str) -> list[str]:
    """What follows `bandpo rehearse --` to rehearse it."""
    group, _, name = part.rpartition("/")
    return ["+paper=base", *(f"+{key}={value}" for key, value in (MAIN | {group: name}).items())]


def result(part: str) -> dict[str, str | bool]:
    """One rehearsal; a recipe that cannot be rehearsed or composed has not passed."""
    started = time.monotonic()
    try:
        found = rehearse(overrides(part), config_dir=SHIPPED, stand_in=True)
    except (CannotRehearse, ValueError) as error:
        return {"ok": False, "verdict": str(error), "loss": "", "version": bandpo.__version__}
    told = {check.name: check.detail for check in found.checks}
    print(f"   {found.verdict}, {time.monotonic() - started:.0f} s, {found.folder}", flush=True)
    return {
        "ok": found.ok,
        "verdict": found.verdict,
        "loss": f"{told.get('clip', '')}; {told.get('loss by hand', '')}",
        "version": bandpo.__version__,
    }


def write_table(folder: Path) -> None:
    """Replace what stands between the markers."""
    lines = ["| recipe | verdict | its loss |", "|---|---|---|"]
    for part in parts():
        if (path := folder / f"{part.replace('/', '-')}.json").exists():
            found = json.loads(path.read_text())
            lines.append(f"| `{part}` | {found['verdict']} | {found['loss']} |")
    write_between_marks(ROOT / "docs/rehearsal.md", "rehearsals", lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the results go")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(parts())}; all if none")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(parts()):
        parser.error(f"no recipe {', '.join(sorted(unknown))}; choose from {', '.join(parts())}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in arguments.parts or parts():
        print(f"== {part}", flush=True)
        found = result(part)
        (arguments.folder / f"{part.replace('/', '-')}.json").write_text(json.dumps(found))
        write_table(arguments.folder)
        if not found["ok"]:
            failed.append(part)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
