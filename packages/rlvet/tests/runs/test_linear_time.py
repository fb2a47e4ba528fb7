"""Reading takes time that grows at most linearly with the size of a file, whatever its content."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from rlvet.errors import InvalidValue
from rlvet.lint.readers import parse_configurations
from rlvet.runs.configs import newest_configuration
from rlvet.runs.log_files import read_raw
from rlvet.runs.logs import Log, read_log

SIZE = 400_000
"""The number of characters of each hostile file. A reader that takes quadratic time needs minutes for most of them."""

LONGEST = 10.0
"""The largest processor time in seconds. Linear readers take less than 2."""


def fill(start: str, unit: str, end: str = "") -> str:
    """Return a text of `SIZE` characters: a start, as many copies of a unit as fit, and an end."""
    return start + unit * (SIZE // len(unit)) + end


LOGS = {
    "equals signs": fill("", "="),
    "equals signs and a word": fill("", "=====" * 20 + " Step "),
    "headings": fill("", "===== Step 1/2 ===== "),
    "long words": fill("", "step 1 " + "a" * 2000 + "\n"),
    "many words": fill("", "step 1 " + "a " * 1000 + "\n"),
    "many letters and signs": fill("", "step 1 " + "a:" * 1000 + "\n"),
    "names of figures": fill("", "step 1 " + "a" * 1000 + "1" * 1000 + "x\n"),
    "numbers without an end": fill("", "step 1 a=" + "1" * 9000 + "x\n"),
    "an epoch": fill("", "epoch " + "." * 9000 + "1/2 " + " " * 9000 + "\n"),
    "tags of ROLL": fill("", "metrics_tag: {"),
    "tags of ROLL, closed": fill("", "metrics_tag: {", "}"),
    "steps of SkyRL": fill("", "Step 1:\n{"),
    "steps of SkyRL, closed": fill("", "Step 1:\n{}"),
    "spaces of SkyRL": fill("Step 1:", " ", "x"),
    "steps of OpenRLHF": fill("", "Global step 1: {"),
    "a step of slime": fill("", "rollout 1: {'a': "),
    "a step of slime, closed": fill("", "rollout 1: {'a': 1}"),
    "numbers of numpy": fill("", "rollout 1: {'a': " + "np.a(" * 3000 + "}\n"),
    "steps of prime-rl": fill("", "Step 1 | "),
    "words of prime-rl": fill("Step 1 | ", "a ", "x"),
    "dots of prime-rl": fill("Step 1 | a ", ".", "x"),
    "a table of AReaL": fill("Train step 1/2 done.", "│"),
    "cells of AReaL": fill("Train step 1/2 done.", "│a│1"),
    "digits of AReaL": fill("Train step 1/2 done.│a│", "1", "x│"),
    "results of NeMo-RL": fill("===== Step 1/2 =====Training Results:", "• a: 1 "),
    "words of NeMo-RL": fill("===== Step 1/2 =====Training Results:\n• ", "a "),
    "space of NeMo-RL": fill("===== Step 1/2 =====Training Results:\n• a: 1", " ", "x"),
    "lines of NeMo-RL": fill("===== Step 1/2 =====Training Results:\n• a: 1", "\n", "x"),
    "a number of verl": fill("step:1 - a:", "1", "x"),
    "numbers of verl": fill("step:1", " - a:1_1_1_1x"),
    "a key of verl": fill("step:1 - ", "(1e", ":1"),
    "steps of verl": fill("", "step:1 - "),
    "calls": fill("{'loss': a", "()", "}"),
    "signs": fill("{'loss': ", "-", "1}"),
    "sums": fill("{'loss': 1", "+1", "}"),
    "attributes": fill("{'loss': a", ".a", "}"),
    "powers": fill("{'loss': 1", "**1", "}"),
    "brackets of a row": fill("", "{'loss': ["),
    "starts of rows": fill("", "{'"),
    "pairs": fill("'loss': ", "'a': '"),
    "pairs of two quotes": fill("'loss': ", "'a': \""),
    "progress": fill("", "1/1"),
    "bars": fill("", "1", "/1 ["),
    "tables": fill("", "|\t"),
    "rows of a table": fill("step|a|b\n", "1|2|3|4\n"),
    "a header": fill("a,b", " ", "!"),
    "a header of cells": fill("a", ",b", "!"),
    "escapes": fill("", "\x1b["),
    "escapes of digits": fill("", "\x1b[" + "1" * 1000),
}
"""Console outputs."""

KEYS = {
    "components": fill("", "rewards/"),
    "a component": fill("rewards/", "a"),
    "means": fill("rewards/", "/mean"),
    "losses": fill("", "loss"),
    "lengths": fill("", "length"),
    "lengths and slashes": fill("", "length/"),
    "runtimes": fill("", "runtime"),
    "wall times": fill("", "wall time/"),
    "global steps": fill("", "/global_step"),
    "progress": fill("", "/progress/"),
    "digits": fill("mean@", "1"),
    "passes": fill("", "pass@"),
    "slashes": fill("", "/"),
    "newlines": fill("", "epoch\n"),
}
"""Keys of a row."""

CONFIGURATIONS = {
    "a key of many parts.toml": fill("", "a.", "a = 1"),
    "a quoted key of many parts.toml": fill("", '"a" . ', '"a" = 1'),
    "a header of many parts.toml": fill("[", "a.", "a]"),
    "a header in a text.toml": fill('x = """\n[', "a.", 'a]\n"""'),
    "space in a text.toml": fill('x = """\n[', " ", 'x\n"""'),
    "headers of many parts.toml": fill("", "".join(f"[{'a.' * 40}b{number}]\n" for number in range(100))),
    "open texts.toml": fill("x = 1.", '"""'),
    "escapes.toml": fill("x = '" + "a." * 60 + "'\ny = \"", "\\"),
    "lists.toml": fill("x = ", "["),
    "tables.toml": fill("x = ", "{a="),
    "lists.yaml": fill("", "["),
    "keys.yaml": fill("", "a:\n"),
    "one line.yaml": fill("a: ", "a: "),
    "quotes.yaml": fill("a: '", "''"),
    "a scalar.yaml": fill("a: ", "a "),
    "a scalar of lines.yaml": fill("a: |\n", " a\n"),
    "anchors.yaml": fill("", "- &a a\n"),
    "aliases.yaml": fill("- &a [1, 2]\n", "- *a\n"),
    "questions.yaml": fill("", "? a\n"),
    "tags.yaml": fill("", "- !!int 1\n"),
    "comments.yaml": fill("", "#\n"),
    "spaces.yaml": fill("", " "),
    "dollars.yaml": fill("group_size: 1\na: ", "${a"),
    "keywords.sh": fill("", "then "),
    "negations.sh": fill("", "! "),
    "here-documents.sh": fill("", "cat <<A\n"),
    "lines of a here-document.sh": fill("cat <<A", "\n"),
    "spaces of a here-document.sh": fill("cat <<A\n", " ", "B"),
    "arrays.sh": fill("", "a+=(x)\n"),
    "arrays in a branch.sh": fill("if x; then\n", "a=(x)\n"),
    "arrays of arrays.sh": fill("a=(x y)\n", "a=(${a[@]} ${a[@]})\n"),
    "texts.sh": fill("", "a+=x\n"),
    "long texts.sh": fill("a=" + "x" * 100_000 + "\n", "b+=$a\n"),
    "copies.sh": fill("a=" + "x" * 50_000 + "\necho ", '"$a"b '),
    "commands.sh": fill("", "$(" * 1000 + "\n"),
    "defaults.sh": fill("", "${a:-"),
    "brackets.sh": fill("", "a( "),
    "sums.sh": fill("echo $((", "1+", "1))"),
    "quotes.sh": fill("", "'\""),
    "flags.sh": fill("python train.py ", "--a "),
    "overrides.sh": fill("python train.py a", ".a"),
    "a word.sh": fill("", "a-"),
    "lists of lists.py": "GRPOConfig\n" + "".join(f"a{i} = [{f'a{i + 1}, ' * 90}]\n" for i in range(40)),
    "lists of themselves.py": f"a = [{'b, ' * 90}]\nb = [{'a, ' * 90}]\nGRPOConfig(beta=a)\n",
    "sums of sums.py": "GRPOConfig(beta=a0)\n" + "".join(f"a{i} = a{i + 1} + a{i + 1}\n" for i in range(40)),
    "dictionaries.py": "d = {" + "'a': 1, " * 25_000 + "}\nGRPOConfig(" + "**d, " * 40_000 + ")",
    "calls with dictionaries.py": "d = {"
    + "".join(f"'a{i}': 1, " for i in range(15_000))
    + "}\n"
    + "GRPOConfig(**d)\n" * 15_000,
    "a sum.py": fill("GRPOConfig(beta=1", "+1", ")"),
    "calls.py": fill("GRPOConfig(beta=a", "()", ")"),
    "assignments.py": fill("args = GRPOConfig()\n", "args.beta = 1\n"),
}
"""Configurations for lint. Those of YAML and TOML are read as the configuration of a run too."""


