"""What is left of files and folders after a full disk."""

import pytest

from bandpo_lab.files.writing import replacing


def half_a_file(path):
    with replacing(path) as unfinished:
        assert unfinished.suffix == path.suffix
        unfinished.write_text("half")
        raise OSError("disk full")


def half_a_folder(path):
    with replacing(path) as unfinished:
        unfinished.mkdir()
        (unfinished / "part").write_text("half")
        raise OSError("disk full")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "picture.png"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"):
        half_a_file(path)
    with pytest.raises(OSError, match="disk full"):
        half_a_folder(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"
    with pytest.raises(ValueError, match="there is no folder"):
        half_a_file(tmp_path / "no" / "file")
