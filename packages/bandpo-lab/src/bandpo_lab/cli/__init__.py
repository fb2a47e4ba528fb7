"""The `bandpo-lab` command. Each subcommand is one file, which imports heavy packages in its function only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec

from bandpo_lab.pip_arguments import OPTIONAL_PACKAGES, SIBLINGS


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

    from bandpo.cli import OPTIONAL_PACKAGES as LIBRARY_PACKAGES
    from bandpo.cli import run_app

    def load_app() -> Callable[[], object]:
        from bandpo_lab.cli.app import app

        return app

    run_app(load_app, {**LIBRARY_PACKAGES, **OPTIONAL_PACKAGES})
