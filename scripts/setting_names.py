"""Check the names of settings in advice against the frameworks' sources, at the commits in the data file.

    python scripts/setting_names.py CLONES

CLONES is a folder that holds a clone of each repository in rlvet's ``data/settings.json`` as ``OWNER+NAME`` or
``OWNER+NAME/repo``. Exits with 1 if a name is not in its file. After a change of a name, write the file that has the
new name, and the commit, into the data file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

DATA = Path(__file__).parents[1] / "packages/rlvet/src/rlvet/data/settings.json"


def patterns_of(name: str) -> list[str]:
    """Return regular expressions that match the name of a setting in a source file."""
    if not name.startswith("--"):
        # A source has only the last part of a dotted name, in the class or mapping of its section.
        return [rf"\b{re.escape(name.rpartition('.')[2])}\b"]
    # OpenRLHF composes some flags, as in f"--{prefix}.adam.lr"; ms-swift declares its flags as fields of a class.
    flag = name.removeprefix("--")
    after_section = flag.partition(".")[2]
    patterns = [rf"--{re.escape(flag)}\b", rf"\b{re.escape(flag)}\b"]
    if after_section:
        patterns.append(rf"}}\.{re.escape(after_section)}\b")
    return patterns


def missing_names(clone: Path, commit: str, names: dict[str, str]) -> list[str]:
    """Return the names that are not in their files of a clone.

    Args:
        clone: The repository.
        commit: The commit to read.
        names: The file that has each name.
    """
    texts: dict[str, str] = {}
    missing = []
    for name, file in names.items():
        if file not in texts:
            command = ["git", "-C", str(clone), "show", f"{commit}:{file}"]
            texts[file] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if not any(re.search(pattern, texts[file]) for pattern in patterns_of(name)):
            missing.append(f"{name} in {file}")
    return missing


def main() -> None:
    """Check all frameworks, and print the missing names."""
    clones = Path(sys.argv[1])
    missing = []
    for framework, entry in json.loads(DATA.read_text()).items():
        verified = entry["verified"]
        if "commit" not in verified:
            continue  # an installed package, which the tests check
        clone = clones / verified["repository"].replace("/", "+")
        clone = clone / "repo" if (clone / "repo").is_dir() else clone
        absent = missing_names(clone, verified["commit"], verified["names"])
        print(f"{framework}: {len(verified['names']) - len(absent)} of {len(verified['names'])} names found")
        missing += [f"{framework}: {name}" for name in absent]
    if missing:
        sys.exit("\n".join(missing))


if __name__ == "__main__":
    main()
