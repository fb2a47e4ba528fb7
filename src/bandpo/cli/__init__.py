"""The `bandpo` command. Each subcommand is one file, imported when it is called."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from bandpo._terminal import escape_warnings, printable_lines
from bandpo.errors import BandpoError

if TYPE_CHECKING:
    from bandpo.methods import Method

BAD_INPUT, INTERRUPTED = 2, 130
"""Exit statuses, beside 1 for what failed otherwise."""

OPTIONAL = {
    "torch": "'.[torch]'",
    **dict.fromkeys(("pyarrow", "numpy"), "'.[records]'"),
    **dict.fromkeys(("trl", "transformers", "tokenizers", "datasets", "accelerate"), "'.[trl]'"),
    **dict.fromkeys(("jinja2", "matplotlib", "pydantic"), ". './lab[study]'"),
    **dict.fromkeys(("math_verify", "httpx"), ". './lab[eval]'"),
    **dict.fromkeys(("verl", "ray", "hydra", "omegaconf"), "'.[verl]' './lab[verl]'"),
}
"""Packages that a command may need, and what pip in a clone installs them by."""


def main() -> None:
    """Entry point of the `bandpo` command.

    What bandpo or the system refuses is shown as one line, with exit status 2. Any other error keeps its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no π prints a ? in its place
    if not sys.stderr.isatty():  # a bar in a log is a line now and then
        os.environ.setdefault("TQDM_MININTERVAL", "10")
    escape_warnings()
    try:
        from bandpo.cli.app import app

        app()
    except (BandpoError, OSError) as error:
        stop(f"error: {error}", BAD_INPUT)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OPTIONAL:
            raise
        stop(
            f"error: this command needs the package {package}; in a clone of bandpo, pip install {OPTIONAL[package]}",
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
