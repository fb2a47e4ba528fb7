"""An error with which a run ended is told beside its rows, or in the reason why it has none."""

import json

import pytest

from rlvet import diagnose
from rlvet.errors import InvalidValue
from rlvet.runs.endings import LONGEST_ERROR, ending_of
from rlvet.runs.logs import read_log

FRAMES = '  File "train.py", line 3, in <module>\n    train()\n    ^^^^^^^\n'
OUT_OF_MEMORY = (
    f"Traceback (most recent call last):\n{FRAMES}torch.OutOfMemoryError: CUDA out of memory. Tried to\n"
)
HANDLED = f"""Traceback (most recent call last):
{FRAMES}FileNotFoundError: no such file

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
{FRAMES}OSError: the model is not in the cache
It may be downloaded.
"""


def rows(first, last):
    return "".join(f"{{'loss': 0.1, 'reward': 0.5, 'kl': 0.{step:03}}}\n" for step in range(first, last))


def by_rank(text, rank):
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (rows(0, 20) + OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried to"),
        (rows(0, 20) + by_rank(OUT_OF_MEMORY, 1) + by_rank(HANDLED, 0), "torch.OutOfMemoryError: CUDA out of memory."),
        (rows(0, 20) + HANDLED + OUT_OF_MEMORY, "OSError: the model is not in the cache"),
        (rows(0, 20) + OUT_OF_MEMORY + "\r  9%|▏    | 2/100 [39:48<32:30:46, 1194.35s/it]", "torch.OutOfMemoryError"),
        (rows(0, 20) + OUT_OF_MEMORY.replace("torch.OutOfMemoryError: ", "KeyboardInterrupt\n"), "KeyboardInterrupt"),
        (rows(0, 20) + "run.sh: line 108: 470781 Killed                  python -m train lr=1\n", "Killed"),
        (rows(0, 20) + "Segmentation fault (core dumped)\n", "Segmentation fault"),
    ],
)  # fmt: skip
def test_an_error_after_the_last_row_is_told(text, error, tmp_path):
    file = tmp_path / "train.log"
    file.write_text(text)
    log = read_log(file)
    assert len(log.rows) == 20
    assert log.ending.error.startswith(error)
    assert f"\nafter its last row, the output has an error: '{error}" in str(diagnose(file))


def test_an_error_that_rows_follow_is_not_told(tmp_path):
    file = tmp_path / "train.log"
    file.write_text(rows(0, 10) + OUT_OF_MEMORY + "run.sh: line 1: 47 Killed    python a.py\n" + rows(10, 20))
    assert read_log(file).ending.error == ""
    assert "has an error" not in str(diagnose(file))


@pytest.mark.parametrize("first_line", ["", "[env] activated\n"])
def test_a_run_without_a_row_has_its_error_in_the_message(first_line, tmp_path):
    file = tmp_path / "train.log"
    file.write_text(first_line + HANDLED)
    with pytest.raises(
        InvalidValue, match=r"no row of metrics is in it.*ends with an error: 'OSError: the model is"
    ):
        read_log(file)


@pytest.mark.parametrize(("number", "is_told"), [(19, False), (20, True)])
def test_errors_that_a_run_outlives_are_told_if_they_are_many(number, is_told, tmp_path):
    file = tmp_path / "train.log"
    errors = "".join(
        f"(Worker pid=3) task_id={task} failed: RuntimeError('no page')\n" for task in range(number)
    )
    file.write_text(rows(0, 10) + errors + "ValueError: once\n" + rows(10, 30))
    most_often = "RuntimeError('no page'): look at these first"
    line = f"\n{number + 1} lines of the output name an error, most often {most_often}\n"
    assert (line in str(diagnose(file))) is is_told


def test_an_error_is_shortened(tmp_path):
    file = tmp_path / "train.log"
    file.write_text(rows(0, 20) + OUT_OF_MEMORY.replace("Tried", 1000 * "word "))
    error = read_log(file).ending.error
    assert LONGEST_ERROR - 5 < len(error) <= LONGEST_ERROR + 2
    assert error.endswith(" word …")


@pytest.mark.parametrize(("zeros", "is_told"), [(0, False), (8, False), (30_000, True)])
def test_a_lost_part_of_a_file_is_told(zeros, is_told, tmp_path):
    """A file system that lost a part of a file leaves zero bytes."""
    file = tmp_path / "train.log"
    start = "started\n" * 600
    text = start + "\0" * zeros + "\n" + rows(0, 20)
    file.write_text(text)
    notes = [note for note in read_log(file).notes if "zero bytes" in note]
    assert bool(notes) == is_told
    if is_told:
        assert notes[0].startswith(f"{round(100 * zeros / len(text))}% of the file are zero bytes")


