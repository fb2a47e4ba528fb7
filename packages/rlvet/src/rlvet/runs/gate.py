"""Read a stranger's files in another process, with limits on its processor time, memory and open files.

Every reader of a run is called through `answers_of` or `answer_of`. The process that calls gets plain values, see
`rlvet.runs.plain`, or an error of one sentence: no fault of a library, and no file that takes for ever, ends it.

The process that reads holds its limits itself, also if the process that calls is stopped or gone: it has its own clock,
inherits no open file, and ends at once when the process that called ends, by whatever signal.
"""

from __future__ import annotations

import builtins
import errno
import faulthandler
import gc
import importlib
import json
import math
import os
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rlvet.errors import (
    FileProblem,
    InvalidType,
    InvalidValue,
    MissingPackage,
    OtherFormat,
    RlvetError,
    RunProblem,
)
from rlvet.runs import files
from rlvet.runs.limits import BYTES_PER_SECOND, VARIABLE, Limits
from rlvet.runs.plain import Plain, TooManyValues, from_plain, to_plain

HAS_PROCESSES = os.name == "posix" and sys.platform not in ("emscripten", "wasi")
"""True if a process can be started and limited. Elsewhere files are read in the process that calls: in a browser, which
runs it as a worker that the page ends, and on Windows."""

LONGEST_WAIT = 20.0
"""The largest number of seconds without an answer, as a multiple of the limit on processor time. It ends a reader that
waits for something."""

KEPT_FILES = 20
"""The number of open files that Python and its libraries need beside those of the reader, with the standard streams."""

FIRST_FILE = 3
"""The number of the first open file after the standard streams."""

SIGNAL_AT_END_OF_PARENT = 1
"""The option of Linux's prctl by which a process gets a signal when the process that started it ends."""

PACKAGES = ("rlvet", "bandpo", "bandpo_lab")
"""The packages whose lines a warning about a file does not name, as its reason is the file."""

ANSWER = b"a"
WARNING = b"w"
FILE = b"f"
ERROR = b"e"
END = b"."

HEADER = struct.Struct("<cIQ")
"""The start of a message: its kind, the number of its buffers, and the number of bytes of its JSON."""

SIZE = struct.Struct("<Q")
"""The number of bytes of a buffer. Those of all buffers follow the header."""

MOST_BUFFERS = 2**16
"""The largest number of buffers of a message."""

OUT_OF_MEMORY = errno.ENOMEM
"""The exit status of a reader that met the limit on memory. It may have too little left to write a message."""

SINGLE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_NUM_THREADS")
"""Environment variables by which libraries start no threads, each of which reserves memory."""


def answer_of(reader: Callable[..., Any], *arguments: Any, types: Iterable[type] = ()) -> Any:
    """Return what a reader returns, see `answers_of`."""
    return next(answers_of(_returned, reader, *arguments, types=types))


