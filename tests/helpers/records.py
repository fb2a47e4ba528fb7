"""Records that were not written by `bandpo.audit.Recorder`, with the digests that it would have written."""

import hashlib
from pathlib import Path


def write_digests(file: Path) -> None:
    """Write the digests of an Arrow stream beside it, a line for each message."""
    import pyarrow as pa

    lines = []
    data = file.read_bytes()
    start = 0
    with pa.OSFile(str(file)) as source:
        while True:
            try:
                pa.ipc.read_message(source)
            except EOFError:
                break
            end = source.tell()
            lines.append(f"{len(lines)} {end} {hashlib.sha256(data[start:end]).hexdigest()}\n")
            start = end
    file.with_suffix(".sha256").write_text("".join(lines))
