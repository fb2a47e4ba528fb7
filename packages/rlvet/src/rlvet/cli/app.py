"""The `rlvet` app with its subcommands, whose modules are imported when they run."""

from __future__ import annotations

import rlvet
from rlvet.cli.command_line import new_app
from rlvet.cli.demo import demo_command
from rlvet.cli.diagnose import diagnose_command
from rlvet.cli.diff import diff_command
from rlvet.cli.lint import lint_command
from rlvet.cli.report import report_command
from rlvet.cli.skill import skill_command

app = new_app(
    "Find out what is wrong with a run of RL post-training, or with its configuration.", rlvet.__version__
)

app.command("demo")(demo_command)
app.command("diagnose")(diagnose_command)
app.command("diff")(diff_command)
app.command("lint")(lint_command)
app.command("report")(report_command)
app.command("skill")(skill_command)
