"""The `bandpo` command. Each subcommand is one file, imported when it is called."""

from __future__ import annotations

import dis
import io
import os
import sys
from typing import NoReturn

BAD_INPUT, INTERRUPTED = 2, 130
"""Exit statuses, beside 1 for what failed otherwise."""


def main() -> None:
    """Entry point of the `bandpo` command.

    An error that a check of bandpo raised is shown as one line, with exit status 2. Any other keeps its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no π prints a ? in its place
    # A rule, divergence or reward may be named by the import path of a module in the current folder. At the end of the
    # path, so that no file there takes the place of a package.
    sys.path.append(os.getcwd())
    try:
        from bandpo.cli.app import app

        app()
    except ModuleNotFoundError as error:
        if not _in_bandpo(error):  # one of bandpo's own imports
            raise
        stop(
            f"error: this command needs the package {error.name}; in a clone of bandpo, pip install '.[study]' has it "
            "for training and studies, '.[eval]' for evaluation and data, '.[verl,eval]' for rehearsals",
            BAD_INPUT,
        )
    except (ValueError, OSError, ImportError) as error:
        if not _in_bandpo(error, raised=True):
            raise
        stop(f"error: {error}", BAD_INPUT)


def stop(line: str, status: int) -> NoReturn:
    """End the command with a line on standard error."""
    print(line, file=sys.stderr)
    end = SystemExit(line)
    end.code = status
    raise end


def _in_bandpo(error: BaseException, raised: bool = False) -> bool:
    """Whether the innermost frame of an error is bandpo's; with ``raised``, whether it stands at a `raise`.

    Without a `raise`, the error comes from what is written in C, such as `int("x")`.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] != "bandpo":
        return False
    instruction = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return not raised or dis.opname[instruction] == "RAISE_VARARGS"
