"""Damage to the bytes of a file, as disks, copies and strangers make it."""

import random
import sys

import pytest

from rlvet.runs import gate


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Return other bytes: flipped bits, a cut, an insertion, a run of zeros or of random bytes, or a part twice.

    Args:
        content: The bytes.
        draw: Draws the kind of damage and its place.
    """
    while True:
        data = bytearray(content)
        place = draw.randrange(len(data))
        length = min(draw.choice((1, 4, 8, 64, 1024)), len(data) - place)
        kind = draw.randrange(6)
        if kind == 0:
            for _ in range(draw.choice((1, 1, 3))):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            data[place:place] = draw.randbytes(length)
        elif kind == 3:
            data[place : place + length] = bytes(length)
        elif kind == 4:
            data[place : place + length] = draw.randbytes(length)
        else:
            data[place:place] = data[place : place + length]
        if data != content:
            return bytes(data)


def read_with_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rlvet read in a process with limits, as the commands do, which the tests of this repository leave out.

    It is a copy of this process where that is possible, although other tests may have started threads: a new process
    takes a hundred times as long.
    """
    monkeypatch.setenv("RLVET_LIMITS", "")
    if sys.platform.startswith("linux") and sys.version_info < (3, 12):  # later ones warn of the threads
        monkeypatch.setattr(gate, "_can_fork", lambda: True)
