"""Damage to a record: no signal, no traceback, and no other figure without a word."""

import faulthandler
import random
import warnings
import zlib
from collections import Counter
from contextlib import suppress

import pytest
import torch

from bandpo.audit import Recorder
from bandpo.replay.record import replay_record
from helpers.damage import damaged, read_with_limits
from helpers.records import write_digests
from rlvet import diagnose
from rlvet.errors import InvalidValue
from rlvet.records.record import read_record
from selection import mostly_slow

pa = pytest.importorskip("pyarrow")
faulthandler.enable()


@pytest.fixture(autouse=True)
def _limits(request, monkeypatch):
    """Read in a process with limits, as the commands do, in the tests that run at night."""
    if request.node.get_closest_marker("exhaustive"):
        read_with_limits(monkeypatch)


def write_record(folder):
    generator = torch.Generator().manual_seed(0)
    with Recorder(
        folder, method="FixedClip(0.2)", sampling={"temperature": 1.0}, framework="trl 1.16"
    ) as recorder:
        for step in range(6):
            logp_old = -torch.rand(8, 24, generator=generator) * 4 - 0.01
            logp = (logp_old + 0.2 * torch.randn(8, 24, generator=generator)).clamp(max=-1e-3)
            recorder.add(
                logp=logp,
                logp_old=logp_old,
                advantages=torch.randn(8, generator=generator),
                tokens=torch.randint(0, 99, (8, 24), generator=generator),
                logp_rollout=logp_old - 0.001,
                version=step,
                step=step,
                group=[0, 0, 1, 1, 2, 2, 3, 3],
                reward=torch.rand(8, generator=generator),
            )
    return recorder.path


def figures(path):
    """Return one number for the content of each loss."""
    arrays = (
        "log_ratio",
        "logp_old",
        "advantages",
        "mask",
        "logp_rollout",
        "token",
        "lag",
        "group",
        "reward",
    )
    result = {}
    for batch in read_record(path):
        content = b"".join(getattr(batch, name).tobytes() for name in arrays)
        result[batch.step] = zlib.crc32(content + repr((batch.method, batch.framework)).encode())
    return result


def outcome(path, whole):
    """Read a record; return what came of it in a word."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            read = figures(path)
        except InvalidValue as error:
            return "refused" if str(path.parent) in str(error) else f"refused without its name: {error}"
    if read == whole:
        return "the same"
    assert said, "other figures in silence"
    assert read.items() <= whole.items(), "a figure that was not recorded"
    assert any("left out" in str(warning.message) for warning in said)
    return "losses left out, and said"


def check_damages(folder, count, suffix):
    path = write_record(folder)
    whole = figures(path)
    assert len(whole) == 6
    file = path.with_suffix(suffix)
    content = file.read_bytes()
    outcomes = Counter()
    for seed in range(count):
        file.write_bytes(damaged(content, random.Random(seed)))
        outcomes[outcome(path, whole)] += 1
    assert outcomes.keys() <= {"refused", "the same", "losses left out, and said"}
    return outcomes


@pytest.mark.parametrize("suffix", mostly_slow([".arrow", ".sha256"], 2))
def test_damage_of_a_record_makes_no_other_figure_in_silence(suffix, tmp_path):
    outcomes = check_damages(tmp_path, 200, suffix)
    assert outcomes["losses left out, and said"] > 100


@pytest.mark.exhaustive
@pytest.mark.parametrize("suffix", [".arrow", ".sha256"])
def test_two_thousand_damages_of_a_record(suffix, tmp_path):
    check_damages(tmp_path, 2000, suffix)


def read_all(path):
    """Read a record as each command does; refusals are what may come of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for read in (diagnose, replay_record):
            with suppress(InvalidValue):
                str(read(path))


def check_forgeries(folder, count, *, digests):
    """Damage a record, and make digests that fit, as a stranger can; or take the digests away."""
    path = write_record(folder)
    content = path.read_bytes()
    for seed in range(count):
        path.write_bytes(damaged(content, random.Random(seed)))
        path.with_suffix(".sha256").unlink(missing_ok=True)
        if digests:
            try:
                write_digests(path)
            except (pa.ArrowException, OSError, MemoryError):
                continue
        read_all(path)


def test_a_column_whose_name_is_no_text_is_refused(tmp_path):
    """The schema of a forged record, by number 548 of the random ones below."""
    path = write_record(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"logp_old", b"logp_ol\xd6", 1))
    write_digests(path)
    with pytest.raises(InvalidValue, match=r"tokens-.*\.arrow cannot be read: 'utf-8' codec"):
        list(read_record(path))


@pytest.mark.parametrize("digests", mostly_slow([True, False], 2))
def test_a_forged_record_ends_no_process_and_gives_no_traceback(digests, tmp_path):
    check_forgeries(tmp_path, 20, digests=digests)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)  # each record that is read is diagnosed and replayed
@pytest.mark.parametrize("digests", [True, False])
def test_two_thousand_forged_records(digests, tmp_path):
    check_forgeries(tmp_path, 2000, digests=digests)
