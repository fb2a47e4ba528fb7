"""Some seeds of the bench of logs: causes are named first, and healthy courses of all shapes raise no alarm."""

import sys

import pytest

from pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks/doctor"))

from log_bench import RLDOCTOR, codes_of_rows, verdict
from log_scenarios import SCENARIOS, SHAPES, healthy, named_as_verl

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
