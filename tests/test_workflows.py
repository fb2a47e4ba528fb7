"""The workflows of continuous integration: whose code runs in them, and with which rights."""

import re

import pytest
import yaml

from pages import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_keep_no_credentials(workflow):
    """Each by the commit, with its version beside it; a workflow can only read unless a job says otherwise."""
    text = workflow.read_text(encoding="utf-8")
    uses = re.findall(r"uses: (.*)", text)
    assert uses
    assert [line for line in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
    content = yaml.safe_load(text)
    assert content["permissions"] == {"contents": "read"}
    steps = [step for job in content["jobs"].values() for step in job["steps"]]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_an_action_has_one_version():
    """So that an update reaches every workflow."""
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    pins = set(re.findall(r"uses: ([\w-]+/[\w-]+)[\w./-]*@(\w+)", text))
    assert len(pins) == len({name for name, _ in pins})
