"""The `bandpo-lab` command. Each subcommand is one file, which imports heavy packages in its function only.

Nothing that a program could use is here: a file reads options, calls other folders, and prints what they return.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec

from bandpo_lab.cluster.pip_arguments import OPTIONAL_PACKAGES, SIBLINGS


def main() -> None:
    """Run the `bandpo-lab` command."""
    # No package requires a sibling in its metadata, so either may be missing.
    for name in ("bandpo", "rlvet"):
        if find_spec(name) is None:
            print(
                f"error: bandpo-lab needs {name}: in a clone of bandpo, "
                f"pip install {SIBLINGS} ./packages/bandpo-lab",
                file=sys.stderr,
            )
            sys.exit(2)

    from bandpo_lab.errors import InvalidValue, is_reported
    from rlvet.cli import run_app
    from rlvet.errors import RlvetError

    def load_app() -> Callable[[], object]:
        from bandpo_lab.cli.app import app

        def run() -> None:
            try:
                app()
            except Exception as error:
                if not is_reported(error):
                    raise
                if isinstance(error, RlvetError):
                    raise
                # An error of bandpo is printed in one line, as those of rlvet are.
                raise InvalidValue(str(error)) from error

        return run

    run_app(load_app, OPTIONAL_PACKAGES)
