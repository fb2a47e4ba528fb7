"""What works where rlvet is not installed, and the one sentence of what does not."""

import json

import pytest

from helpers.without_rlvet import INSTALL, run_without_rlvet

pytestmark = pytest.mark.slow  # each test has a process that imports torch

USERS = {
    "from bandpo.watch import Watch": "bandpo.watch",
    "import bandpo.watch.run_watch": "bandpo.watch",
    "from bandpo.replay.record import replay_record": "bandpo.replay",
    "from bandpo.testing import check_record; check_record('nowhere', [])": "check_record",
}
"""Statements that need rlvet, and what the error names as what needs it."""
RAISED = """
import json
from bandpo.core.errors import MissingPackage
for statement in json.loads(sys.argv[1]):
    try:
        exec(statement)
    except MissingPackage as error:
        print(error)
    else:
        print("no error:", statement)
"""


def test_what_needs_it_says_so():
    output, _ = run_without_rlvet(RAISED, json.dumps(list(USERS)))
    assert output.splitlines() == [f"{user} needs rlvet: {INSTALL}" for user in USERS.values()]


COMMANDS = """
from bandpo.cli import main
for command in (["bounds", "0.1"], ["--help"], ["audit", "--help"], ["audit", sys.argv[1]]):
    sys.argv[:] = ["bandpo", *command]
    try:
        main()
    except SystemExit as end:
        print("status", end.code)
"""


def test_the_audit_of_a_run_ends_in_one_line_and_the_other_commands_work(tmp_path):
    output, errors = run_without_rlvet(COMMANDS, tmp_path)
    assert [line for line in output.splitlines() if line.startswith("status")] == ["status 0"] * 3 + [
        "status 2"
    ]
    assert "rlvet:" not in output
    assert errors == f"error: bandpo audit needs rlvet: {INSTALL}\n"


def test_the_rest_of_bandpo_works(tmp_path):
    pytest.importorskip("pyarrow")
    output, _ = run_without_rlvet(
        """
import torch
import bandpo.integrations
from bandpo import policy_loss
from bandpo.audit import Audit, Recorder
from bandpo.testing import assert_is
logp = -torch.rand(2, 3) - 0.1
with Recorder(sys.argv[1], method="DAPO()") as recorder:
    recorder.add(logp=logp, logp_old=logp, advantages=torch.tensor([1.0, -1.0]))
print(policy_loss(logp, logp, torch.tensor([1.0, -1.0])).loss.isfinite().item())
""",
        tmp_path,
    )
    assert output == "True\n"
    assert len(list(tmp_path.glob("tokens-*"))) == 2
