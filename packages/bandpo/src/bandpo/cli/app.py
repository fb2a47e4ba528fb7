"""The `bandpo` app with its subcommands. They import frameworks within their functions, so `bandpo --help` is fast."""

from __future__ import annotations

import bandpo
from bandpo.cli.audit import audit_command
from bandpo.cli.bounds import bounds_command
from bandpo.cli.command_line import new_app
from bandpo.cli.env import env_command

app = new_app(
    "Probability-aware ratio bounds (Band) for PPO and GRPO: bounds, and the audit of a run's clipping.",
    bandpo.__version__,
)

app.command("audit")(audit_command)
app.command("bounds")(bounds_command)
app.command("env")(env_command)
