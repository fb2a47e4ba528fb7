"""An error with which a run ended is told beside its rows, or in the reason why it has none."""

import pytest

from rlvet import diagnose
from rlvet.errors import InvalidValue
from rlvet.runs.logs import read_log
from rlvet.runs.tracebacks import LONGEST_ERROR, bar_at_the_end

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
    ],
)  # fmt: skip
def test_an_error_after_the_last_row_is_told(text, error, tmp_path):
    file = tmp_path / "train.log"
    file.write_text(text)
    log = read_log(file)
    assert len(log.rows) == 20
    assert log.error.startswith(error)
    assert f"\nafter its last row, the output has an error: '{error}" in str(diagnose(file))


def test_an_error_that_rows_follow_is_not_told(tmp_path):
    file = tmp_path / "train.log"
    file.write_text(rows(0, 10) + OUT_OF_MEMORY + rows(10, 20))
    assert read_log(file).error == ""
    assert "has an error" not in str(diagnose(file))


@pytest.mark.parametrize("first_line", ["", "[env] activated\n"])
def test_a_run_without_a_row_has_its_error_in_the_message(first_line, tmp_path):
    file = tmp_path / "train.log"
    file.write_text(first_line + HANDLED)
    with pytest.raises(
        InvalidValue, match=r"no row of metrics is in it.*ends with an error: 'OSError: the model is"
    ):
        read_log(file)


def test_an_error_is_shortened(tmp_path):
    file = tmp_path / "train.log"
    file.write_text(rows(0, 20) + OUT_OF_MEMORY.replace("Tried", 1000 * "word "))
    error = read_log(file).error
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
        assert notes[0].startswith(f"{round(100 * zeros / len(text))}% of the text are zero bytes")


@pytest.mark.parametrize(("last", "is_told"), [(405, True), (1000, False)])
def test_a_bar_that_does_not_reach_its_end_is_told(last, is_told, tmp_path):
    bars = "".join(
        f"\r {step}/1000 [5:53:20<9:07:20, 55.19s/it]\n{rows(step, step + 1)}"
        for step in range(last - 20, last + 1)
    )
    file = tmp_path / "train.log"
    file.write_text(f"Map: 100%|##| 1523/7473 [00:01<00:00, 1.5s/it]\n{bars}")
    told = [note for note in read_log(file).notes if "progress bar" in note]
    assert told == (["the progress bar of the output stands at 405 of 1000"] if is_told else [])


@pytest.mark.parametrize("text", ["", "3/4 [0:01<0:02]", "100%|#| 7/7 [0:01<0:00]" * 5])
def test_other_bars_tell_nothing(text):
    assert bar_at_the_end(text) == ""
