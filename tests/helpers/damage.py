"""Damage to the bytes of a file, as disks, copies and strangers make it."""

import random


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
