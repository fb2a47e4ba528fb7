"""`scripts/conformance.py`: its comparison, the page that it writes, and its report of what new releases changed."""

import json
import os
import re
import subprocess
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch

import atlas
import conformance
import method_references as reference
from bandpo import Method, parse
from bandpo.certificate.tokens import loss_batches
from bandpo.core.methods import GRPO
from conformance import compare, drift, sentences
from framework_losses import mock_modules, two_token_logits
from pages import ROOT

ANCHORS = Path(__file__).parent / "conformance_anchors.txt"
"""The addresses on the page that others link to. One is never taken away."""
RESULTS = json.loads(conformance.RESULTS.read_text())


# --- the comparison ---------------------------------------------------------------------------------------------------


def planted(batch, *, per_sequence=True, factor=1.0, weighted=True, counts_empty=False, **clip):
    """PPO's surrogate, with a difference or without."""
    values = factor * reference.ppo(batch.logp, batch.logp_old, batch.advantages, batch.mask, **clip)
    if weighted:
        values = values * batch.weights
    if per_sequence:
        sequences = len(batch.mask) if counts_empty else batch.mask.any(1).sum()
        return reference.mean_of_sequence(values, batch.mask).sum() / sequences
    return (values * batch.mask).sum() / batch.mask.sum()


@pytest.mark.parametrize(
    ("difference", "differences"),
    [
        ({}, []),
        ({"counts_empty": True}, []),
        ({"dual": 3.0}, ["dual clip of 3"]),
        ({"per_sequence": False}, ["averages over tokens"]),
        ({"per_sequence": False, "dual": 3.0}, ["averages over tokens", "dual clip of 3"]),
        ({"weighted": False}, ["importance weights left out"]),
        (
            {"weighted": False, "counts_empty": True, "dual": 3.0},
            ["dual clip of 3", "importance weights left out"],
        ),
        ({"high": 0.21}, ["clips at 0.8 and 1.21"]),
        ({"factor": 1.001}, ["every token is 1.001 times as expected"]),
    ],
)
def test_what_was_planted_is_found(difference, differences):
    result = compare(partial(planted, **difference), GRPO(0.2, 0.2), weighted=True)
    assert result["differences"] == differences
    assert result["counts_empty"] == difference.get("counts_empty", False)
    assert all(share == 0 for share in result["shares"].values()) == (differences == [])


def test_a_difference_that_is_not_known_is_unexplained():
    result = compare(
        lambda batch: planted(batch) + 0.01 * batch.logp[:, 0].sum(), GRPO(0.2, 0.2), weighted=True
    )
    assert result["differences"] is None
    assert result["cause"]


def test_settings_are_numbers_where_they_can_be():
    assert conformance.read_settings("kind=GMPO epsilon=3e-4") == {"kind": "GMPO", "epsilon": 3e-4}


def test_logits_of_two_tokens_have_the_log_probabilities_and_their_gradient():
    for batch in loss_batches():
        logp = batch.logp.double().requires_grad_()
        again = two_token_logits(logp).log_softmax(-1)[..., 0]
        torch.testing.assert_close(again, logp)
        torch.testing.assert_close(torch.autograd.grad(again.sum(), logp)[0], torch.ones_like(logp))


def test_a_module_that_is_absent_can_be_imported_and_called():
    mock_modules("no_such_framework.kernels", "no_such_service")
    import no_such_service  # pyright: ignore[reportMissingImports]
    from no_such_service.inner import anything  # pyright: ignore[reportMissingImports]

    assert no_such_service.make().it is not None
    assert anything() is not None
    with pytest.raises(ModuleNotFoundError):
        import no_such_framework  # pyright: ignore[reportMissingImports]  # noqa: F401


