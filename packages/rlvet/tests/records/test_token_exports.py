"""The batches that prime-rl and miles export with the log-probabilities of the policy in training."""

import json
import re

import pytest

from bandpo.replay.record import replay_record
from bandpo.testing import check_record
from helpers.token_exports import ROWS, batch, miles, prime_rl
from rlvet import diagnose, open_run
from rlvet.report import write_report

EXPORTS = [(prime_rl, "token_exports", "prime-rl"), (miles, "policy_loss_debug", "miles")]


@pytest.mark.parametrize(("write", "name", "framework"), EXPORTS)
def test_every_field_is_read(write, name, framework, tmp_path, monkeypatch):
    d = batch(8, moved=0.05)
    for step in (8, 12):
        write(tmp_path, step, d, monkeypatch)
    assert open_run(tmp_path / name).setup.framework == framework
    loss = {"logp": d["new"], "logp_rollout": d["engine"], "advantages": d["advantages"]}
    if framework == "prime-rl":
        # Its ratio refers to the engine.
        loss |= {"logp_old": d["engine"], "tokens": d["ids"], "entropy": d["entropy"], "update": 0}
        loss |= {"group": [row // 4 for row in range(ROWS)]}
    else:
        loss["logp_old"] = d["old"]
    anchor = "rollout" if framework == "prime-rl" else "trainer"
    check_record(tmp_path / name, [loss | {"step": 8}, loss | {"step": 12}], anchor=anchor)
    if framework == "prime-rl":
        (one,) = open_run(tmp_path / name / "step_12").batches()
        assert one.step == 12


@pytest.mark.parametrize(("write", "name", "framework"), EXPORTS)
def test_it_is_diagnosed_and_audited(write, name, framework, tmp_path, monkeypatch):
    for temperature, folder in ((1.0, tmp_path / "well"), (0.7, tmp_path / "cold")):
        folder.mkdir()
        for step in range(8, 12):
            write(folder, step, batch(step, temperature), monkeypatch)
    assert diagnose(tmp_path / "well" / name).healthy
    cold = diagnose(tmp_path / "cold" / name).findings[0]
    assert "temperature" in (cold.code, *cold.or_else), cold
    replayed = replay_record(tmp_path / "cold" / name, {"clip": "FixedClip(0.2)"})
    assert replayed is not None


@pytest.mark.parametrize(("write", "name", "framework"), EXPORTS)
def test_it_has_a_report(write, name, framework, tmp_path, monkeypatch):
    """The page has the diagnosis, the figures of each rule, and the words of prime-rl's token ids."""
    for step in range(8, 12):
        write(tmp_path, step, batch(step, 0.7, moved=0.05), monkeypatch)
    page = write_report([tmp_path / name], tmp_path / "report.html")
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    (run,) = json.loads(text)["runs"]
    cold = diagnose(tmp_path / name).findings[0]
    assert run["findings"][0]["cause"] == cold.cause
    assert "clip 0.2" in run["rules"]
    assert run["tokens"]
    # miles has no token ids.
    assert bool(run["disagreeing"]) == (framework == "prime-rl")