def _returned(reader: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Yield what a reader returns."""
    yield reader(*arguments)


def answers_of(
    reader: Callable[..., Iterable[Any]], *arguments: Any, types: Iterable[type] = ()
) -> Iterator[Any]:
    """Yield what a reader yields, which runs in a process of its own.

    The limits are those of `Limits.from_environment`. On Linux they hold for processor time, memory and open files. On
    macOS the system does not enforce a limit on memory. Where processes cannot be started, or if the variable is
    ``off``, the reader runs in this process without limits. Warnings of the reader are given here, with the line of the
    newest call from outside of `PACKAGES`.

    Args:
        reader: A function at the top of a module, which yields its results.
        arguments: Its arguments, which `rlvet.runs.plain.to_plain` writes, or other such functions.
        types: The dataclasses, named tuples and errors that it may return or raise.

    Raises:
        ValueError: if a limit is met, or the process is ended by a signal. The message names the file that was read
            last, the limit and the remedy.
        RlvetError, OSError: the errors of the reader.

    >>> from rlvet.runs.files import read_jsonl
    >>> list(answers_of(read_jsonl, Path("no such file")))
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: 'no such file'
    """
    limits = Limits.from_environment()
    if limits is None or not HAS_PROCESSES:
        yield from reader(*arguments)
        return
    types = (*types, *KNOWN_ERRORS)
    job = _Job(reader, arguments, tuple(types), limits)
    try:
        child = _forked(job) if _can_fork() else _spawned(job)
    except OSError as error:
        raise RunProblem(
            f"files are read in a process of their own, which cannot be started: {error.strerror}; free what is "
            f"missing, or, if you trust the files, read them in this process by {VARIABLE}=off"
        ) from error
    try:
        yield from _answers(child, job)
    finally:
        child.end()


class _Job(NamedTuple):
    """A call of a reader."""

    reader: Callable[..., Iterable[Any]]
    arguments: Sequence[Any]
    types: Sequence[type]
    limits: Limits


KNOWN_ERRORS: Sequence[type[RlvetError]] = (
    InvalidValue,
    InvalidType,
    OtherFormat,
    FileProblem,
    MissingPackage,
    RunProblem,
)
"""The errors that every reader may raise."""


# --- The process that calls ---


class _Child:
    """A process that reads.

    Args:
        pipe: The end of the pipe from which its answers are read.
        pid: Its number.
        process: The process, if it is one of `subprocess`.
    """

    def __init__(self, pipe: int, pid: int, process: subprocess.Popen[bytes] | None = None):
        self.pipe = pipe
        self._pid = pid
        self._process = process
        self._status: int | None = None

    def wait(self) -> int:
        """Wait for its end, and return its exit status; the negative number of a signal.

        The status is 0 if this process ignores the signal SIGCHLD, as the system then keeps none.
        """
        if self._status is None:
            if self._process is not None:
                self._status = self._process.wait()
            else:
                try:
                    self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
                except ChildProcessError:
                    self._status = 0
        return self._status

    def end(self) -> None:
        """End it, if it still runs, and close the pipes."""
        with suppress(OSError):
            os.close(self.pipe)
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        if self._status is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self.wait()


class _Closed(Exception):
    """The pipe was closed before a message was complete."""


def _answers(child: _Child, job: _Job) -> Iterator[Any]:
    """Yield the answers of a process, and raise its error."""
    last_file = next((str(one) for one in job.arguments if isinstance(one, str | Path)), "the file")
    while True:
        try:
            kind, content = _receive(child.pipe, job.limits)
        except TimeoutError:
            raise InvalidValue(_reason_of_end(last_file, -signal.SIGALRM, job.limits)) from None
        except _Closed:
            raise InvalidValue(_reason_of_end(last_file, child.wait(), job.limits)) from None
        if kind == END:
            return
        if kind == FILE:
            last_file = str(from_plain(content))
        elif kind == WARNING:
            name, text = from_plain(content)
            category = getattr(builtins, name, UserWarning)
            warnings.warn(text, category, stacklevel=_level_of_caller())
        elif kind == ERROR:
            _raise(json.loads(content.text), last_file, job)
        else:
            yield from_plain(content, job.types)


def _level_of_caller() -> int:
    """Return the stack level of the newest call that is not of these packages, for a warning of the calling function.

    Within a command there is none: its own line, which the command does not print.
    """
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None:
        package, _, module = frame.f_globals.get("__name__", "").partition(".")
        if package not in PACKAGES and package not in ("functools", "contextlib"):
            break
        if package in PACKAGES and module.partition(".")[0] == "cli":
            return 1
        frame = frame.f_back
        level += 1
    return level


def _receive(pipe: int, limits: Limits) -> tuple[bytes, Plain]:
    """Return the kind of the next message, and its content."""
    kind, count, size = HEADER.unpack(_receive_bytes(pipe, HEADER.size, limits))
    if count > MOST_BUFFERS or size > limits.memory:
        raise _Closed
    sizes = [SIZE.unpack(_receive_bytes(pipe, SIZE.size, limits))[0] for _ in range(count)]
    if sum(sizes) > limits.memory:
        raise _Closed
    text = _receive_bytes(pipe, size, limits).decode()
    return kind, Plain(text, [_receive_bytes(pipe, one, limits) for one in sizes])


def _receive_bytes(pipe: int, size: int, limits: Limits) -> bytearray:
    """Return a number of bytes of a pipe.

    Raises:
        TimeoutError: if none arrive for too long.
        _Closed: if the pipe is closed before.
    """
    # Arrays are built on these bytes, so they are in one piece, and can be changed.
    data = bytearray(size)
    view = memoryview(data)
    position = 0
    arrival = select.poll()
    arrival.register(pipe, select.POLLIN)
    while position < size:
        if not arrival.poll(1000 * LONGEST_WAIT * limits.seconds):
            raise TimeoutError
        received = os.readv(pipe, [view[position:]])
        if not received:
            raise _Closed
        position += received
    return data


def _reason_of_end(file: str, status: int, limits: Limits) -> str:
    """Return a sentence about a process that ended before its last answer."""
    if status == -signal.SIGALRM:
        return (
            f"{file} was given up after {LONGEST_WAIT * limits.seconds:g} seconds without an answer of its reader; "
            f"{_remedy('time', f'{4 * limits.seconds}')}"
        )
    if status == -signal.SIGXCPU:
        return (
            f"{file} takes more than {limits.seconds} seconds of processor time to read, the limit; "
            f"{_remedy('time', f'{4 * limits.seconds}')}"
        )
    if status == OUT_OF_MEMORY:
        space = _address_space()
        if space < limits.memory:
            return (
                f"{file} cannot be read in the {space / 1e9:g} GB of address space that this process may have; raise "
                "its limit, as by ulimit -v in the shell that starts it"
            )
        return (
            f"{file} takes more than {limits.memory / 1e9:g} GB of memory to read, the limit; "
            f"{_remedy('memory', f'{4 * limits.memory / 1e9:g}GB')}"
        )
    if status < 0:
        name = signal.Signals(-status).name
        return (
            f"{file} cannot be read: its reader was ended by the signal {name}, as by a damaged file, or for lack of "
            "memory"
        )
    if status == 0 and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        return (
            f"{file} cannot be read: its reader ended before its answer, and this process ignores the signal SIGCHLD, "
            "by which it would learn why; read it in a process that does not, as the command rlvet"
        )
    return f"{file} cannot be read: its reader ended with status {status}"


def _address_space() -> float:
    """Return the limit in bytes on the address space of this process, which its readers inherit."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _remedy(name: str, value: str) -> str:
    """Return the remedy for a limit that was met."""
    return f"if you trust it, raise the limit by the environment variable {VARIABLE}={name}={value}"


def _raise(error: Mapping[str, Any], last_file: str, job: _Job) -> NoReturn:
    """Raise the error that a process sent.

    Args:
        error: Its type, message and other attributes, as `_describe` returns them.
        last_file: The file that was read last.
        job: The call.
    """
    name = error.get("type")
    message = str(error.get("message"))
    if name == TooManyValues.__name__:
        raise InvalidValue(f"{last_file} cannot be read: {message}")
    if name == "ModuleNotFoundError":
        raise ModuleNotFoundError(message, name=error.get("module"))
    if name == "OSError":
        raise OSError(error.get("errno"), message, error.get("filename"))
    for kind in job.types:
        if kind.__name__ == name and issubclass(kind, RlvetError):
            # The constructor of an error may have other arguments than its message.
            known = kind.__new__(kind, message)
            for attribute, value in from_plain(Plain(error["attributes"], ())).items():
                setattr(known, attribute, value)
            raise known
    unknown = RunProblem(f"{last_file} cannot be read: {name}: {' '.join(message.split()):.300}")
    unknown.add_note(str(error.get("traceback")))
    raise unknown


# --- The process that reads ---


def _can_fork() -> bool:
    """Return True if this process may be copied: on Linux, and if no thread of it may hold a lock."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _pipe() -> tuple[int, int]:
    """Return the two ends of a pipe, of which none has the number of a standard stream that was closed."""
    import fcntl

    ends = os.pipe()
    numbers = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FIRST_FILE) for end in ends]
    for end in ends:
        os.close(end)
    return numbers[0], numbers[1]


def _forked(job: _Job) -> _Child:
    """Start a reader in a copy of this process, which takes milliseconds."""
    caller = os.getpid()
    pipe, answers = _pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(pipe)
        os.close(answers)
        raise
    if not pid:
        # This is the new process. It must not return, and never flush what the first has not printed yet.
        try:
            _end_with(caller)
            _close_inherited_files(answers)
            os.environ.update(dict.fromkeys(SINGLE_THREAD, "1"))
            _serve(answers, job)
        finally:
            os._exit(1)
    os.close(answers)
    return _Child(pipe, pid)


def _end_with(parent: int) -> None:
    """Let Linux end this process when the process that started it ends."""
    # The module takes milliseconds to load, and a process that only calls has loaded it with the first copy.
    import ctypes

    ctypes.CDLL(None).prctl(SIGNAL_AT_END_OF_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _close_inherited_files(kept: int) -> None:
    """Close all files of the process that was copied but one, and the standard streams, which are silenced later."""
    # An object of a closed file must not be collected, since its number may be that of another file then.
    gc.freeze()
    for number in map(int, os.listdir("/proc/self/fd")):
        if number >= FIRST_FILE and number != kept:
            with suppress(OSError):
                os.close(number)


def _spawned(job: _Job) -> _Child:
    """Start a reader in a new process, which takes some tenths of a second.

    Its standard input stays open after the call was written to it, and is closed by the system when this process ends.
    """
    if not sys.executable:
        raise FileNotFoundError(errno.ENOENT, "sys.executable names no Python")
    pipe, answers = _pipe()
    path = [folder for folder in sys.path if folder]
    program = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from rlvet.runs.gate import serve_standard_input; serve_standard_input(int(sys.argv[2]))"
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, json.dumps(path), str(answers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[answers],
            env={**os.environ, **dict.fromkeys(SINGLE_THREAD, "1")},
        )
    except OSError:
        os.close(pipe)
        raise
    finally:
        os.close(answers)
    arguments = [{"function": _name(one)} if callable(one) else {"value": one} for one in job.arguments]
    text = to_plain(
        {
            "reader": _name(job.reader),
            "arguments": arguments,
            "types": [_name(kind) for kind in job.types],
            "limits": asdict(job.limits),
        }
    ).text
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(text.encode() + b"\n")
        process.stdin.flush()
    return _Child(pipe, process.pid, process)


def _name(value: Callable[..., Any]) -> str:
    """Return the module and name of a function or class at the top of a module."""
    return f"{value.__module__}:{value.__qualname__}"


def _named(name: str) -> Any:
    """Return the function or class of `_name`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def serve_standard_input(answers: int) -> NoReturn:
    """Run the reader whose call the process that spawned this one writes to standard input.

    Args:
        answers: The number of the pipe for the answers.
    """
    call = from_plain(Plain(sys.stdin.buffer.readline().decode(), ()))
    _end_with_standard_input()
    arguments = [_named(one["function"]) if "function" in one else one["value"] for one in call["arguments"]]
    types = [_named(name) for name in call["types"]]
    _serve(answers, _Job(_named(call["reader"]), arguments, types, Limits(**call["limits"])))


def _end_with_standard_input() -> None:
    """Let the system end this process when the other end of its standard input is closed.

    The option of `_end_with` would end it with the thread that started it. Nothing is written to the input any more.
    """
    import fcntl

    # This file outlives the standard stream, which is silenced. The signal SIGIO ends this process.
    kept = os.dup(0)
    fcntl.fcntl(kept, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(kept, fcntl.F_SETFL, fcntl.fcntl(kept, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(kept, 0)
    if closed.poll(0):
        os._exit(0)


def _serve(answers: int, job: _Job) -> NoReturn:
    """Run a reader with limits, write what it yields to a pipe, and end this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.disable()
    # What libraries print, such as the reason of an abort, is not for the terminal.
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silence, stream)
    clock = _Clock(job.limits)
    try:
        _limit_resources(job.limits)

        def send(kind: bytes, value: Any) -> None:
            # The other process may take its answers late. That is no fault of the reader.
            clock.pause()
            _send(answers, kind, value)
            clock.resume()

        def send_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
            send(WARNING, [category.__name__, str(message)])

        def report_file(path: Path, size: int) -> None:
            clock.add(size / BYTES_PER_SECOND)
            send(FILE, str(path))

        clock.restart()
        files.on_reading = report_file
        with warnings.catch_warnings():
            # Python's own parser warns of odd texts, which are no errors of a program here.
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = send_warning
            for answer in job.reader(*job.arguments):
                send(ANSWER, answer)
                clock.restart()
        send(END, None)
    except BrokenPipeError:
        os._exit(0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # whatever it is, the other process raises it
        try:
            _write(answers, ERROR, Plain(json.dumps(_describe(error)), ()))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except OSError:
            pass  # nobody reads the pipe any more
    os._exit(0)


def _send(answers: int, kind: bytes, value: Any) -> None:
    """Write a message to a pipe."""
    _write(answers, kind, to_plain(value))


def _write(answers: int, kind: bytes, content: Plain) -> None:
    """Write a message in the form of `to_plain` to a pipe."""
    text = content.text.encode()
    buffers = [memoryview(one).cast("B") for one in content.buffers]
    start = HEADER.pack(kind, len(buffers), len(text)) + b"".join(SIZE.pack(len(one)) for one in buffers)
    for part in (start, text, *buffers):
        view = memoryview(part)
        while view:
            view = view[os.write(answers, view) :]


def _describe(error: BaseException) -> dict[str, Any]:
    """Return an error for the process that calls, which raises it by `_raise`."""
    if isinstance(error, RlvetError):
        attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
        return {"type": type(error).__name__, "message": str(error), "attributes": to_plain(attributes).text}
    if isinstance(error, ModuleNotFoundError):
        return {"type": "ModuleNotFoundError", "message": str(error), "module": error.name}
    if isinstance(error, OSError) and error.strerror:
        filename = None if error.filename is None else os.fsdecode(error.filename)
        return {"type": "OSError", "errno": error.errno, "message": error.strerror, "filename": filename}
    return {
        "type": type(error).__name__,
        "message": str(error)[:1000],
        "traceback": "".join(traceback.format_exception(error))[-10_000:],
    }


class _Clock:
    """The limits on the processor time of this process from one answer to the next, and on its time without a message.

    The system ends the process when one is met, also within a call of a library.

    Args:
        limits: The limits.
    """

    def __init__(self, limits: Limits):
        self._seconds = limits.seconds
        self._end = 0.0

    def restart(self) -> None:
        """Begin the times to the next answer."""
        self._end = time.process_time() + self._seconds
        self._set()
        self.resume()

    def add(self, seconds: float) -> None:
        """Add processor time to that to the next answer."""
        self._end += seconds
        self._set()

    def pause(self) -> None:
        """Let time pass without a message."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def resume(self) -> None:
        """Begin the time to the next message."""
        signal.setitimer(signal.ITIMER_REAL, LONGEST_WAIT * self._seconds)

    def _set(self) -> None:
        import resource

        end = int(self._end) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        if hard != resource.RLIM_INFINITY:
            end = min(end, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (end, hard))


def _limit_resources(limits: Limits) -> None:
    """Limit the memory and the open files of this process, and let it write no core file.

    The memory that is limited is what the process itself may write to, beyond what it has now. Linux enforces it when
    memory is requested, and macOS does not.
    """
    import resource

    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, KEPT_FILES + limits.open_files)
    _lower(resource.RLIMIT_DATA, _memory_now() + limits.memory)


def _lower(kind: int, value: int) -> None:
    """Lower a limit of this process, if it is not lower already."""
    import resource

    _, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY or value < hard:
        # A system without this limit refuses it.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, hard))


def _memory_now() -> int:
    """Return the number of bytes of memory that this process may write to; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
