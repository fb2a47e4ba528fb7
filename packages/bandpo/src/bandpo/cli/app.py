"""The `bandpo` app with its subcommands. They import frameworks within their functions, so `bandpo --help` is fast."""

from __future__ import annotations

from typing import Any

import bandpo
from bandpo.cli.audit import audit_command
from bandpo.cli.bounds import bounds_command
from bandpo.cli.command_line import Command, new_app
from bandpo.cli.env import env_command

OTHER_NAMES = {"--method": "--divergence", "--divergence": "--method"}
"""The option of `bandpo bounds` and that of `bandpo audit` that name a rule, each by the other."""


class NamesRule(Command):
    """A subcommand with an option that names a rule; an error about the other command's name for it has this one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's NoSuchOption, which typer has under a private name
            meant = OTHER_NAMES.get(getattr(error, "option_name", None) or "")
            if meant and any(meant in parameter.opts for parameter in self.get_params(ctx)):
                error.possibilities = [meant]  # type: ignore[attr-defined]
            raise


app = new_app(
    "Probability-aware ratio bounds (Band) for PPO and GRPO: bounds, and the audit of a run's clipping.",
    bandpo.__version__,
)

app.command("audit", cls=NamesRule)(audit_command)
app.command("bounds", cls=NamesRule)(bounds_command)
app.command("env")(env_command)
