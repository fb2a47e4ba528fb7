"""The `bandpo` command. Each subcommand is one file, imported when it is called."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

from bandpo._terminal import escape_warnings, printable, printable_lines
from bandpo.errors import BandpoError

if TYPE_CHECKING:
    from bandpo.methods import Method

BAD_INPUT, INTERRUPTED = 2, 130
"""Exit statuses, beside 1 for every other failure."""

OPTIONAL_PACKAGES = {
    "torch": "'.[torch]'",
    **dict.fromkeys(("pyarrow", "numpy"), "'.[records]'"),
    **dict.fromkeys(("trl", "transformers", "tokenizers", "datasets", "accelerate"), "'.[trl]'"),
}
"""Packages that a command of `bandpo` may need, and the arguments of pip that install them in a clone."""


def main() -> None:
    """Run the `bandpo` command."""

    def load_app() -> Callable[[], object]:
        from bandpo.cli.app import app

        return app

    run_app(load_app, OPTIONAL_PACKAGES)


def run_app(load_app: Callable[[], Callable[[], object]], optional_packages: Mapping[str, str]) -> None:
    """Run a command line, and report refused input in one line.

    Input that bandpo or the operating system refuses ends the process with one line and exit status 2. So does a
    missing package that is listed as optional. Every other error keeps its traceback.

    Args:
        load_app: Import and return the app. It is called within the error handling, because the import itself fails
            where typer is not installed.
        optional_packages: Packages that a command may need, and the arguments of pip that install each in a clone.
    """
    # A terminal whose encoding lacks π prints a question mark in its place.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # In a log file, a progress bar writes a line only every ten seconds.
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
    except (BandpoError, OSError) as error:
        # The name of a file may hold the end of a line, which would begin a line of the stranger's own.
        stop(f"error: {printable(error)}", BAD_INPUT)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in optional_packages:
            raise
        stop(
            f"error: this command needs the package {package}; in a clone of bandpo, "
            f"pip install {optional_packages[package]}",
            BAD_INPUT,
        )


def read_method(text: str) -> Method | str:
    """Return the method or rule that an option names, from the current folder if need be.

    Without torch, which methods are made of, its text is returned, and is only shown.
    """
    if importlib.util.find_spec("torch") is None:
        return text
    from bandpo.text import as_method, importable_current_folder

    with importable_current_folder():
        return as_method(text)


def stop(line: str, status: int) -> NoReturn:
    """End the command with a line on standard error."""
    print(printable_lines(line), file=sys.stderr)
    end = SystemExit(line)
    end.code = status
    raise end
