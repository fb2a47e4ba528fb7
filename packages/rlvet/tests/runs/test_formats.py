"""Formats and consoles: each is one file, which nothing lists, and their order follows from what they say."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import reading_page
from rlvet.runs.consoles import CONSOLES, in_order
from rlvet.runs.formats import ACCEPTED_FILES, FORMATS, IN_FOLDERS
from rlvet.runs.log_files import format_of, kind_of
from rlvet.runs.logs import read_log
from rlvet.runs.unread import Unread

ROOT = Path(__file__).parents[4]


def test_the_page_has_the_table_of_formats():
    message = "run `python tests/reading_page.py` and commit docs/diagnose.md"
    assert reading_page.PAGE.read_text() == reading_page.page_with_table(), message


@pytest.mark.parametrize("name", FORMATS)
def test_a_pattern_of_a_format_is_its_own(name):
    """Of two formats that match a name, the one of the longer pattern is used, so that a pattern is of one format."""
    known = FORMATS[name]
    assert known.patterns or known.if_named
    for pattern in (*known.patterns, *known.if_named):
        file = Path(pattern.replace("*", "x"))
        matching = [other for other in FORMATS.values() if other.matches(file) == known.matches(file)]
        assert matching == [known], f"{pattern} is a pattern of several formats"
        assert format_of(file) is known


def test_a_name_of_two_formats_is_of_the_longer_pattern():
    assert kind_of(Path("run/trainer_state.json")) == "a trainer's state"
    assert kind_of(Path("run/other.json")) == "JSON"
    assert kind_of(Path("run/metrics.jsonl.gz")) == "JSON lines"
    assert kind_of(Path("run/stdout")) == "text"


def test_files_that_mostly_describe_a_run_are_not_searched_in_a_folder():
    assert {"*.md", "*.ipynb", "*.gz"}.isdisjoint(IN_FOLDERS)
    assert "a notebook (.ipynb)" in ACCEPTED_FILES


def names_before(name):
    """Return the names of all consoles that are asked after one, as it and those behind it say."""
    later = set(CONSOLES[name].before)
    for other in CONSOLES[name].before:
        later |= names_before(other)
    return later


@pytest.mark.parametrize("name", CONSOLES)
def test_the_example_of_a_console_is_read_by_it_first(name, tmp_path):
    """A reader that takes the lines of another console for its own must be asked later: the console says so."""
    console = CONSOLES[name]
    readers = [other for other, known in CONSOLES.items() if known.trainings(console.example, Unread())]
    assert name in readers
    unnamed = set(readers) - {name} - names_before(name)
    assert not unnamed, f"write before={(*console.before, *sorted(unnamed))} in consoles/{name}.py"
    file = tmp_path / "train.log"
    file.write_text(console.example)
    assert [row["reward"] for row in read_log(file).rows] == [0.25]


def test_a_console_before_one_that_does_not_exist_is_an_error():
    console = CONSOLES["custom"]
    with pytest.raises(LookupError, match="a is before 'b': no file"):
        in_order({"a": replace(console, before=("b",))})
    with pytest.raises(ValueError, match="cycle"):
        in_order({"a": replace(console, before=("b",)), "b": replace(console, before=("a",))})
    assert list(in_order({"a": console, "b": replace(console, before=("a",))})) == ["b", "a"]


NEW_FORMAT = """
from pathlib import Path

from rlvet.runs.formats._content import decode
from rlvet.runs.formats._format import Format, RawLog


def read_pairs(file: Path) -> RawLog:
    rows = []
    for line in decode(file).splitlines():
        pairs = (pair.split("~") for pair in line.split())
        rows.append({key: float(value) for key, value in pairs})
    return RawLog({"": rows})


FORMAT = Format(
    kind="pairs",
    patterns=("*.pairs",),
    read=read_pairs,
    example="a tracker's metrics.pairs",
    described="`metrics.pairs`",
    written_by="a tracker",
)
"""
NEW_CONSOLE = """
import re

from rlvet.runs.consoles._console import Console, StepMetrics, by_step
from rlvet.runs.unread import Unread


def _rows(text: str, unread: Unread) -> StepMetrics:
    for line in re.finditer(r"@@ step (\\d+): reward=(\\S+) kl=(\\S+)", text):
        yield int(line[1]), {"reward": float(line[2]), "kl": float(line[3])}


CONSOLE = Console("ToyRL", "@@ step 3: reward=0.25 kl=0.01\\n", by_step(_rows)BEFORE)
"""
USED = """
import reading_page
from pathlib import Path
from rlvet.runs.addresses import HUB_FILES
from rlvet.runs.consoles import CONSOLES
from rlvet.runs.formats import ACCEPTED_FILES, IN_FOLDERS
from rlvet.runs.logs import read_log

Path("run").mkdir()
Path("run/metrics.pairs").write_text("".join(f"step~{step} reward~0.5 kl~0.1\\n" for step in range(1, 5)))
log = read_log("run")
print(len(log.rows), log.source)
print("*.pairs" in IN_FOLDERS, "*.pairs" in HUB_FILES, "a tracker's metrics.pairs" in ACCEPTED_FILES)
print(*[line for line in reading_page.page_with_table().splitlines() if "ToyRL" in line], sep="\\n")
print(*[line for line in reading_page.page_with_table().splitlines() if "`metrics.pairs`" in line], sep="\\n")
"""


def with_new_files(folder, before):
    """Return the environment of a copy of rlvet with a format and a console."""
    source = shutil.copytree(ROOT / "packages/rlvet/src/rlvet", folder / "rlvet")
    (source / "runs/formats/pairs.py").write_text(NEW_FORMAT)
    (source / "runs/consoles/toy_rl.py").write_text(NEW_CONSOLE.replace("BEFORE", before))
    paths = os.pathsep.join(map(str, (folder, ROOT / "tests")))
    return os.environ | {"PYTHONPATH": paths}


@pytest.mark.slow
def test_a_new_format_is_one_file(tmp_path):
    """It is read, found in a folder, downloaded, named in messages and on the page, and no list names it."""
    environment = with_new_files(tmp_path, ', before=("custom",)')
    run = subprocess.run(
        [sys.executable, "-c", USED], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    read, places, console, row = run.stdout.splitlines()
    assert read == "4 pairs, metrics.pairs"
    assert places == "True True True"
    assert "ToyRL" in console
    assert row == "| `metrics.pairs` | a tracker |"


@pytest.mark.slow
def test_a_new_console_whose_lines_another_reader_takes_has_to_say_so(tmp_path):
    """The command of the recipe fails, and its message is the text to paste."""
    environment = with_new_files(tmp_path, "")
    command = [sys.executable, "-m", "pytest", str(Path(__file__)), "-n", "0", "-q", "-k", "toy_rl or pairs"]
    options = ["-p", "no:randomly", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    run = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert "write before=('custom',) in consoles/toy_rl.py" in run.stdout, run.stdout + run.stderr
    (tmp_path / "rlvet/runs/consoles/toy_rl.py").write_text(
        NEW_CONSOLE.replace("BEFORE", ', before=("custom",)')
    )
    run = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout
