"""The `bandpo` command. Each subcommand is one file, imported when it is called."""

from __future__ import annotations

import dis
import os
import sys


def main() -> None:
    """Entry point of the `bandpo` command.

    An error that a check of bandpo raised is shown as one line. Any other keeps its traceback.
    """
    # A rule, divergence or reward may be named by the import path of a module in the current folder. At the end of the
    # path, so that no file there takes the place of a package.
    sys.path.append(os.getcwd())
    try:
        from bandpo.cli.app import app

        app()
    except ModuleNotFoundError as error:
        if not _in_bandpo(error):  # one of bandpo's own imports
            raise
        sys.exit(
            f"error: this command needs the package {error.name}; pip install 'bandpo[eval,study]' has them all"
        )
    except (ValueError, OSError, ImportError) as error:
        if not _in_bandpo(error, raised=True):
            raise
        sys.exit(f"error: {error}")


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
