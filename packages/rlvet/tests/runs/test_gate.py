"""The process that reads a stranger's files: its answers, its limits, and its end."""

import dataclasses
import datetime
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlvet import open_run
from rlvet.errors import FileProblem, InvalidValue, MissingPackage, RlvetError
from rlvet.lint import lint_file
from rlvet.runs import gate, plain
from rlvet.runs.files import check_regular
from rlvet.runs.limits import Limits
from rlvet.runs.logs import UnreadableLog
from rlvet.runs.plain import Plain, from_plain, to_plain

pytestmark = pytest.mark.skipif(not gate.HAS_PROCESSES, reason="files are read in this process here")

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits the memory")


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    """Set the limits that the tests of this repository leave out."""
    monkeypatch.setenv("RLVET_LIMITS", "time=1,memory=300MB")


@pytest.fixture(autouse=True)
def _copied(monkeypatch):
    """Read in a copy of this process where that is possible, although tests may have started threads."""
    if sys.platform.startswith("linux") and sys.version_info < (3, 12):
        monkeypatch.setattr(gate, "_can_fork", lambda: True)


@pytest.fixture(params=["copied", pytest.param("new", marks=pytest.mark.slow)])
def way(request, monkeypatch, _copied):
    """Read in a copy of this process, and in a new one."""
    if request.param == "new":
        monkeypatch.setattr(gate, "_can_fork", lambda: False)


# --- Readers. Those of a new process are found by the name of this module. ---


def double(number: int) -> int:
    return 2 * number


def count_up(end: int) -> Iterator[int]:
    yield from range(end)


def process_number() -> int:
    return os.getpid()


def process_numbers() -> Iterator[int]:
    while True:
        yield os.getpid()


def raise_process_number() -> None:
    raise KeyError(os.getpid())


def warn_and_read(path: Path) -> str:
    check_regular(path)
    warnings.warn(f"{path.name} has a word of warning", stacklevel=2)
    return path.read_text(encoding="utf-8")


def never_end(path: Path) -> None:
    check_regular(path)
    while True:
        pass


def match_for_ever(path: Path) -> None:
    """Run a regular expression that takes exponential time, and that no signal handler of Python interrupts."""
    import re

    check_regular(path)
    re.match("(a*)*b", "a" * 100)


def take_memory(path: Path) -> None:
    check_regular(path)
    bytearray(4 * 10**8)


def take_much_memory(path: Path) -> None:
    """Take more than tests before this one may have freed in one piece, which a copy of their process may use again."""
    check_regular(path)
    bytearray(4 * 10**9)


def take_memory_in_small_pieces(path: Path) -> None:
    """Leave too little memory for a message, and keep it in a frame of the traceback."""
    check_regular(path)
    pieces = []
    while True:
        pieces.append({"a": float(len(pieces))})


def wait_for_ever(path: Path) -> None:
    check_regular(path)
    time.sleep(1000)


def end_by(path: Path, number: int) -> None:
    check_regular(path)
    os.kill(os.getpid(), number)
    time.sleep(10)


def end_with(status: int) -> None:
    os._exit(status)


def print_text() -> None:
    os.write(1, b"printed")
    os.write(2, b"printed")


def open_files(path: Path) -> int:
    return len([path.open(encoding="utf-8") for _ in range(10_000)])


def raise_error(kind: str) -> None:
    if kind == "unreadable":
        raise UnreadableLog("several-runs", "two runs", ["a", "b"])
    if kind == "missing":
        Path("/no/such/file").read_text(encoding="utf-8")
    if kind == "package":
        import no_such_package  # noqa: F401
    if kind == "exit":
        sys.exit(3)
    if kind == "bandpo":
        raise MissingPackage("it needs bandpo")
    raise KeyError(kind)


def slow_answers(count: int) -> Iterator[int]:
    """Yield answers, each after half a second of processor time: more than the limit together."""
    for number in range(count):
        end = time.process_time() + 0.5
        while time.process_time() < end:
            pass
        yield number


# --- Answers ---


def test_a_reader_runs_in_another_process(way):
    assert gate.answer_of(double, 21) == 42
    assert list(gate.answers_of(count_up, 4)) == [0, 1, 2, 3]
    assert gate.answer_of(process_number) != os.getpid()


