"""What is left of files after a kill, or of somebody else's bytes."""

import json

import pytest

from rlvet.runs.files import read_jsonl


@pytest.mark.parametrize("tail", ['{"step": 2, "rew', '{"step"', "\x00\x00\x00", "\ufffd"])
def test_a_torn_tail_is_left_out_and_reported(tail, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail.encode("utf-16"))
    with pytest.warns(UserWarning, match=r"metrics.jsonl, line 2: the last line is cut off"):
        assert list(read_jsonl(path)) == [(1, {"step": 1})]
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not a JSON object"):
        list(read_jsonl(path, growing=False))  # a file that nobody writes to has no torn tail


@pytest.mark.parametrize("line", [b"not json", b"\xff\xfe\x00", b"[1, 2]", b'{"step": 1', b"[" * 100_000])
def test_any_other_broken_line_is_named(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps({"step": 1}).encode() + b"\n" + line + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not a JSON object"):
        list(read_jsonl(path))


def test_a_file_is_read_no_further_than_it_is_asked_for(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('\ufeff{"step": 1}\r\nrubbish\n', encoding="utf-8")
    rows = read_jsonl(path)
    assert next(rows) == (1, {"step": 1})
    rows.close()


def test_what_is_written_while_it_is_read_is_left_for_the_next_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    rows = read_jsonl(path)
    assert [next(rows), next(rows)] == [(1, {"step": 1}), (2, {"step": 2})]
    with path.open("a") as file:
        file.write('\n{"step": 3}\n')
    assert list(rows) == []