def test_settings_without_effect_are_found(monkeypatch):
    """A loss that reads one of its two settings, and refuses another value of it."""

    def make(low=0.2, unread=0.0):
        if low > 1:
            raise ValueError("low is too large")
        return lambda batch: reference_loss(batch, low=low)

    def reference_loss(batch, low):
        values = reference.ppo(batch.logp, batch.logp_old, batch.advantages, batch.mask, low=low)
        return (values * batch.mask).sum()

    framework = conformance.Framework(make)
    monkeypatch.setitem(conformance.FRAMEWORKS, "toy", framework)
    monkeypatch.setattr(conformance, "options_of", lambda name: {"low": [0.5], "unread": [3.0, 9.0]})
    line = conformance.Line("toy", "ppo", "low=0.2", "PPO()", False)
    few = atlas.Atlas([batch for batch in loss_batches() if batch.name == "usual"])
    assert conformance.without_effect(few, line) == ["unread"]
    monkeypatch.setattr(conformance, "options_of", lambda name: {"low": [2.0]})
    assert conformance.without_effect(few, line) == []


def test_each_option_is_of_a_framework():
    lines = [line.split("|") for line in conformance.OPTIONS.read_text().splitlines()[1:]]
    assert {cells[0].strip() for cells in lines} <= conformance.FRAMEWORKS.keys()
    for name in conformance.FRAMEWORKS:
        assert all(conformance.options_of(name).values())


# --- the results and the page -----------------------------------------------------------------------------------------


def test_each_line_is_a_loss_of_a_framework_and_a_method():
    lines = conformance.lines_of_losses()
    anchors = [line.anchor for line in lines]
    assert len(set(anchors)) == len(anchors)
    for line in lines:
        assert line.framework in conformance.FRAMEWORKS
        assert re.fullmatch(r"[A-Za-z0-9_-]+", line.name), line
        assert conformance.read_settings(line.settings)
        if line.has_method:
            parse(line.method, Method)


def test_the_committed_results_are_of_these_lines():
    lines = {(line.framework, line.name): line for line in conformance.lines_of_losses()}
    results = {
        (name, loss): result for name, one in RESULTS.items() for loss, result in one["losses"].items()
    }
    assert results.keys() == lines.keys(), "run scripts/conformance.py for these frameworks"
    searched = {
        name for name, one in RESULTS.items() if any("nearest" in loss for loss in one["losses"].values())
    }
    for key, line in lines.items():
        if key[0] not in searched:
            continue  # not made anew yet
        assert (results[key]["settings"], results[key]["method"]) == (line.settings, line.method)
        assert ("nearest" in results[key]) == ("without_effect" in results[key]) == line.is_run
        assert ("plain" in results[key]) == line.has_method
        assert ("weighted" in results[key]) == line.weighted


UNEXPLAINED = {("ROLL", "kimi15"), ("miles", "opsm")}
"""Losses whose difference from the method of their name has no known cause."""


def test_every_other_difference_is_explained():
    unexplained = set()
    for name, framework in RESULTS.items():
        for loss, result in framework["losses"].items():
            assert "error" not in result
            parts = [result[part] for part in ("plain", "weighted") if part in result]
            if any(part["differences"] is None for part in parts):
                unexplained.add((name, loss))
    assert unexplained == UNEXPLAINED


def test_the_committed_versions_are_those_of_the_script():
    for name, framework in conformance.FRAMEWORKS.items():
        version = RESULTS[name]["version"]
        assert version == framework.version or (not framework.version and version.startswith("commit "))


def test_the_page_is_made_of_the_results():
    page = conformance.PAGE.read_text()
    assert "\n".join(conformance.overview(RESULTS)) in page
    assert "\n".join(conformance.same_functions(RESULTS)) in page
    assert json.loads(conformance.LINT.read_text()) == conformance.lint_table(RESULTS)
    assert "\n".join(conformance.sections(RESULTS)) in page
    assert all(result["time"] >= "2026" for result in RESULTS.values())


def test_no_anchor_of_the_page_disappears():
    headings = re.findall(r"^###? (.+)$", conformance.PAGE.read_text(), re.MULTILINE)
    anchors = [heading.lower().replace(" ", "-") for heading in headings]
    committed = ANCHORS.read_text().split()
    assert set(committed) <= set(anchors), "others link to these: keep the line in scripts/conformance.txt"
    assert sorted(anchors) == committed, f"add the new ones to {ANCHORS.name}, in order"
    assert {line.anchor for line in conformance.lines_of_losses()} < set(anchors)


