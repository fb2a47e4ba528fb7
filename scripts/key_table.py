"""Find the lines of code that prove the table of logged keys again, in the newest commit of each framework.

    python scripts/key_table.py --clones build/clones

Each row of `packages/rlvet/src/rlvet/data/keys.tsv` has the text of the line that writes its key. The line is looked up
by this text, first in its file and then in all others. A row whose text is there gets the new commit, file and line.
One whose text is gone is listed: its key may have another name, or be gone too, and a reader has to look. The table
is written, and the exit status is 1 if a text is gone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlvet.runs.keys import KEYS, Key

TABLE = Path(__file__).parents[1] / "packages/rlvet/src/rlvet/data/keys.tsv"
REPOSITORIES = {
    **dict.fromkeys(("trl", "trl-async", "trl-rloo", "trl-ppo"), "huggingface/trl"),
    "verl": "verl-project/verl",
    "ms-swift": "modelscope/ms-swift",
    "slime": "THUDM/slime",
    "miles": "radixark/miles",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "skyrl": "NovaSky-AI/SkyRL",
    "openrlhf": "OpenRLHF/OpenRLHF",
    "nemo-rl": "NVIDIA-NeMo/RL",
    "areal": "inclusionAI/AReaL",
    "roll": "alibaba/ROLL",
    "open-instruct": "allenai/open-instruct",
    "rllm": "rllm-org/rllm",
    "tinker": "thinking-machines-lab/tinker-cookbook",
    "torchtitan": "pytorch/torchtitan",
    "tunix": "google/tunix",
    "nanochat": "karpathy/nanochat",
    "axolotl": "axolotl-ai-cloud/axolotl",
    "trlx": "CarperAI/trlx",
}
"""The repository of each framework of the table."""


class Clone:
    """The newest commit of a repository.

    Args:
        folder: The folder of its clone, which is made if there is none.
        address: The address from which it is cloned.
    """

    def __init__(self, folder: Path, address: str):
        self._folder = folder
        if not folder.is_dir():
            command = ["git", "clone", "--quiet", "--depth", "1", address, str(folder)]
            subprocess.run(command, check=True)
        self.commit = self._git("log", "-1", "--format=%h %cs", "--abbrev=9").strip()

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self._folder), *arguments]
        run = subprocess.run(command, capture_output=True, text=True, errors="replace")
        return run.stdout

    def place_of(self, text: str, place: str) -> str:
        """Return the file and line of a text, in its own file if it is there; empty if it is in none."""
        file = place.rpartition(":")[0]
        for paths in ((file,), ("*.py",)):
            for found in self._git("grep", "-nIF", "-e", text, "HEAD", "--", *paths).splitlines():
                _, path, line, _ = found.split(":", 3)
                return f"{path}:{line}"
        return ""


def found_again(rows: Sequence[Key], clones: Mapping[str, Clone]) -> tuple[list[Key], list[Key]]:
    """Return the rows with the places of their lines, and those whose line is gone.

    Args:
        rows: The rows of the table.
        clones: The clone of each framework; rows of others stay as they are.
    """
    result: list[Key] = []
    gone: list[Key] = []
    for row in rows:
        clone = clones.get(row.framework)
        # A line of another package is not in the clone.
        if clone is None or not row.source or row.place.startswith("transformers/"):
            result.append(row)
            continue
        place = clone.place_of(row.source, row.place)
        if not place:
            gone.append(row)
        result.append(row._replace(place=place, commit=clone.commit) if place else row)
    return result, gone


def text_of(rows: Sequence[Key]) -> str:
    """Return the text of the table."""
    lines = ["\t".join(Key._fields), *("\t".join(row) for row in rows)]
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Write the table, and list the rows whose line is gone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clones", type=Path, required=True, help="the folder of the clones")
    options = parser.parse_args()
    repositories: dict[str, Clone] = {}
    for name in dict.fromkeys(REPOSITORIES.values()):
        folder = options.clones / name.replace("/", "+")
        repositories[name] = Clone(folder, f"https://github.com/{name}")
    clones = {framework: repositories[name] for framework, name in REPOSITORIES.items()}
    rows, gone = found_again(KEYS, clones)
    TABLE.write_text(text_of(rows), encoding="utf-8")
    for row in gone:
        print(
            f"{row.framework}: {row.key} ({row.quantity}), written at {row.place} of {row.commit}: {row.source}"
        )
    print(f"{len(rows) - len(gone)} of {len(rows)} rows stand; {len(gone)} lines are gone")
    if gone:
        sys.exit(1)


if __name__ == "__main__":
    main()
