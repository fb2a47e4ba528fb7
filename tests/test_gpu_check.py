"""The GPU measurement on the CPU, in its small form; how it bears what breaks; and what the docs say of it."""

import json
import os
import re
import subprocess
import sys
from itertools import islice

import pytest
import torch

import device_time
import gpu_check
import gpu_check_docs
import gpu_check_sections as sections
from helpers.sources import SOURCES
from pages import ROOT


def test_the_page_says_what_the_data_say_and_these_are_of_a_full_run_on_a_gpu(tmp_path):
    page = gpu_check_docs.PAGE.read_text()
    assert gpu_check_docs.updated_page(page) == page
    with pytest.raises(ValueError, match="has no markers"):
        gpu_check_docs.updated_page("# Benchmarks\n", tmp_path / "none.json")
    results = gpu_check_docs.RESULTS
    sections = json.loads(results.read_text()) if results.exists() else {}
    assert all(section["stamp"]["cuda"] and not section["stamp"]["small"] for section in sections.values())
    assert (not sections) == ("On a GPU: not yet measured." in gpu_check_docs.PAGE.read_text())


def test_the_page_has_the_rows_of_the_device_time():
    found = json.loads((ROOT / "benchmarks/results/device_time.json").read_text())
    assert found["stamp"]["device"] == "NVIDIA H200"
    assert "\n".join(device_time.table(found)) in gpu_check_docs.PAGE.read_text()


@pytest.mark.parametrize("small", [False, True])
def test_each_section_fits_into_two_minutes_and_all_into_sixteen(small):
    seconds = [section.seconds for section in gpu_check.plan(small)]
    assert max(seconds) <= 2 * 60
    assert sum(seconds) <= 16 * 60


def test_the_device_and_the_host_are_timed_apart():
    contestants = {"quick": lambda *tensors: (tensors[0].sum(),)}
    contestants["broken"] = lambda *tensors: 1 / 0
    left = iter([True, True, True, False])
    rows = list(device_time.rows("loss", contestants, ((2, 64), (4, 32)), "cpu", lambda: next(left)))
    assert [row["contestant"] for row in rows] == ["copy", "quick", "broken"] * 2
    assert [row["tokens"] for row in rows] == [128] * 6
    _, quick, broken, *_, last = rows
    assert quick["device"] > 0
    assert quick["host"] > 0
    assert quick["of_copy"] == rows[0]["device"] / quick["device"]
    assert broken["failed"].startswith("ZeroDivisionError")
    assert last["skipped"] == "no time left"
    text = gpu_check_docs.device(rows)
    assert "no time left" in text
    assert "failed: ZeroDivisionError" in text


# Sections that end in ways of their own; named here, because the process of a section imports them.


def raises(allowance, device):
    yield {"device": device}
    raise ZeroDivisionError


def dies(allowance, device):
    yield {"device": device}
    os._exit(3)


def ends(allowance, device):
    yield {"device": device}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "seconds", "needs", "expected"),
    [
        (raises, 120, (), {"status": "failed", "rows": [{"device": "cpu"}], "error": "ZeroDivisionError"}),
        (dies, 120, (), {"status": "failed", "error": "its process ended with exit code 3"}),
        (ends, 0.01, (), {"status": "failed", "rows": [], "error": "stopped after its 0.01 s"}),
        (ends, 120, ("no_such",), {"status": "skipped", "rows": [], "reason": "no_such not installed"}),
    ],
    ids=["raises", "dies", "too slow", "skipped"],
)
def test_a_section_that_breaks_leaves_its_rows_and_its_error(rows, seconds, needs, expected):
    found = gpu_check.measure_section(gpu_check.Section("x", seconds, needs, rows), "cpu")
    assert "Traceback" in found.get("error", "") or rows is not raises
    for key, value in expected.items():
        assert found[key] == value or (key == "error" and value in found[key])


