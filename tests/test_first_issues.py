"""The tasks of docs/first-issues.md name files that exist, and are still open."""

import re

import pytest

from pages import ROOT

TEXT = (ROOT / "docs/first-issues.md").read_text(encoding="utf-8")
TASKS = re.split(r"^## ", TEXT, flags=re.M)[1:]


def part(task: str, name: str) -> str:
    """Return the item of a task with this name, on one line."""
    [item] = re.findall(rf"^- \*\*{name}(?::)?\*\*(.*?)(?=^- \*\*|\Z)", task, re.M | re.S)
    return " ".join(item.split())


def names(text: str) -> list[str]:
    """Return the code spans of a text."""
    return re.findall(r"`([^`]+)`", text)


def test_there_are_ten():
    assert [task.partition(".")[0] for task in TASKS] == [str(number) for number in range(1, 11)]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.splitlines()[0])
def test_a_task_names_files_that_exist_and_is_open(task):
    files = names(part(task, "Files"))
    assert files
    paths = re.findall(r"(?<![\w/])(?:src|tests|docs|scripts)/[\w/.-]+", task)
    assert not [path for path in {*files, *paths} if not (ROOT / path.rstrip(".")).exists()]
    assert part(task, "Do")
    assert "python" in part(task, "Check")

    file, *texts = names(part(task, "Open while"))
    assert file in files
    code = (ROOT / file).read_text(encoding="utf-8")
    contained = any(text in code for text in texts)
    lacks = f"`{file}` lacks" in part(task, "Open while")
    assert contained != lacks, f"docs/first-issues.md: this task is done; remove it and add another:\n{task}"