@pytest.mark.parametrize(("last", "is_told"), [(405, True), (1000, False)])
def test_a_bar_that_does_not_reach_its_end_is_told(last, is_told, tmp_path):
    bars = "".join(
        f"\r {step}/1000 [5:53:20<9:07:20, 55.19s/it]\n{rows(step, step + 1)}"
        for step in range(last - 20, last + 1)
    )
    file = tmp_path / "train.log"
    file.write_text(f"Map: 100%|##| 1523/7473 [00:01<00:00, 1.5s/it]\n{bars}")
    assert read_log(file).ending.text == (
        "the progress bar of the output stands at 405 of 1000" if is_told else ""
    )
    assert ("\nthe progress bar of the output stands at 405 of 1000\n" in str(diagnose(file))) == is_told


def test_an_error_after_the_summary_of_a_training_did_not_end_it(tmp_path):
    summary = "{'train_runtime': 6604.0, 'train_steps_per_second': 0.03, 'train_loss': 0.1, 'epoch': 0.1}\n"
    file = tmp_path / "train.log"
    file.write_text(rows(0, 20) + summary + OUT_OF_MEMORY)
    said = str(diagnose(file))
    assert "\nafter the training had ended, the output has an error: 'torch.OutOfMemoryError: " in said
    assert "mend it first" not in said
    # The summary is no row of a step that is not read.
    assert "no known metric" not in said


def test_rows_that_were_written_late_do_not_hide_an_error(tmp_path):
    """A process writes what it has printed at its end, and its progress bar at once."""
    bars = "".join(f"\r {step}/1000 [5:53:20<9:07:20, 55.19s/it]" for step in range(1, 31))
    file = tmp_path / "train.log"
    file.write_text(bars + rows(0, 20) + OUT_OF_MEMORY + rows(20, 30))
    ending = read_log(file).ending
    assert ending.error.startswith("torch.OutOfMemoryError")
    assert ending.text.startswith("after the last step of its progress bar, the output has an error: ")
    # A bar that goes on shows that the run has.
    file.write_text(bars + rows(0, 20) + OUT_OF_MEMORY + "\r 31/1000 [5:53:20<9:07:20]\n" + rows(20, 30))
    assert read_log(file).ending.error == ""


def test_a_sound_run_that_an_error_ended_is_ok_up_to_there(tmp_path):
    rising = "".join(
        f"{{'loss': 0.1, 'reward': {0.3 + step / 100}, 'kl': 0.{step:03}}}\n" for step in range(60)
    )
    file = tmp_path / "train.log"
    file.write_text(rising + OUT_OF_MEMORY)
    assert diagnose(file).headline.startswith(
        "ok: nothing is wrong in what could be tested up to its last row, after which the output has an error ("
    )
    file.write_text(rising)
    assert diagnose(file).headline.startswith("ok: nothing is wrong in what could be tested (")


@pytest.mark.parametrize("text", ["", "3/4 [0:01<0:02]", "100%|#| 7/7 [0:01<0:00]" * 5])
def test_other_bars_tell_nothing(text):
    assert ending_of(text, bool).text == ""


def test_what_follows_a_lost_part_of_a_file_is_another_run(tmp_path):
    """Another run may have written it, whose steps a joined course would hide."""
    file = tmp_path / "train.log"
    late = "".join(
        f"\r {step}/1000 [5:53:20<9:07:20, 55.19s/it]\n{rows(step, step + 1)}" for step in range(605, 640)
    )
    file.write_text(rows(0, 12) + 5_000 * "\0" + "\n" + late)
    with pytest.raises(InvalidValue, match=r"holds 2 runs, .*'1' \(12 rows\), '2' \(steps 605 to 639\)"):
        read_log(file)
    assert [row["step"] for row in read_log(file, run_name="2").rows] == [*range(605, 640)]
    said = str(diagnose(file, run_name="1"))
    assert "\nno row has its step: a step is the number of a row here" in said
    assert "no row has its step" not in str(diagnose(file, run_name="2"))
    # A short part before it is no run.
    file.write_text(rows(0, 9) + 5_000 * "\0" + "\n" + late)
    assert len(read_log(file).rows) == 35


def test_the_steps_that_a_run_out_of_memory_lacks_are_told_with_what_needs_less(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "train.log").write_text(
        "".join(
            row.replace("}", f", 'step': {step}}}")
            for step, row in enumerate(rows(0, 20).splitlines(True), 1)
        )
        + OUT_OF_MEMORY
    )
    settings = {"importance_sampling_level": "token", "scale_rewards": "group", "max_steps": 50}
    (run / "config.yaml").write_text(json.dumps(settings))
    said = str(diagnose(run))
    assert "; mend it first, if it ended the run; smaller micro-batches, shorter answers and gradient" in said
    assert "; the last log step is 20, of 50 by max_steps\n" in said
    (run / "config.yaml").write_text(json.dumps(settings | {"max_steps": 20}))
    assert "the last log step" not in str(diagnose(run))