PLAIN = {
    "differences": ["dual clip of 3"],
    "counts_empty": False,
    "same_value": True,
    "shares": {"near": 0.0, "usual": 0.0123, "far": 0.271},
    "cause": "dual clip of 3",
}
SHARES = {"near": 1.0, "usual": 0.98, "far": 0.9, "record trl": 0.95, "record verl": 0.93}
FOUND = {
    "method": "DPPO(KL(), 0.05, 3)",
    "engine": False,
    "old_policy": "trainer",
    "average": "token-mean",
    "factor": 1.0,
    "identical": True,
    "agree": dict.fromkeys(SHARES, 1.0),
    "blocked": 1.0,
    "others": [{"method": "BandPO(KL(), 0.05, inf, inf)", "condition": "r ≤ 3", "agree": 0.9}],
}
NEAR = FOUND | {
    "method": "GSPO()",
    "average": "token-mean",
    "identical": False,
    "agree": SHARES,
    "blocked": 0.75,
    "condition": "A > 0",
    "changes": None,
    "first": {"batch": "far", "p": 0.01, "ratio": 15.2, "advantage": -0.5, "loss": 0.0, "method": 7.6},
    "others": [],
}
EQUAL = PLAIN | {"differences": [], "cause": "", "shares": dict.fromkeys(PLAIN["shares"], 0.0)}


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        ({"method": "DAPO()", "plain": EQUAL}, "Equal to `DAPO()`."),
        (
            {"method": "DAPO()", "plain": PLAIN},
            "Not `DAPO()`: dual clip of 3. The gradient differs at 1.2% of the tokens where the policy moved as in "
            "training, at 0.0% where it hardly moved, at 27.1% where the policies have nothing in common.",
        ),
        (
            {
                "method": "GRPO()",
                "plain": EQUAL | {"counts_empty": True, "same_value": False},
                "weighted": EQUAL,
            },
            "Equal to `GRPO()`. Empty sequences count in the mean. The reported number is another one. The same with "
            "importance weights.",
        ),
        (
            {"method": "GRPO()", "plain": EQUAL, "weighted": PLAIN},
            "Equal to `GRPO()`. With importance weights: dual clip of 3.",
        ),
        (
            {"method": "GRPO()", "plain": PLAIN | {"differences": None, "cause": "another loss"}},
            "Not `GRPO()`: Unexplained: another loss. The gradient differs at 1.2% of the tokens where the policy "
            "moved as in training, at 0.0% where it hardly moved, at 27.1% where the policies have nothing in common.",
        ),
        ({"method": "its mask is TRL's"}, "Not compared: its mask is TRL's."),
        (
            {"method": "DPPO(KL(), 0.05)", "nearest": FOUND | {"others": []}, "plain": PLAIN},
            "Identical to `DPPO(KL(), 0.05, 3)` relative to the trainer's old policy. Not `DPPO(KL(), 0.05)`: "
            "dual clip of 3. The gradient differs at 1.2% of the tokens where the policy moved as in training, at 0.0% "
            "where it "
            "hardly moved, at 27.1% where the policies have nothing in common.",
        ),
        (
            {
                "method": "DPPO(KL(), 0.05, 3)",
                "nearest": FOUND | {"others": []},
                "without_effect": ["clip_ratio", "tau_pos"],
            },
            "Identical to `DPPO(KL(), 0.05, 3)` relative to the trainer's old policy. No effect: `clip_ratio`, "
            "`tau_pos`.",
        ),
        (
            {"method": "none of this name", "nearest": FOUND},
            "Identical to `DPPO(KL(), 0.05, 3)` relative to the trainer's old policy. Where r ≤ 3, also identical to "
            "`BandPO(KL(), 0.05, inf, inf)` with the same average.",
        ),
        (
            {"method": "GSPO()", "nearest": NEAR | {"changes": ["dual clip of 3"]}, "plain": PLAIN},
            "Identical to `GSPO()` with `aggregation='token-mean'`, but for: dual clip of 3. The gradient agrees "
            "at 98.0% of the tokens where the policy moved as in training, at 100.0% where it hardly moved, at "
            "90.0% where the policies have nothing in common, and at 94.0% of recorded tokens; of the tokens that"
            " either blocks, both block 75.0%. The first token that differs has p = 0.01, r = 15.2 and A = -0.5: "
            "its gradient is 0, that of the "
            "method 7.6.",
        ),
        ({"method": "GRPO()", "error": "KeyError: 'x'"}, "Could not be run: KeyError: 'x'."),
    ],
)
def test_what_the_page_says_of_a_loss(result, sentence):
    assert " ".join(sentences(result)) == sentence


