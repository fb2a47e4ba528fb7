"""The app with all subcommands. They import frameworks in their functions only, so `bandpo-lab --help` is fast."""

from __future__ import annotations

import bandpo_lab
from bandpo_lab.cli.compare import compare_command
from bandpo_lab.cli.compare_evals import compare_evals_command
from bandpo_lab.cli.data import app as data_app
from bandpo_lab.cli.eval import eval_command
from bandpo_lab.cli.preflight import preflight_command
from bandpo_lab.cli.recipes import app as recipes_app
from bandpo_lab.cli.rehearse import rehearse_command
from bandpo_lab.cli.run import run_command
from bandpo_lab.cli.setup import setup_command
from bandpo_lab.cli.study import app as study_app
from bandpo_lab.cli.train import train_command
from rlvet.cli.command_line import new_app

app = new_app(
    "The lab of bandpo: prepare data, train, evaluate and compare.",
    bandpo_lab.__version__,
)
# `bandpo-lab train` has TRL's name of this option. As a second name, it would be cut in the help.
NORMALIZED = {"output_dir": "output-dir"}
app.info.context_settings = {
    **(app.info.context_settings or {}),
    "token_normalize_func": lambda name: NORMALIZED.get(name, name),
}

# All arguments of train go to TRL's parser, --help included.
app.command(
    "train",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(train_command)
app.command("eval")(eval_command)
app.command("compare")(compare_command)
app.command("compare-evals")(compare_evals_command)
app.add_typer(data_app, name="data")
app.add_typer(study_app, name="study")
app.add_typer(recipes_app, name="recipes")
app.command("setup")(setup_command)
app.command("preflight")(preflight_command)
app.command("run")(run_command)
app.command("rehearse")(rehearse_command)