def test_another_piece_is_begun_while_one_as_slow_as_the_slowest_fits(monkeypatch):
    clock = iter([0.0, 3.0, 5.0, 6.5, 7.5])
    monkeypatch.setattr(sections.time, "monotonic", lambda: next(clock))
    allowance = sections.Allowance(10.0)
    # Pieces of 3, 2, 1.5 and 1 seconds: at 6.5 another 3 fit, at 7.5 they do not.
    assert [allowance.another() for _ in range(5)] == [True, True, True, True, False]


def test_an_inaccurate_margin_fails_the_section(monkeypatch):
    monkeypatch.setattr(sections, "ACCURACY", 1e-12)
    few = {"points": 4, "backend": "eager", "names": ("TotalVariation()",)}
    for mode in ("eager", "compiled"):
        rows = sections.accuracy(sections.Allowance(float("inf")), "cpu", mode=mode, **few)
        with pytest.raises(AssertionError, match="more than 1e-12"):
            assert all(row["error"] > 0 for row in rows)


def test_a_failed_check_is_named_and_the_others_run(monkeypatch):
    import lean
    import speed

    def wrong(logp, *rest):
        return (2 * speed.textbook_clip(logp, *rest)[0],)

    monkeypatch.setattr(lean, "SETTINGS", lean.SETTINGS[2:3])
    monkeypatch.setattr(lean, "graphs_over_shapes", lambda settings, device: 3)
    two = {"textbook": speed.textbook_clip, "FixedClip": speed.LOSSES["FixedClip(0.2)"]}
    monkeypatch.setattr(speed, "LOSSES", two)
    monkeypatch.setattr(speed, "compiled", lambda loss, _: wrong if loss is two["textbook"] else loss)
    found = sections.habits(sections.Allowance(float("inf")), "cpu", tokens=1024, backend="eager")
    rows = list(islice(found, 9))
    with pytest.raises(AssertionError, match="2 checks failed"):
        next(found)
    outcomes = {(row["check"], row["of"]): row.get("failed", row.get("found")) for row in rows}
    settings = "method=FixedClip(low=0.2, high=0.28), aggregation=seq-mean-token-mean"
    assert outcomes["graphs", settings] == "AssertionError: 3 graphs for 6 shapes"
    assert "not close" in outcomes["compiled equals eager", "textbook"]
    assert outcomes["compiled equals eager", "FixedClip"] == "holds"
    assert outcomes["peak buffers", "FixedClip"] == "skipped: needs CUDA"
    assert "failed: AssertionError: 3 graphs for 6 shapes (1)" in gpu_check_docs.habits(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "parameters"), [("135M", 134.5e6), ("1.5B", 1543.7e6)])
def test_the_models_have_the_sizes_of_those_they_stand_for(model, parameters):
    assert sections.random_weights(model, "meta").num_parameters() == pytest.approx(parameters, rel=1e-3)


def test_goals_are_judged_at_the_largest_size_and_the_worst_shape():
    def loss(contestant, rows, columns, device, of_copy, host=40e-6):
        shape = {"shape": [rows, columns], "tokens": rows * columns}
        return {"contestant": contestant, "device": device, "of_copy": of_copy, "host": host} | shape

    def step(arm, ratio):
        return {"model": "135M", "arm": arm, "batch": {"ratio": ratio}}

    band, textbook = "Band(KL(), 0.05), compiled", "textbook clip 0.2, compiled"
    kernels = "Band(KL(), 0.05), kernels, 21 bytes"
    losses = [{"contestant": band, "shape": [2**16, 1024], "tokens": 2**26, "skipped": "no time left"}]
    losses += [loss(band, 2**14, 1024, 1.1e-3, 0.65), loss(textbook, 2**14, 1024, 1e-3, 0.9)]
    losses += [loss(band, 8, 2**15, 1.3e-3, 0.1, 75e-6), loss(textbook, 8, 2**15, 1e-3, 0.1)]
    losses += [loss(kernels, 2**14, 1024, 1e-3, 0.7), loss(kernels, 8, 2**15, 1.1e-3, 0.2, 50e-6)]
    losses += [{"what": "decisions", "contestant": "BandPO()", "tokens": 2**24, "skipped": "no time left"}]
    steps = [step("GRPOTrainer", 1.0), step("BandGRPOTrainer", 1.02)]
    head = [{"variant": "full logits", "seconds": 2.0}, {"variant": "linear_logp", "seconds": 3.0}]
    head.append({"variant": "linear_logp, kernels=True", "seconds": 1.9})
    text = gpu_check_docs.goals(
        {"losses": {"rows": losses}, "trl 135M": {"rows": steps}, "head": {"rows": head}}
    )
    judged = [line.split(" | ")[-3:] for line in text.splitlines()[2:]]
    assert judged == [
        ["at least 0.6", "0.700", "yes |"],
        ["at most 1.2", "1.100", "yes |"],
        ["at most 60.0", "50.000", "yes |"],
        ["at least 0.6", "0.650", "yes |"],
        ["at most 1.2", "1.300", "no |"],
        ["at most 60.0", "75.000", "no |"],
        ["at most 1.0", "1.500", "no |"],
        ["at most 1.0", "0.950", "yes |"],
        ["at most 1.01", "1.020", "no |"],
    ]
    assert "16,777,216 tokens" in text
    assert gpu_check_docs.goals({}).count("not yet measured") == 9


