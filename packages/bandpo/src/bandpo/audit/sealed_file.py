"""The file of a record, written in parts, with the digest of each part in a file beside it.

Beside ``NAME.arrow`` there is a file ``NAME.sha256`` with one line per part: its number, the byte at which it ends, and
the SHA-256 of its bytes. So `rlvet` notices damage before Arrow reads a part.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path

SUFFIX = ".sha256"
"""The suffix of the file of digests, which otherwise has the name of the record's file."""

STREAM_END = b"\xff\xff\xff\xff" + bytes(4)
"""The last bytes of an Arrow stream that was closed."""


class SealedFile:
    """A writer for a record's file and the digest of each part.

    Args:
        path: The file of tokens; it must not exist.

    Raises:
        FileExistsError: if it exists.
    """

    def __init__(self, path: Path):
        # If the second file cannot be opened, the first is closed.
        with ExitStack() as stack:
            self._file = stack.enter_context(path.open("xb"))
            self._digests = stack.enter_context(path.with_suffix(SUFFIX).open("wb"))
            self._open_files = stack.pop_all()
        self._number = 0

    def write_part(self, data: bytes) -> None:
        """Write a part, then its digest, and flush both to the operating system."""
        self._file.write(data)
        self._file.flush()
        digest = hashlib.sha256(data).hexdigest()
        self._digests.write(f"{self._number} {self._file.tell()} {digest}\n".encode())
        self._digests.flush()
        self._number += 1

    def sync(self) -> None:
        """Force the operating system to write both files to the disk."""
        os.fsync(self._file.fileno())
        os.fsync(self._digests.fileno())

    def close(self) -> None:
        """Write the end of the stream, and close both files."""
        with self._open_files:
            self._file.write(STREAM_END)
