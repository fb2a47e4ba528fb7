"""The `bandpo` command. Each subcommand is one file, imported when it is called."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the `bandpo` command."""
    # A rule, divergence or reward may be named by the import path of a module in the current folder. At the end of the
    # path, so that no file there takes the place of a package.
    sys.path.append(os.getcwd())
    try:
        from bandpo.cli.app import app

        app()
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: this command needs the package {error.name}; pip install 'bandpo[cli,eval,train]' has them all"
        )
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
