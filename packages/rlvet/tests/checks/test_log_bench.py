"""Some seeds of the bench of logs: causes are named first, and healthy courses of all shapes raise no alarm."""

import json
import subprocess
import sys

import pytest

from pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks/doctor"))

from log_bench import HERE, RLDOCTOR, codes_of_rows, score_others, verdict, write_entries
from log_scenarios import SCENARIOS, SHAPES, critic_learns, healthy, named_as_verl

from rlvet.checks.log_checks import log_findings
from rlvet.runs.logs import Log

SEEDS = (20, 21, 22)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_cause_is_named_first(name):
    scenario = SCENARIOS[name]
    results = [
        verdict(codes_of_rows(scenario.rows(seed))[0], scenario.right, scenario.half) for seed in SEEDS
    ]
    assert results.count("right") >= 2, results
    assert "wrong" not in results


@pytest.mark.parametrize("shape", SHAPES)
def test_a_healthy_course_is_no_fault(shape):
    for seed in SEEDS:
        for rows in (healthy(seed, shape), named_as_verl(healthy(seed, shape))):
            codes, fault, headline = codes_of_rows(rows)
            assert not fault, headline
            assert codes[0] in ("ok", "plateau"), headline


def test_a_critic_that_learns_is_no_fault():
    for seed in SEEDS:
        codes, fault, headline = codes_of_rows(critic_learns(seed))
        assert not fault, headline
        assert not {"critic-no-fit", "critic-diverges"} & {*codes}


@pytest.mark.parametrize("name", [*RLDOCTOR, "healthy"])
def test_the_scenarios_of_another_package(name):
    simulate = pytest.importorskip("rl_doctor.simulate").simulate
    for seed in SEEDS:
        rows, _ = simulate(name, seed=seed)
        codes, _, headline = codes_of_rows(rows)
        assert codes[0] in RLDOCTOR.get(name, ("ok",)), headline


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_finding_names_the_quantities_that_show_it(name):
    log = Log.of(SCENARIOS[name].rows(SEEDS[0]))
    findings = [finding for finding in log_findings(log.rows) if finding.cause]
    for finding in findings:
        assert finding.quantities, finding
        assert {*finding.quantities} <= log.read.keys()
        # The evidence of a kind may contain a description, such as that of all components of the reward.
        if not any(" " in quantity for quantity in finding.kind.evidence):
            assert {*finding.quantities} <= {*finding.kind.evidence}


# --- Logs by other people ---


@pytest.mark.parametrize(
    ("said", "right", "half", "fair", "result"),
    [
        ("truncated", ["truncated"], [], ["plateau"], "right"),
        ("plateau", ["truncated"], [], ["plateau"], "half"),
        ("plateau", ["no-signal", "plateau"], [], [], "half"),
        ("plateau", ["ok", "plateau"], [], [], "right"),
        ("plateau", ["ok"], [], ["plateau"], "fair"),
        ("no-signal", ["truncated"], ["no-signal"], [], "half"),
        ("ok", ["truncated"], [], [], "silent"),
        ("nan", ["truncated"], [], [], "wrong"),
    ],
)
def test_a_plateau_is_half_on_a_run_with_a_known_cause(said, right, half, fair, result):
    assert verdict([said], right, half, fair) == result


def test_the_tool_is_not_run_on_a_log_whose_reading_is_not_committed(tmp_path):
    """Then the first try and its rating are kept, and later runs change the rating of today only."""

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in healthy(940, "line")))
    entry = {
        "log": "metrics.jsonl",
        "from": "a/b",
        "kind": "JSON lines",
        "reading": "healthy",
        "right": ["ok"],
    }
    entry |= {"half": [], "fair": [], "batch": 7}
    readings = tmp_path / "readings.json"
    readings.write_text(json.dumps([entry]))
    git("init", "-q")
    with pytest.raises(ValueError, match=r"commit the readings of metrics\.jsonl before the tool is run"):
        score_others([tmp_path], readings)
    git("add", "readings.json")
    git("commit", "-qm", "reading")
    readings.write_text(json.dumps([entry | {"right": ["plateau"]}]))
    with pytest.raises(ValueError, match="commit the readings"):
        score_others([tmp_path], readings)
    readings.write_text(json.dumps([entry]))
    write_entries(readings, score_others([tmp_path], readings))
    (kept,) = json.loads(readings.read_text())
    assert (kept["said"], kept["first"]) == ("ok", "right")
    (later,) = score_others([], readings)
    assert (later.result, later.fault) == ("right", None)


def test_every_log_by_others_has_what_was_said_last():
    entries = json.loads((HERE / "logs_by_others.json").read_text())
    assert all(entry["said"] for entry in entries)
    # First tries are rated by the same rule: of a plateau, at most half where a cause is known.
    for entry in entries:
        if entry["said"] == "plateau" and verdict(["plateau"], entry["right"]) == "half":
            assert entry.get("first") != "right", entry["log"]