def assert_no_child(number: int) -> None:
    """Raise an error if a process is a child of this one, running or ended and not waited for."""
    with pytest.raises(ChildProcessError):
        os.waitpid(number, os.WNOHANG)


def test_a_process_ends_when_its_answers_are_no_longer_asked_for():
    answers = gate.answers_of(process_numbers)
    number = next(answers)
    assert os.waitpid(number, os.WNOHANG) == (0, 0)  # it runs
    answers.close()
    assert_no_child(number)


def test_no_process_and_no_file_is_left():
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        assert_no_child(gate.answer_of(process_number))
        with pytest.raises(RlvetError, match=r"KeyError: \d+$") as raised:
            gate.answer_of(raise_process_number)
        assert_no_child(int(str(raised.value).rsplit(" ", 1)[1]))
    assert len(os.listdir("/dev/fd")) == before


def test_warnings_are_given_where_the_answer_is(way, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("content")
    with pytest.warns(UserWarning, match=r"a\.txt has a word of warning") as warned:
        assert gate.answer_of(warn_and_read, file) == "content"
    assert [Path(warning.filename).name for warning in warned] == [Path(__file__).name]


def test_a_warning_about_a_run_names_the_line_of_the_caller(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step"')
    run = open_run(tmp_path)
    with pytest.warns(UserWarning, match="the last line is cut off") as warned:
        assert len(run.rows) == 1
    assert [Path(warning.filename).name for warning in warned] == [Path(__file__).name]


@pytest.mark.parametrize("limits", ["", "off"])
def test_a_command_prints_a_warning_as_a_sentence(tmp_path, monkeypatch, limits):
    monkeypatch.setenv("RLVET_LIMITS", limits)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n' * 2 + '{"step"')
    run = subprocess.run(
        [sys.executable, "-m", "rlvet", "diagnose", "."], cwd=tmp_path, capture_output=True, text=True
    )
    assert (
        run.stderr
        == "warning: metrics.jsonl, line 3: the last line is cut off and is left out: b'{\"step\"'\n"
    )


def test_what_a_library_prints_is_not_on_the_terminal(capfd):
    gate.answer_of(print_text)
    assert capfd.readouterr() == ("", "")


def test_errors_of_readers_are_raised_with_their_attributes(way):
    with pytest.raises(UnreadableLog, match="two runs") as raised:
        list(gate.answers_of(gate._returned, raise_error, "unreadable", types=[UnreadableLog]))
    assert (raised.value.code, raised.value.choices) == ("several-runs", ("a", "b"))
    with pytest.raises(FileNotFoundError) as raised_by_system:
        gate.answer_of(raise_error, "missing")
    assert raised_by_system.value.filename == "/no/such/file"
    with pytest.raises(ModuleNotFoundError) as no_module:
        gate.answer_of(raise_error, "package")
    assert no_module.value.name == "no_such_package"
    with pytest.raises(MissingPackage, match=r"^it needs bandpo$"):
        gate.answer_of(raise_error, "bandpo")


def test_other_errors_become_one_sentence_with_a_note():
    for kind, name in (("other", "KeyError: 'other'"), ("exit", "SystemExit: 3")):
        with pytest.raises(RlvetError, match=f"{kind} cannot be read: {name}") as raised:
            gate.answer_of(raise_error, kind)
        assert "\n" not in str(raised.value)
        assert "Traceback" in raised.value.__notes__[0]


# --- Limits ---


@pytest.mark.slow
@pytest.mark.parametrize("reader", [never_end, match_for_ever])
def test_processor_time_is_limited(reader, way, tmp_path, monkeypatch):
    # On a busy machine a second of processor time may take as long as the limit on the time without an answer.
    monkeypatch.setattr(gate, "LONGEST_WAIT", 500.0)
    file = tmp_path / "a.txt"
    file.write_text("")
    message = (
        r"a\.txt takes more than 1 seconds of processor time to read, the limit; .*by the environment variable "
        r"RLVET_LIMITS=time=4$"
    )
    with pytest.raises(InvalidValue, match=message):
        gate.answer_of(reader, file)


@LINUX
@pytest.mark.parametrize("reader", [take_much_memory, take_memory_in_small_pieces])
def test_memory_is_limited(reader, way, tmp_path, monkeypatch):
    # On a busy machine, small pieces of memory take long.
    monkeypatch.setenv("RLVET_LIMITS", "time=200,memory=300MB")
    file = tmp_path / "a.txt"
    file.write_text("")
    with pytest.raises(InvalidValue, match=r"a\.txt takes more than 0\.3 GB of memory .*=memory=1\.2GB$"):
        gate.answer_of(reader, file)


def test_the_limits_are_raised_by_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("RLVET_LIMITS", "memory=4GB")
    file = tmp_path / "a.txt"
    file.write_text("")
    assert gate.answer_of(take_memory, file) is None


def many_values(path: Path) -> list[Any]:
    check_regular(path)
    return [[]] * 2**21


def test_an_answer_of_too_many_values_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(plain, "MOST_VALUES", 1000)
    file = tmp_path / "a.txt"
    file.write_text("")
    with pytest.raises(InvalidValue, match=r"a\.txt cannot be read: it has more than 1,000 values"):
        gate.answer_of(many_values, file)


@pytest.mark.slow
def test_an_answer_has_at_most_a_million_values(way, tmp_path, monkeypatch):
    # To count the values takes about the second that these tests allow.
    monkeypatch.setenv("RLVET_LIMITS", "time=20")
    file = tmp_path / "a.txt"
    file.write_text("")
    with pytest.raises(InvalidValue, match=r"a\.txt cannot be read: it has more than 1,048,576 values"):
        gate.answer_of(many_values, file)


def test_waiting_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "LONGEST_WAIT", 0.5)
    file = tmp_path / "a.txt"
    file.write_text("")
    with pytest.raises(InvalidValue, match=r"a\.txt was given up after 0.5 seconds without an answer"):
        gate.answer_of(wait_for_ever, file)


def test_open_files_are_limited(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("")
    with pytest.raises(OSError, match="Too many open files"):
        gate.answer_of(open_files, file)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL, signal.SIGBUS])
def test_a_signal_ends_the_reader_alone(number, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("")
    with pytest.raises(
        InvalidValue, match=rf"a\.txt cannot be read: .* signal {number.name}, as by a damaged"
    ):
        gate.answer_of(end_by, file, int(number))
    with pytest.raises(InvalidValue, match="its reader ended with status 7"):
        gate.answer_of(end_with, 7)


@pytest.mark.slow
def test_the_time_begins_again_with_each_answer():
    assert list(gate.answers_of(slow_answers, 4)) == [0, 1, 2, 3]


def test_an_answer_that_was_cut_off_or_forged_is_an_error():
    for content in (b"", gate.HEADER.pack(gate.ANSWER, 0, 100) + b"{}", gate.HEADER.pack(b"?", 2**20, 10)):
        pipe, answers = os.pipe()
        os.write(answers, content)
        os.close(answers)
        with pytest.raises(gate._Closed):
            gate._receive(pipe, Limits())
        os.close(pipe)


# --- The variable ---


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", Limits()),
        ("off", None),
        ("OFF", None),
        ("memory=8GB", Limits(memory=8 * 10**9)),
        ("time=600, memory=500MB", Limits(seconds=600, memory=5 * 10**8)),
    ],
)
def test_the_variable(text, limits, monkeypatch):
    monkeypatch.setenv("RLVET_LIMITS", text)
    assert Limits.from_environment() == limits