# --- what new releases changed ----------------------------------------------------------------------------------------


@pytest.fixture
def before():
    loss = {"settings": "loss_type=grpo", "method": "GRPO()", "plain": deepcopy(EQUAL)}
    return {"TRL": {"version": "1.16.0", "losses": {"grpo": loss, "dapo": deepcopy(loss)}}}


def test_a_new_version_of_the_same_losses_is_no_change(before):
    after = deepcopy(before)
    after["TRL"]["version"] = "1.17.0"
    # A share may change in its last digits.
    after["TRL"]["losses"]["grpo"]["plain"]["shares"]["far"] = 0.0001
    assert drift(before, before) == []
    assert drift(before, after) == []


def test_each_kind_of_change_is_a_line(before):
    after = deepcopy(before)
    after["TRL"]["version"] = "1.17.0"
    losses = after["TRL"]["losses"]
    losses["grpo"]["plain"] = PLAIN
    losses["sapo"] = {"settings": "loss_type=sapo", "method": "SAPO()", "plain": EQUAL}
    del losses["dapo"]
    assert drift(before, after) == [
        "## TRL: 1.16.0 → 1.17.0",
        "",
        "- `grpo` (loss_type=grpo), by name `GRPO()`: was equal, is now dual clip of 3",
        "- `sapo` (loss_type=sapo), by name `SAPO()`: was not there, is now equal",
        "- `dapo`: was equal, is no longer compared",
        "",
    ]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (FOUND, "identical"),
        (NEAR | {"changes": ["dual clip of 3"]}, "identical but for: dual clip of 3"),
        (NEAR, "identical where A > 0"),
        (NEAR | {"condition": ""}, "nearest, 95.2% of the tokens"),
    ],
)
def test_how_near_a_method_is_in_words(found, words):
    assert conformance.nearness(found) == words


def test_another_nearest_method_and_another_share_are_reported(before):
    loss = before["TRL"]["losses"]["grpo"]
    loss["nearest"] = deepcopy(NEAR)
    after = deepcopy(before)
    assert drift(before, after) == []
    after["TRL"]["losses"]["grpo"]["nearest"]["agree"]["usual"] = 0.95
    assert drift(before, after)[2] == "- `grpo` (loss_type=grpo): agreed at 98.00% of usual, now at 95.00%"
    after["TRL"]["losses"]["grpo"]["nearest"] = FOUND
    assert "was `GSPO()` with `aggregation='token-mean'` (identical where A > 0)" in drift(before, after)[2]
    assert (
        "is now `DPPO(KL(), 0.05, 3)` relative to the trainer's old policy (identical)"
        in drift(before, after)[2]
    )


def test_the_same_function_has_one_line():
    results = {
        name: {"losses": {loss: {"nearest": FOUND | {"method": method}}}}
        for name, loss, method in (
            ("TRL", "a", "DAPO()"),
            ("verl", "b", "DAPO(0.2, 0.28)"),
            ("ROLL", "c", "PPO()"),
        )
    }
    lines = conformance.same_functions(results)
    assert lines[3:-1] == ["| `DAPO()` | [TRL a](#trl-a), [verl b](#verl-b) |"]