@contextmanager
def limited_time() -> Iterator[None]:
    """Fail if the block takes more processor time than `LONGEST`. A regular expression is interrupted too."""

    def fail(*_: object) -> None:
        raise AssertionError(f"it took more than {LONGEST:g} seconds of processor time")

    previous = signal.signal(signal.SIGPROF, fail)
    signal.setitimer(signal.ITIMER_PROF, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOGS)
def test_logs(name, tmp_path):
    file = tmp_path / "train.log"
    file.write_text(LOGS[name], encoding="utf-8")
    with limited_time(), suppress(InvalidValue):
        Log.of(read_raw(file).runs.get("", []))


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_rows(name, tmp_path):
    file = tmp_path / "metrics.jsonl"
    row = {"step": 1, KEYS[name]: 0.5, "reward": 0.5}
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"step": 2}) + "\n")
    with limited_time():
        assert read_log(tmp_path).rows[1]["reward"] == 0.5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations(name, tmp_path):
    text = CONFIGURATIONS[name]
    with limited_time(), suppress(InvalidValue):
        parse_configurations(text.encode(), name)
    file_name = {"yaml": "config.yaml", "toml": "trainer.toml"}.get(name.rpartition(".")[2])
    if file_name is not None:
        (tmp_path / file_name).write_text(text)
        with limited_time():
            newest_configuration(tmp_path)