@pytest.mark.parametrize(
    "text", ["no", "memory=8", "memory=GB", "time=0", "time=1.5", "time=-1", "memory=0GB", "x=1"]
)
def test_another_text_is_an_error_that_names_it(text, monkeypatch):
    monkeypatch.setenv("RLVET_LIMITS", text)
    with pytest.raises(
        InvalidValue, match=f"RLVET_LIMITS is a list such as memory=8GB,time=600 .*got '{text}'"
    ):
        gate.answer_of(double, 1)


# --- Which process is copied ---


def test_a_process_with_threads_is_not_copied(monkeypatch):
    monkeypatch.undo()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not gate._can_fork()
    finally:
        stop.set()
        thread.join()


def test_a_command_reads_in_a_copy_that_leaves_no_trace(tmp_path):
    """The output is printed once, and so is what runs at the end of the process."""
    rows = "".join(f'{{"step": {n}, "reward": {n / 60}, "entropy": 1.0}}\n' for n in range(1, 60))
    (tmp_path / "metrics.jsonl").write_text(rows)
    program = (
        "import atexit, sys; from rlvet.runs import gate; sys.stdout.write('begin '); assert gate._can_fork(); "
        "atexit.register(print, 'end'); sys.argv = ['rlvet', 'diagnose', '.']; from rlvet.cli import main; main()"
    )
    run = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("begin ok: nothing is wrong")
    assert run.stdout.count("begin") == run.stdout.count("\nend") == 1


# --- Plain values ---


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Box:
    content: Any
    path: Path


VALUES = [
    None,
    True,
    -3,
    10**40,
    0.1,
    math.inf,
    "text \ud800 \0",
    b"\x00\xff",
    [1, [2, []]],
    (1, (2,)),
    {1, 2},
    {"dict": {"a": 1}},
    {"tuple": [1]},
    {1: "a", (2, 3): "b"},
    Path("a/b"),
    Pair(1, (2, Pair(3, 4))),
    Box({"a": [Path("x")]}, Path("y")),
    [{"step": float(n), "reward": 0.1 * n} for n in range(100)],
    [{"step": float(n)} | ({"b": 2.0} if n % 10 else {"c": -0.0}) for n in range(100)],
    [{"step": n, "reward": 0.1} for n in range(100)],
    [{} for _ in range(20)],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_a_value_is_read_as_it_was_written(value):
    read = from_plain(to_plain(value), [Pair, Box])
    assert read == value
    assert repr(read) == repr(value)


def test_nan_is_read_as_it_was_written():
    rows = [{"step": float(n), "reward": math.nan} for n in range(20)]
    assert all(math.isnan(row["reward"]) for row in from_plain(to_plain(rows)))
    assert math.isnan(from_plain(to_plain(math.nan)))


def test_arrays_are_read_as_they_were_written_and_can_be_changed():
    np = pytest.importorskip("numpy")
    arrays = [np.arange(6, dtype="float32").reshape(2, 3), np.array([True, False]), np.zeros((0, 3), "int64")]
    written = to_plain(arrays)
    read = from_plain(Plain(written.text, [bytearray(one) for one in written.buffers]))
    for array, copy in zip(arrays, read, strict=True):
        assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
        assert (copy == array).all()
        copy[:] = 1


def test_other_objects_are_no_values():
    np = pytest.importorskip("numpy")
    values = [object(), datetime.date(2026, 1, 1), len, np.array([None]), np.array(["a"])]
    assert from_plain(to_plain(values)) == [None] * 5


FORGED = (
    '{"object": 1, "dict": {}}',
    "{}",
    '{"Popen": {"args": "ls"}}',
    '{"array": {"dtype": "O", "shape": [], "buffer": 0}}',
    '{"array": {"dtype": "<f8", "shape": [2], "buffer": 0}}',
    '{"rows": {"parts": [[["a"], [{"start": 0, "count": 5}]]], "buffer": 3}}',
    '{"rows": {"parts": [[["a"], [[1]]]], "buffer": 0}}',
    '{"tuple": 1}',
    "[",
    '{"Box": {"x": 1}}',
    '{"pairs": [1]}',
    '{"path": 3}',
    '{"bytes": "abc"}',
)
"""Texts that no answer has."""


@pytest.mark.parametrize("text", FORGED)
def test_a_forged_answer_is_an_error(text):
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        from_plain(Plain(text, [b"12345678"]), [Box])


def test_a_shared_structure_is_not_expanded_without_end(monkeypatch):
    monkeypatch.setattr(plain, "MOST_VALUES", 1000)
    value: Any = 1
    for _ in range(40):
        value = (value, value)
    with pytest.raises(InvalidValue, match="more than 1,000 values"):
        to_plain(value)


# --- A run ---


def test_a_run_in_python_is_protected_too(tmp_path):
    (tmp_path / "training_args.bin").write_bytes(b"")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "actor/pg_loss": 0.1}\n' * 3)
    run = open_run(tmp_path)
    assert run.rows == ({"step": 1.0, "reward": 0.5, "actor/pg_loss": 0.1},) or run.rows[0]["reward"] == 0.5
    assert run.setup.framework == "verl"
    assert [text.partition(" was")[0] for text in run.unread] == ["training_args.bin"]


def test_a_file_problem_is_raised_as_one():
    with pytest.raises(FileProblem, match="no such run is no file"):
        lint_file("no such run")