def test_changes_beside_the_verdict_are_reported(before):
    weights, empty, error = deepcopy(before), deepcopy(before), deepcopy(before)
    before["TRL"]["losses"]["grpo"]["weighted"] = EQUAL
    weights["TRL"]["losses"]["grpo"]["weighted"] = PLAIN
    assert "is now equal, with importance weights: dual clip of 3" in drift(before, weights)[2]
    empty["TRL"]["losses"]["grpo"] |= {"plain": EQUAL | {"counts_empty": True}, "weighted": EQUAL}
    assert "is now equal, empty sequences count" in drift(before, empty)[2]
    error["TRL"]["losses"]["grpo"] = {
        "settings": "loss_type=grpo",
        "method": "GRPO()",
        "error": "TypeError: no argument 'epsilon'",
    }
    assert "is now could not be run: TypeError: no argument 'epsilon'" in drift(before, error)[2]


def test_a_framework_that_cannot_be_installed_hides_no_other(before, monkeypatch, tmp_path):
    def run(name, folder, version, source):
        if name == "verl":
            raise subprocess.CalledProcessError(1, "pip")
        return before["TRL"] | {"version": version}

    monkeypatch.setattr(conformance, "run", run)
    monkeypatch.setattr(conformance, "newest_version", lambda name: "9.9")
    for name in ("verl", "TRL"):
        (tmp_path / name).mkdir()
    results = conformance.run_newest(["verl", "TRL"], tmp_path, discard=True)
    assert results["TRL"]["version"] == "9.9"
    assert list(tmp_path.iterdir()) == []
    lines = drift(before | {"verl": {"version": "0.9.1", "losses": {}}}, results)
    assert lines[0] == "## verl: 0.9.1 → 9.9"
    assert "could not be run: CalledProcessError" in lines[2]


def test_the_newest_version_is_that_of_pips_report(monkeypatch):
    report = json.dumps({"install": [{"metadata": {"name": "trl", "version": "1.99.0"}}]})
    commands = []

    def check_output(command, **_):
        commands.append(command)
        return report

    monkeypatch.setattr(conformance.subprocess, "check_output", check_output)
    assert conformance.newest_version("trl") == "1.99.0"
    assert {"--dry-run", "--no-deps", "trl"} <= set(commands[0])


def test_the_report_is_written_and_the_results_stay(before, monkeypatch, tmp_path):
    written = conformance.RESULTS.read_text()
    changed = deepcopy(RESULTS)
    changed["TRL"]["losses"]["grpo"]["plain"] = PLAIN
    monkeypatch.setattr(conformance, "run_newest", lambda names, folder, discard: changed)
    monkeypatch.setattr("sys.argv", ["conformance.py", str(tmp_path), "--newest", str(tmp_path / "drift.md")])
    conformance.main()
    assert "`grpo`" in (tmp_path / "drift.md").read_text()
    monkeypatch.setattr(conformance, "run_newest", lambda names, folder, discard: RESULTS)
    conformance.main()
    assert (tmp_path / "drift.md").read_text() == ""
    assert conformance.RESULTS.read_text() == written


# --- the issue --------------------------------------------------------------------------------------------------------

GH = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$1 $2" in
  "issue list") echo "$OPEN" ;;
esac
"""


@pytest.mark.parametrize(
    ("report", "opened", "last"),
    [
        ("changed", "", "issue create"),
        ("changed", "17", "issue edit 17"),
        ("", "17", "issue close 17"),
        ("", "", "issue list"),
    ],
)
def test_one_issue_is_opened_updated_and_closed(tmp_path, report, opened, last):
    (tmp_path / "gh").write_text(GH)
    (tmp_path / "gh").chmod(0o755)
    (tmp_path / "drift.md").write_text(report)
    environment = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "OPEN": opened,
    }
    subprocess.run(
        [ROOT / "scripts/conformance_issue.sh", tmp_path / "drift.md"], env=environment, check=True
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-1].startswith(last)
    if report:
        assert f"--body-file {tmp_path / 'drift.md'}" in calls[-1]
    assert len([call for call in calls if re.match("issue (create|edit|close)", call)]) == (
        last != "issue list"
    )
