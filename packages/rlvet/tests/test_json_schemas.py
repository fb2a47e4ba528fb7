"""What --json prints agrees with the shipped schemas, and a schema that changes gets the next version."""

import copy
import hashlib
import json
import os
import random
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.random_logs import random_rows
from helpers.simulated_runs import FAULTS, simulate
from pages import ROOT
from rlvet.cli.app import app

sys.path.insert(0, str(ROOT / "benchmarks/doctor"))

from log_scenarios import SCENARIOS, SHAPES, healthy

jsonschema = pytest.importorskip("jsonschema")

ASSETS = ROOT / "packages/rlvet/src/rlvet/skill/rlvet/assets"
SCHEMAS = {file.name.partition(".")[0]: json.loads(file.read_text()) for file in ASSETS.glob("*.schema.json")}
VALIDATORS = {name: jsonschema.Draft202012Validator(schema) for name, schema in SCHEMAS.items()}

PAIRS = sorted((ROOT / "packages/rlvet/tests/compare/pairs").glob("*/"))

LOGS = Path(os.environ.get("BANDPO_TEST_DATA", "missing")) / "logs"
LOG_FILES = sorted(path for path in LOGS.rglob("*") if path.is_file() and path.name != "README.md")
NEEDS_LOGS = pytest.mark.skipif(not LOG_FILES, reason="BANDPO_TEST_DATA has no logs")

TEXT_FIELDS = ("title", "description")
"""What a schema says for readers. It may change within a version."""

DIGESTS = {
    "urn:rlvet:diagnose:1": "0e3c81defed0a045",
    "urn:rlvet:lint:1": "a96e6f4b762ab0da",
    "urn:rlvet:diff:1": "84e39e02229376cd",
}
"""The digest of every version of a schema. A line is added for a new version; no line is ever changed."""


def refuse_constant(name):
    """Refuse NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is not in JSON")


def run_json(command, *arguments):
    """Run a command with --json, and return its exit code and what it prints, read as strict JSON; None if nothing."""
    result = CliRunner().invoke(app, [command, *map(str, arguments), "--json"])
    text = result.stdout
    return result.exit_code, json.loads(text, parse_constant=refuse_constant) if text else None


def check(command, output):
    """Check that an output agrees with the schema of its command."""
    errors = [f"{error.json_path}: {error.message}" for error in VALIDATORS[command].iter_errors(output)]
    assert errors == []


def write_log(folder, rows):
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def without_texts(schema):
    """Return a schema without the texts for readers. A field may have the name of such a text."""
    if isinstance(schema, list):
        return [without_texts(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {}
    for name, value in schema.items():
        if name in ("properties", "$defs"):
            plain[name] = {key: without_texts(item) for key, item in value.items()}
        elif name not in TEXT_FIELDS:
            plain[name] = without_texts(value)
    return plain


def digest(schema):
    text = json.dumps(without_texts(schema), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- The schemas themselves ---


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_of_the_draft(name):
    schema = SCHEMAS[name]
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["schema"] == {**schema["properties"]["schema"], "const": schema["$id"]}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_changes_gets_the_next_version(name):
    schema = SCHEMAS[name]
    known = DIGESTS.get(schema["$id"])
    if known != digest(schema):
        pytest.fail(
            f"{name}.schema.json has the digest {digest(schema)}. If the version {schema['$id']} was published with "
            "another one, give the schema the next version ($id, and the constant of `schema`), and the command too",
            pytrace=False,
        )


def test_each_schema_is_that_of_a_command():
    """Each command with --json has a schema."""
    commands = (ROOT / "tests/commands.txt").read_text().splitlines()
    with_json = {
        line.split()[1] for line in commands if line.startswith("rlvet ") and line.endswith("--json")
    }
    advice = "each needs assets/NAME.schema.json, an id in rlvet.cli.json_output, and a line in SKILL.md and llms.txt"
    assert SCHEMAS.keys() == with_json, advice


def every_object(schema):
    if isinstance(schema, dict):
        if "properties" in schema and schema.get("type") == "object":
            yield schema
        for value in schema.values():
            yield from every_object(value)
    if isinstance(schema, list):
        for value in schema:
            yield from every_object(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_lists_and_describes_every_field(name):
    for schema in every_object(SCHEMAS[name]):
        assert schema["additionalProperties"] is False
        assert schema["required"] == list(schema["properties"])
        assert all(field["description"].endswith(".") for field in schema["properties"].values())


def test_the_findings_of_lint_have_one_schema():
    of_lint = SCHEMAS["lint"]["$defs"]
    assert {name: SCHEMAS["diagnose"]["$defs"][name] for name in of_lint} == of_lint


# --- Outputs ---


@NEEDS_LOGS
def test_the_stored_logs():
    outputs = [run_json("diagnose", path) for path in LOG_FILES]
    # A file that is no log prints nothing.
    read = [(status, output) for status, output in outputs if output is not None]
    for _, output in read:
        check("diagnose", output)
    assert len(read) >= 20
    assert {status for status, _ in read} == {0, 1, 2}


@NEEDS_LOGS
def test_the_stored_configurations():
    paths = [path for path in LOG_FILES if path.suffix in (".sh", ".py", ".toml", ".yaml")]
    outputs = [run_json("lint", path)[1] for path in paths]
    for output in outputs:
        check("lint", output)
    assert sum(bool(output["files"]) for output in outputs) >= 4
    assert sum(bool(output["errors"]) for output in outputs) >= 1


@pytest.mark.parametrize("name", SCENARIOS)
def test_simulated_faults(name, tmp_path):
    status, output = run_json("diagnose", write_log(tmp_path, SCENARIOS[name].rows(11)))
    assert status in (0, 1)
    check("diagnose", output)


@pytest.mark.parametrize("seed", range(20))
def test_random_logs(seed, tmp_path):
    """Values at any level, and a few that are no numbers."""
    draw = random.Random(seed)
    rows = random_rows(seed)
    for row in draw.sample(rows, len(rows) // 10):
        row[draw.choice([*row])] = draw.choice([float("nan"), float("inf"), -float("inf"), 1e308])
    _, output = run_json("diagnose", write_log(tmp_path, rows))
    if output is not None:
        check("diagnose", output)


@pytest.mark.parametrize("fault", [None, "colder engine", "dead sync", "retokenised"])
def test_records(fault, tmp_path):
    changes = {} if fault is None else FAULTS[fault][1]
    path = simulate(tmp_path / "record", **changes)
    _, output = run_json("diagnose", path)
    check("diagnose", output)
    assert output["coverage"] is not None
    assert output["log"] is None


@pytest.mark.parametrize("value", ["2020-01-01", ".nan", ".inf", "[1, 2]", "{a: 1}", "'x'", "~"])
def test_settings_of_any_kind(value, tmp_path):
    """The value of a setting is the file's own, of any type."""
    file = tmp_path / "config.yaml"
    lines = ["importance_sampling_level: token", "num_generations: 1"]
    settings = (
        "beta",
        "temperature",
        "learning_rate",
        "loss_type",
        "scale_rewards",
        "per_device_train_batch_size",
    )
    lines += [f"{setting}: {value}" for setting in settings]
    file.write_text("\n".join(lines))
    status, output = run_json("lint", file)
    assert status == 1
    check("lint", output)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (
            "[orchestrator]\ngroup_size = 8\n[orchestrator.train.sampling.extra_body]\n"
            "repetition_penalty = 1.2\npresence_penalty = 2020-01-01\n",
            {"repetition_penalty": 1.2, "presence_penalty": "2020-01-01"},
        ),
        (
            "[orchestrator]\ngroup_size = 8\n[orchestrator.train.sampling.extra_body]\n"
            "repetition_penalty = 1.2\npresence_penalty = nan\n",
            {"repetition_penalty": 1.2, "presence_penalty": None},
        ),
    ],
    ids=["a date", "not a number"],
)
def test_a_setting_that_json_does_not_have(text, settings, tmp_path):
    """The setting beside the one that is at fault was printed with the finding, and ended the command."""
    file = tmp_path / "rl.toml"
    file.write_text(text)
    status, output = run_json("lint", file)
    assert status == 0
    check("lint", output)
    (found,) = [finding for finding in output["files"][0]["findings"] if finding["id"] == "sampling-penalty"]
    assert {name.rpartition(".")[2]: value for name, value in found["settings"].items()} == settings


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_pairs_of_configurations(pair):
    paths = [next(pair.glob(f"{side}.*")) for side in "ab"]
    status, output = run_json("diff", *paths)
    check("diff", output)
    assert output["differs"] == (status == 1)


