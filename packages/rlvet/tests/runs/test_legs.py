"""A run that was started and resumed leaves a folder for each; together they are one log."""

import json

import pytest

from bandpo.integrations.legs import new_leg
from rlvet import diagnose, open_run
from rlvet.report.page import write_report
from rlvet.runs.legs import CONSOLE, METRICS, run_folder
from rlvet.runs.logs import UnreadableLog, read_log


def row(step, **changed):
    """Return a line of verl's file logger."""
    metrics = {"critic/score/mean": 0.01 * step, "actor/entropy": 1.0, "actor/pg_loss": 0.1}
    return json.dumps({"step": step, "data": metrics | changed}) + "\n"


ANNOUNCED = json.dumps({"step": 0, "data": {"bandpo": {"method": "GSPO()"}}}) + "\n"


def leg(run, steps, **changed):
    folder = new_leg(run)
    (folder / METRICS).write_text(ANNOUNCED + "".join(row(step, **changed) for step in steps))
    return folder


def test_each_leg_has_a_folder_of_its_own(tmp_path):
    first, second = new_leg(tmp_path / "run"), new_leg(tmp_path / "run")
    assert first != second
    assert first.is_dir()
    assert second.is_dir()
    (second / METRICS).touch()
    assert run_folder(second / METRICS) == tmp_path / "run"
    assert run_folder(tmp_path / "other" / METRICS) == tmp_path / "other"


def test_names_of_legs_are_in_the_order_of_their_starts(tmp_path):
    made = [new_leg(tmp_path) for _ in range(12)]
    assert sorted(made) == made


def test_the_legs_of_a_run_are_one_log(tmp_path):
    leg(tmp_path, range(1, 16), **{"actor/entropy": 1.0})
    leg(tmp_path, range(11, 31), **{"actor/entropy": 2.0})
    log = read_log(tmp_path)
    assert [r["step"] for r in log.rows] == list(range(1, 31))
    assert [r["entropy"] for r in log.rows] == [1.0] * 10 + [2.0] * 20
    assert log.notes == (
        "steps 11 to 15 of leg 0001 were replaced: leg 0002 went on from an earlier checkpoint",
    )


def test_rows_behind_the_checkpoint_are_replaced_even_where_the_new_leg_has_not_come_so_far(tmp_path):
    leg(tmp_path, range(1, 40))
    leg(tmp_path, range(21, 25))
    assert [r["step"] for r in read_log(tmp_path).rows] == list(range(1, 25))


def test_an_evaluation_before_the_first_step_of_a_leg_does_not_replace_that_of_its_checkpoint(tmp_path):
    leg(tmp_path, range(1, 21))
    folder = new_leg(tmp_path)
    evaluation = json.dumps({"step": 20, "data": {"val-core/math/acc/mean@32": 0.5}}) + "\n"
    (folder / METRICS).write_text(ANNOUNCED + evaluation + row(21))
    log = read_log(tmp_path)
    assert [r["step"] for r in log.rows] == list(range(1, 22))
    assert "reward" in log.rows[19]
    assert log.notes == ()


def test_three_legs_and_one_that_ended_before_its_first_step(tmp_path):
    leg(tmp_path, range(1, 11))
    new_leg(tmp_path)  # killed before it logged anything
    leg(tmp_path, [])
    leg(tmp_path, range(11, 21))
    assert [r["step"] for r in read_log(tmp_path).rows] == list(range(1, 21))


def test_a_leg_whose_file_logger_is_off_is_read_from_its_console(tmp_path):
    leg(tmp_path, range(1, 11))
    line = "(TaskRunner pid=3) step:{} - actor/entropy:1.000 - critic/score/mean:np.float64(0.5)\n"
    (new_leg(tmp_path) / CONSOLE).write_text("".join(line.format(step) for step in range(11, 21)))
    assert [r["step"] for r in read_log(tmp_path).rows] == list(range(1, 21))


@pytest.mark.filterwarnings("ignore:.*the last line is cut off:UserWarning")
def test_a_run_is_read_while_it_trains(tmp_path):
    folder = leg(tmp_path, range(1, 21))
    with (folder / METRICS).open("a") as file:
        file.write(row(21)[:30])
    assert len(read_log(tmp_path).rows) == 20


def test_a_leg_alone_can_be_named(tmp_path):
    first = leg(tmp_path, range(1, 16))
    leg(tmp_path, range(11, 31))
    assert [r["step"] for r in read_log(first).rows] == list(range(1, 16))
    assert [r["step"] for r in read_log(first / METRICS).rows] == list(range(1, 16))


def test_a_run_without_a_step_says_so(tmp_path):
    new_leg(tmp_path)
    with pytest.raises(UnreadableLog, match=r"none of its 1 legs has logged a step yet") as raised:
        read_log(tmp_path)
    assert raised.value.code == "no-log"


def test_a_folder_of_runs_names_the_runs_and_not_their_legs(tmp_path):
    for name in ("a", "b"):
        leg(tmp_path / name, range(1, 11))
        leg(tmp_path / name, range(11, 21))
    with pytest.raises(UnreadableLog, match=rf"holds 2 runs: .* such as {tmp_path}/a,"):
        read_log(tmp_path)
    leg(tmp_path / "c" / "d", range(1, 11))
    assert len(read_log(tmp_path / "c").rows) == 10


def test_a_run_of_legs_is_diagnosed_and_reported_with_the_method_of_its_configuration(tmp_path):
    for steps in (range(1, 16), range(11, 31)):
        folder = leg(tmp_path, steps)
        policy_loss = "{loss_mode: band, method: 'GSPO()'}"
        (folder / "config.yaml").write_text(f"actor_rollout_ref: {{actor: {{policy_loss: {policy_loss}}}}}\n")
    run = open_run(tmp_path)
    assert (run.setup.framework, run.setup.method) == ("verl", "GSPO()")
    assert "30 log steps" in str(diagnose(tmp_path))
    write_report([tmp_path], tmp_path / "report.html")
    assert "GSPO" in (tmp_path / "report.html").read_text()
