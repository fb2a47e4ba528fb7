"""The command `rlvet skill`."""

from __future__ import annotations

from pathlib import Path


def skill_path() -> Path:
    """Return the path of SKILL.md, the text for agents that watch a run.

    Its folder is a skill as agents' tools load it: the text, and the schemas of the output of ``--json``.
    """
    return Path(__file__).parents[1] / "skill/rlvet/SKILL.md"


def skill_command() -> None:
    """Print the path of SKILL.md, a text for coding agents: what to call when, and what to do next.

    Its folder can be copied to where an agent looks for skills.
    """
    print(skill_path())