def test_decisions_of_the_kernels_are_a_table_of_their_own():
    found = {"differ": 3, "beyond_rounding": 0, "at_a_bound": 40, "gradient": 2e-7}
    decision = {"what": "decisions", "contestant": "BandPO()", "tokens": 2**24}
    copy = {"what": "loss", "shape": [4, 256], "tokens": 1024, "contestant": "copy", "device": 1e-3}
    text = gpu_check_docs.device([decision | found, decision | {"failed": "BandWarning: loss differs"}, copy])
    assert "| BandPO() | 16,777,216 | 3 | 0 | 40 | 2.0e-07 |" in text
    assert "| BandPO() | 16,777,216 | BandWarning: loss differs |" in text
    assert "| copy | 1.000 ms |" in text


def run(*arguments, paths=(*SOURCES, ROOT / "tests")):
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "benchmarks/gpu_check.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--small"], "--small measures nothing to publish; give another --output"),
        (["--small", "--only", "losse"], "no section losse; there are losses, bounds"),
        pytest.param(
            ["--output", "x.json"],
            "torch sees no CUDA device; --small runs on the CPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA"),
        ),
    ],
)
def test_what_cannot_work_is_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main()
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_small_form_runs_to_its_end(tmp_path):
    output = tmp_path / "gpu_check.json"
    whole = run("--small", "--output", output)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    found = json.loads(output.read_text())
    expected = ["losses", "bounds", "habits", "trl tiny", "head", "accuracy eager", "accuracy compiled"]
    assert list(found) == expected
    assert all(part["rows"] for part in found.values() if part["status"] == "done")
    assert {part["status"] for part in found.values()} <= {"done", "skipped"}
    assert all("not installed" in part["reason"] for part in found.values() if part["status"] == "skipped")
    if not torch.cuda.is_available():
        reasons = {row["found"] for row in found["habits"]["rows"] if row["check"] == "CUDA graph"}
        assert reasons == {"skipped: needs CUDA"}
    page = gpu_check_docs.updated_page(gpu_check_docs.PAGE.read_text(), output)
    assert all(section["stamp"]["device"] in page for section in found.values())
    tables = re.findall(r"(?:^\|.*\n)+", page.split(gpu_check_docs.START)[1], re.M)
    assert all(len({line.count("|") for line in table.splitlines()}) == 1 for table in tables)

    # A part alone, and broken: without tests/ there is no oracle. The other sections stay.
    part = run("--small", "--only", "accuracy eager", "--output", output, paths=SOURCES)
    assert part.returncode == 1
    assert "error: failed: accuracy eager; see" in part.stderr
    after = json.loads(output.read_text())
    assert "No module named 'oracle'" in after["accuracy eager"]["error"]
    printed = gpu_check_docs.block(after)
    assert "**Accuracy: worst relative error of the margins, eager** (failed: ModuleNotFoundError" in printed
    assert after | {"accuracy eager": None} == found | {"accuracy eager": None}
