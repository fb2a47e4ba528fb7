"""YAML that would end a process, or take its memory or time, is refused by its limits."""

import subprocess
import sys
import time

import pytest

from rlvet import diagnose
from rlvet.errors import InvalidValue
from rlvet.lint.readers import read_configurations
from rlvet.runs.config_limits import check_yaml
from rlvet.runs.configs import newest_configuration
from rlvet.runs.limits import DEEPEST_CONFIG, MOST_NODES
from selection import mostly_slow

yaml = pytest.importorskip("yaml")


def merges(levels: int) -> str:
    """Return mappings of which each merges the one before ten times."""
    lines = ["l0: &l0 {a: 1, b: 2}"]
    for level in range(1, levels + 1):
        aliases = ", ".join([f"*l{level - 1}"] * 10)
        lines.append(f"l{level}: &l{level} {{<<: [{aliases}]}}")
    return "\n".join(lines)


DEEP = {
    "flow lists": "[" * 50_000,
    "flow mappings": "{a: " * 50_000,
    "block lists": "- " * 50_000,
    "keys": "? " * 50_000,
    "closed": "loss_fn: " + "[" * 5_000 + "]" * 5_000,
    "indented": "\n".join(" " * level + "a:" for level in range(2_000)),
    "mixed": "a: " + "[{b: " * 2_000,
}
WIDE = {
    "merges": merges(11),
    "a merge of itself": "a: &a {<<: *a, b: 1}",
    "a list of itself": "a: &a [*a]",
    "aliases": "a: &a [" + "1, " * 999 + "1]\nb: [" + "*a, " * 100 + "*a]",
    "base 60": "a: 1" + ":1" * 100_000,
    "base 60, tagged": 'a: !!int "1' + ":1" * 100_000 + '"',
}


@pytest.mark.parametrize("name", mostly_slow([*DEEP, *WIDE], 4))
def test_a_configuration_beyond_a_limit_is_not_read(name, tmp_path):
    """In a process of its own, which a deep file ended with a segmentation fault."""
    (tmp_path / "config.yaml").write_text((DEEP | WIDE)[name])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    script = (
        "import resource, sys; from pathlib import Path; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31));"
        "resource.setrlimit(resource.RLIMIT_CPU, (20, 20)); from rlvet.runs.configs import newest_configuration;"
        "print(newest_configuration(Path(sys.argv[1])).unread)"
    )
    run = subprocess.run([sys.executable, "-P", "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-500:]
    assert "config.yaml was not read: it " in run.stdout


@pytest.mark.parametrize("name", [*DEEP, *WIDE])
def test_both_readers_refuse_it(name, tmp_path):
    """That of run folders and that of lint, which raises for a deep file and reads a number as text."""
    text = (DEEP | WIDE)[name]
    start = time.process_time()
    with pytest.raises(InvalidValue, match=r"^it (is nested too deeply|has)"):
        check_yaml(text)
    file = tmp_path / "lint.yaml"
    file.write_text(text)
    with pytest.raises(InvalidValue, match=r"lint\.yaml (is nested too deeply|has)"):
        read_configurations(file)
    assert time.process_time() - start < 5


def test_ordinary_files_are_within_the_limits(tmp_path):
    nested = "\n".join("  " * level + f"level{level}:" for level in range(DEEPEST_CONFIG - 1))
    check_yaml(nested + " 1")
    check_yaml("[" + "1, " * (MOST_NODES // 2) + "]")
    check_yaml("a: '" + "word " * 10_000 + "'\nb: 1.5\nc: 2024-01-01 12:30:00")
    check_yaml("- not: [yaml")
    check_yaml("a: *unknown")
    shared = "base: &base {loss_type: dapo, epsilon: 0.2}\n<<: *base\nimportance_sampling_level: token\n"
    (tmp_path / "config.yaml").write_text(shared)
    configuration = newest_configuration(tmp_path).configuration
    assert configuration.framework == "trl"
    assert configuration.settings["epsilon"].value == 0.2


def test_a_diagnosis_names_the_file_that_was_not_read(tmp_path):
    (tmp_path / "config.yaml").write_text("[" * 50_000)
    rows = [f'{{"step": {step}, "reward": 0.{step}, "entropy": 1.0}}\n' for step in range(1, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    assert "config.yaml was not read: it is nested too deeply to be read" in str(diagnose(tmp_path))
