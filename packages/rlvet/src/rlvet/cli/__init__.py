"""The `rlvet` command. Each subcommand is one file, imported when it is called.

Nothing that a program could use is here: a file reads options, calls other folders, and prints what they return.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from rlvet._terminal import escape_warnings, open_outputs, printable, printable_lines
from rlvet.errors import RlvetError

BAD_INPUT = 2
"""The exit status for input that cannot be used, and for all other errors, as 1 is that of a finding."""
INTERRUPTED = 130
"""The exit status after Ctrl-C."""

OPTIONAL_PACKAGES = {
    **dict.fromkeys(("pyarrow", "numpy"), "'./packages/rlvet[records]'"),
    # What bandpo decodes recorded ids with.
    **dict.fromkeys(("transformers", "tokenizers"), "'./packages/bandpo[trl]'"),
}
"""The optional packages of the commands, each with the argument of pip that installs it in a clone."""


def main() -> None:
    """Run the `rlvet` command."""

    def load_app() -> Callable[[], object]:
        from rlvet.cli.app import app

        return app

    run_app(load_app, OPTIONAL_PACKAGES)


def run_app(load_app: Callable[[], Callable[[], object]], optional_packages: Mapping[str, str]) -> None:
    """Run a command line app, and print errors about its input in one line, or in one line for each problem.

    Errors of rlvet and of the operating system end the process with one line and exit status 2, and so does a missing
    optional package, and output that cannot be written. All other errors are printed with their traceback, and have
    the same status.

    Args:
        load_app: A function that imports and returns the app. It is called within the error handling, as the import
            fails if typer is not installed.
        optional_packages: The optional packages, each with the argument of pip that installs it in a clone.
    """
    output = open_outputs()
    try:
        _run_app(load_app, optional_packages)
    finally:
        sys.stdout.flush()
        # A reader that has gone needs no message, such as that of `| head`.
        if isinstance(output.error, BrokenPipeError):
            sys.exit(BAD_INPUT)
        if output.error is not None:
            stop(f"error: the output cannot be written: {output.error.strerror}", BAD_INPUT)


def _run_app(load_app: Callable[[], Callable[[], object]], optional_packages: Mapping[str, str]) -> None:
    """Run a command line app, see `run_app`."""
    # If the output goes to a file, let progress bars write a line only every ten seconds.
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "10")
    escape_warnings()
    try:
        os.getcwd()
    except FileNotFoundError:
        stop("error: the current folder was deleted; change to one that is there", BAD_INPUT)
    try:
        app = load_app()
        app()
    except (RlvetError, OSError) as error:
        # The name of a file may contain a newline, and the text after it must not look like a line of this program.
        stop(_error_text(error), BAD_INPUT)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in optional_packages:
            _fail(error)
        stop(
            f"error: this command needs the package {package}; in a clone of the repository, "
            f"pip install {optional_packages[package]}",
            BAD_INPUT,
        )
    except Exception as error:
        _fail(error)


def _error_text(error: Exception) -> str:
    r"""Return the text of an error: a line, or a line for each problem of an error about several.

    >>> from rlvet.errors import InvalidValue, error_about
    >>> _error_text(InvalidValue("no data in run\n1"))
    'error: no data in run\\n1'
    >>> print(_error_text(error_about(InvalidValue, ["no GPU", "no data"], title="not started")))
    error: not started: 2 problems
      no GPU
      no data
    """
    problems = error.problems if isinstance(error, RlvetError) else ()
    if len(problems) < 2:
        return f"error: {printable(error)}"
    title = f"{error.title}: " if isinstance(error, RlvetError) and error.title else ""
    first = f"error: {printable(title)}{len(problems)} problems"
    return "\n".join([first, *(f"  {printable(problem)}" for problem in problems)])


def _fail(error: Exception) -> NoReturn:
    """Print the traceback of a fault of the program, and exit."""
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(BAD_INPUT)


def stop(line: str, status: int) -> NoReturn:
    """Print a line on standard error, and exit with a status."""
    print(printable_lines(line), file=sys.stderr)
    end = SystemExit(line)
    end.code = status
    raise end
