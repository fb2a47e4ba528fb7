"""The subcommands. Their bodies import what they need, so `bandpo --help` loads no framework."""

from __future__ import annotations

import bandpo
from bandpo.cli.audit import audit_command
from bandpo.cli.bounds import bounds_command
from bandpo.cli.command_line import new_app
from bandpo.cli.diagnose import diagnose_command
from bandpo.cli.env import env_command
from bandpo.cli.lint import lint_command
from bandpo.cli.report import report_command

app = new_app(
    "Probability-aware ratio bounds (Band) for PPO and GRPO: read what a clip did to a run.",
    bandpo.__version__,
)

app.command("diagnose")(diagnose_command)
app.command("lint")(lint_command)
app.command("audit")(audit_command)
app.command("report")(report_command)
app.command("bounds")(bounds_command)
app.command("env")(env_command)
