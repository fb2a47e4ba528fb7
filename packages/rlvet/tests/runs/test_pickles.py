"""Pickles: what is read of honest ones, and that hostile ones end at once."""

import argparse
import enum
import pickle
import time
from collections import OrderedDict, defaultdict

import pytest

from rlvet.errors import InvalidValue
from rlvet.runs.files import PickledObject, read_pickle

TREE = b")" + b"2\x86" * 60
"""A pair of the pair before, sixty times: 2**60 values, in 120 bytes."""

LISTS = b"]" + b"2\x86" * 60
DICTIONARIES = b"}" + b"".join(
    b"q" + bytes([n]) + b"}(K\x01h" + bytes([n]) + b"K\x02h" + bytes([n]) + b"u" for n in range(60)
)

HOSTILE = {
    "a key": b"\x80\x02}" + TREE + b"K\x01s.",
    "keys": b"\x80\x02}(" + TREE + b"K\x01u.",
    "the keys of a dictionary": b"\x80\x02(" + TREE + b"K\x01d.",
    "an element": b"\x80\x04\x8f(" + TREE + b"\x90.",
    "an element of a frozen set": b"\x80\x04(" + TREE + b"\x91.",
    "a value": b"\x80\x02}K\x01" + TREE + b"s.",
    "pairs": b"\x80\x02" + TREE + b".",
    "lists": b"\x80\x02" + LISTS + b".",
    "dictionaries": b"\x80\x02" + DICTIONARIES + b".",
    "arguments": b"\x80\x02ca\nb\n" + TREE + b"\x85R.",
    "a state": b"\x80\x02ca\nb\n)R" + TREE + b"b.",
    "a state without arguments": b"\x80\x02ca\nb\n)\x81" + TREE + b"b.",
    "a list of itself": b"\x80\x02]q\x00h\x00a.",
    "a dictionary of itself": b"\x80\x02}q\x00K\x01h\x00s.",
    "an object of itself": b"\x80\x02ca\nb\n)Rq\x00h\x00b.",
    "lists in lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a forged index": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a length without bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a key that is a class": b"\x80\x02}ca\nb\nK\x01s.",
    "a key that is a list": b"\x80\x02}]K\x01s.",
    "nothing": b"",
}
ALLOWED = ("a forged index",)
"""Those that are read: the memo is a dictionary."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_ends_at_once(name):
    start = time.process_time()
    if name in ALLOWED:
        assert read_pickle(HOSTILE[name]) is None
    else:
        with pytest.raises(InvalidValue, match=r"^x\.pkl is no pickle, or a damaged one \(") as raised:
            read_pickle(HOSTILE[name], "x.pkl")
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 300
    assert time.process_time() - start < 5  # with a collection of garbage that another test has left


class Color(enum.Enum):
    RED = 1


HONEST = {
    "nested": {"a": [1, (2.5, None)], (1, "b"): "x", True: {}},
    "rows": [[number, str(number)] for number in range(10_000)],
    "numbers": [0] * 100_000,
}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_read_as_they_are(name, protocol):
    assert read_pickle(pickle.dumps(HONEST[name], protocol)) == HONEST[name]


def test_sets_and_bytes_are_read_as_they_are():
    value = {b"c": {3, 4}, "d": frozenset(["e"])}
    assert read_pickle(pickle.dumps(value)) == value


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_objects_are_read_as_what_they_are_made_of(protocol):
    shared = [1, 2]
    value = argparse.Namespace(
        a=shared, b=shared, color=Color.RED, order=OrderedDict(x=1), lists=defaultdict(list, y=[3])
    )
    read = read_pickle(pickle.dumps(value, protocol))
    assert isinstance(read, PickledObject)
    assert read.state["a"] is read.state["b"]
    assert read.state["a"] == shared
    assert read.state["order"] == {"x": 1}
    assert read.state["lists"] == {"y": [3]}
    assert read.state["color"].arguments == (1,)
