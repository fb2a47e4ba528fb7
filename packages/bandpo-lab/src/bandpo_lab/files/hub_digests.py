"""Compare downloaded files with the digests that the Hugging Face hub states for them.

The hub states the SHA-256 of a large file, and for a small one the SHA-1 with which git names its content. A mirror may
state neither; files are then taken as they arrived, which is said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo_lab.errors import FileProblem
from bandpo_lab.files.writing import digest


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        compared: The number of files that have the hub's digest.
        without_digest: The names of the files for which the hub states no digest.
    """

    compared: int
    without_digest: tuple[str, ...]

    def __str__(self) -> str:
        """Return the result as a sentence."""
        if not self.without_digest:
            return f"{self.compared} files have the digests that the hub states"
        return (
            f"{self.compared} files have the digests that the hub states; it states none for "
            f"{', '.join(self.without_digest[:5])}{' and others' if len(self.without_digest) > 5 else ''}, which are "
            "taken as they arrived"
        )


def git_digest(path: Path) -> str:
    """Return the SHA-1 with which git names the content of a file.

    >>> git_digest(Path("/dev/null"))
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    sha1 = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha1.update(block)
    return sha1.hexdigest()


def compare_with_hub(
    folder: Path, names: Iterable[str], repo: str, revision: str, repo_type: str = "model"
) -> Comparison:
    """Compare files with the digests that the hub states for them, and remove those that differ.

    Args:
        folder: The folder of the downloaded files.
        names: The files, relative to the folder.
        repo: The repository.
        revision: The commit.
        repo_type: ``model`` or ``dataset``.

    Raises:
        FileProblem: Files differ. They are removed, so that the same command downloads them again.
        ConnectionError: The hub cannot be reached.
    """
    stated = _stated_digests(repo, revision, repo_type)
    compared = 0
    without_digest: list[str] = []
    damaged: list[str] = []
    for name in sorted(names):
        path = folder / name
        sha256, sha1 = stated.get(name, (None, None))
        if sha256 is None and sha1 is None:
            without_digest.append(name)
        elif (digest(path) == sha256) if sha256 else (git_digest(path) == sha1):
            compared += 1
        else:
            damaged.append(name)
    for name in damaged:
        # In the hub's cache, the name is a link to the content.
        (folder / name).resolve().unlink()
        (folder / name).unlink(missing_ok=True)
    if damaged:
        raise FileProblem(
            f"{', '.join(damaged)} of {repo}, revision {revision}, did not arrive as the hub has it: the digest "
            "differs. It was removed; give the same command again"
        )
    return Comparison(compared, tuple(without_digest))


def _stated_digests(repo: str, revision: str, repo_type: str) -> dict[str, tuple[str | None, str | None]]:
    """Return the SHA-256 or git's SHA-1 of each file, as the hub states them; None where it states none."""
    import huggingface_hub

    try:
        entries: list[Any] = list(
            huggingface_hub.HfApi().list_repo_tree(
                repo, recursive=True, revision=revision, repo_type=repo_type
            )
        )
    # Without a network, the hub's libraries raise errors of several packages.
    except Exception as error:
        message = " ".join(str(error).split())
        raise ConnectionError(
            f"the hub did not state the digests of {repo}, revision {revision}: {message}. Give the same command again"
        ) from error
    digests: dict[str, tuple[str | None, str | None]] = {}
    for entry in entries:
        lfs = getattr(entry, "lfs", None)
        if lfs is not None:
            # Of a large file, git names the pointer to it and not its content.
            digests[entry.path] = (lfs.sha256, None)
        else:
            digests[entry.path] = (None, getattr(entry, "blob_id", None))  # a folder has none
    return digests
