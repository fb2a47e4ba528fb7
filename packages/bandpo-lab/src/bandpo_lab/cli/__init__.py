"""The `bandpo-lab` command. Each subcommand is one file, which imports heavy packages in its function only."""

from __future__ import annotations

from collections.abc import Callable

from bandpo.cli import OPTIONAL_PACKAGES as LIBRARY_PACKAGES
from bandpo.cli import run_app

VERL = "-c packages/bandpo-lab/src/bandpo_lab/recipes/gpu.txt '.[verl]' './lab[verl]'"
"""The arguments of pip that install verl in a clone."""
OPTIONAL_PACKAGES = {
    **LIBRARY_PACKAGES,
    **dict.fromkeys(("jinja2", "matplotlib", "pydantic"), ". './lab[study]'"),
    **dict.fromkeys(("math_verify", "httpx"), ". './lab[eval]'"),
    **dict.fromkeys(("verl", "ray", "hydra", "omegaconf"), VERL),
}
"""The packages that a command of `bandpo-lab` may need, with the arguments of pip that install them in a clone."""


def main() -> None:
    """Run the `bandpo-lab` command."""

    def load_app() -> Callable[[], object]:
        from bandpo_lab.cli.app import app

        return app

    run_app(load_app, OPTIONAL_PACKAGES)