# --- The schemas find what they are for ---


@pytest.fixture
def output(tmp_path):
    """Return a diagnosis with faults, a log and a configuration with findings, and the findings of lint about it."""
    write_log(tmp_path, SCENARIOS["cut off from the start"].rows(11))
    file = tmp_path / "config.yaml"
    file.write_text("importance_sampling_level: token\nnum_generations: 2\nlearning_rate: ${oc.env:RATE}\n")
    other = tmp_path / "other"
    other.mkdir()
    write_log(other, SCENARIOS["KL drifts to several nats"].rows(11))
    (other / "config.yaml").write_text(
        "importance_sampling_level: token\nnum_generations: 8\nlearning_rate: 1.0e-6\n"
    )
    return {
        "diagnose": run_json("diagnose", tmp_path)[1],
        "diff": run_json("diff", tmp_path, other)[1],
        "lint": run_json("lint", file)[1],
    }


def every_field(value, path=()):
    """Yield the path of each field of an output that its schema names."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*path, name)
            if name not in ("read", "replaced", "unread_values", "untested", "settings"):
                yield from every_field(item, (*path, name))
    if isinstance(value, list) and value:
        yield from every_field(value[0], (*path, 0))


def changed(output, path, change):
    """Return a copy of an output with one object changed."""
    copied = copy.deepcopy(output)
    item = copied
    for key in path[:-1]:
        item = item[key]
    change(item, path[-1])
    return copied


@pytest.mark.parametrize("command", ["diagnose", "diff", "lint"])
def test_a_field_that_is_gone_renamed_new_or_of_another_type_is_found(command, output):
    fields = list(every_field(output[command]))
    assert len(fields) >= 18

    def remove(item, name):
        del item[name]

    def rename(item, name):
        item[f"{name}_"] = item.pop(name)

    def add(item, name):
        item[f"{name}_"] = item[name]

    def retype(item, name):
        item[name] = ["another type"] if isinstance(item[name], dict) else {"another": "type"}

    for change in (remove, rename, add, retype):
        for path in fields:
            assert not VALIDATORS[command].is_valid(changed(output[command], path, change)), (change, path)


def test_a_healthy_log_has_no_fault(tmp_path):
    status, output = run_json("diagnose", write_log(tmp_path, healthy(11, next(iter(SHAPES)))))
    assert status == 0
    check("diagnose", output)
    assert not [finding for finding in output["findings"] if finding["ok"] is False]
