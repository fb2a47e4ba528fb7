"""Records: what is added is read back, through kills, resumption, foreign files and bad values."""

import gc
import json
import math
import os
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import bandpo
from bandpo import GSPO, KL, Band, Batch, FixedClip, Method, Packed, parse
from bandpo.audit import Audit, Recorder, record_format
from bandpo.replay.record import RUN, as_batch, method_of, replay_record
from helpers.records import write_digests
from pages import ROOT
from rlvet.records.format import FORMAT, META, REQUIRED_COLUMNS, record_schema
from rlvet.records.record import read_record
from rlvet.runs.setup import Setup

pa = pytest.importorskip("pyarrow")
assert_array_equal, assert_allclose = np.testing.assert_array_equal, np.testing.assert_allclose


def batch(seed, rows=4, columns=16):
    g = torch.Generator().manual_seed(seed)
    logp_old = -torch.rand(rows, columns, generator=g) * 8 - 0.01
    return {
        "logp": (logp_old + 0.3 * torch.randn(rows, columns, generator=g)).clamp(max=-1e-3),
        "logp_old": logp_old,
        "advantages": torch.randn(rows, generator=g),
        "mask": (torch.rand(rows, columns, generator=g) > 0.2).int(),
    }


def record(folder, steps=range(3), added=None, **settings):
    with Recorder(folder, **settings) as recorder:
        for step in steps:
            recorder.add(**batch(step), step=step, **(added or {}))
    return recorder.path


def test_what_is_added_is_read_back(tmp_path):
    given = batch(0)
    rollout = given["logp_old"] + 0.1
    rollout[0, 3] = math.nan
    entropy = torch.rand(4, 16)
    with Recorder(tmp_path, method="GSPO()", framework="verl 0.9.1") as recorder:
        given |= {"logp_rollout": rollout, "entropy": entropy, "version": torch.tensor([9, 8, 7, 9])}
        recorder.add(**given, step=9)
    (loss,) = read_record(tmp_path)
    mask = given["mask"].bool()
    assert loss.mask.dtype == bool
    assert loss.mask.sum(1).tolist() == mask.sum(1).tolist()
    assert_array_equal(loss.logp_old[loss.mask], given["logp_old"][mask])
    assert_allclose(loss.logp[loss.mask], given["logp"][mask], rtol=1e-6, atol=1e-6)
    assert_allclose(loss.logp_rollout[loss.mask], rollout[mask], rtol=1e-6, atol=1e-6, equal_nan=True)
    engine = torch.where(rollout.isnan(), given["logp_old"], rollout)
    assert_allclose(loss.logp_engine[loss.mask], engine[mask], rtol=1e-6, atol=1e-6)
    assert loss.logp_anchor is None  # the bounds surround the trainer's
    assert_array_equal(loss.advantages[loss.mask], given["advantages"][:, None].expand(4, 16)[mask])
    assert_allclose(loss.entropy[loss.mask], entropy[mask], rtol=1e-3, atol=1e-4)
    assert (np.unique(loss.lag[loss.mask]).tolist(), loss.lag[1, 0], loss.step) == ([0, 1, 2], 1, 9)
    assert (loss.has_logp, loss.bad_sequences, parse(loss.method)) == (True, 0, GSPO())
    tensors = as_batch(loss)
    for name in ("logp", "log_ratio", "logp_old", "advantages", "mask", "entropy"):
        assert_array_equal(getattr(tensors, name), getattr(loss, name))
    setup = replay_record(tmp_path).setup
    assert (setup, method_of(setup)) == (Setup("verl", setup.method), GSPO())
    assert json.loads(pa.ipc.open_stream(recorder.path).schema.metadata[META])["bandpo"] == bandpo.__version__


@pytest.mark.parametrize("method", ["DAPO()", "Band(KL(), 0.02)", "GSPO()", "GMPO()", "BAPO()", "CISPO()"])
def test_a_replay_gives_the_figures_of_the_audit_in_the_run(method, tmp_path):
    audits = []
    with Recorder(tmp_path, method=method) as recorder:
        for step in range(4):
            given = batch(step, rows=6, columns=50)
            audits.append(Audit.from_batch(Batch.read(*given.values()), method=method))
            recorder.add(**given, step=step // 2)
    seen = replay_record(tmp_path)
    expected = (audits[0] + audits[1] + audits[2] + audits[3]).metrics()
    own = {name: value for name, value in expected.items() if not name.startswith("if/")}
    assert seen.audits[RUN].metrics() == pytest.approx(own, rel=1e-5, abs=1e-7)
    if method_of(seen.setup).level == "token":
        for name in ("clip 0.2", "Band"):
            assert seen.audits[name].metrics()["clip_high"] == expected[f"if/{name}/clip_high"]
    first = (audits[0] + audits[1]).metrics()
    assert seen.rows[0]["audit/clip_high"] == pytest.approx(first["clip_high"])
    assert [row["step"] for row in seen.rows] == [0, 1]


def test_advantages_and_versions_of_tokens(tmp_path):
    given = batch(1)
    per_token = given | {"advantages": torch.randn(4, 16)}
    constant = given | {"advantages": given["advantages"][:, None].expand(4, 16)}
    versions = torch.arange(64).view(4, 16) // 40
    with Recorder(tmp_path) as recorder:
        recorder.add(**per_token, step=3, version=versions)
        recorder.add(**constant)
    first, second = read_record(tmp_path)
    mask = given["mask"].bool()
    assert_array_equal(first.advantages[first.mask], per_token["advantages"][mask])
    assert_array_equal(first.lag[first.mask], 3 - versions[mask])
    assert_array_equal(second.advantages[second.mask], constant["advantages"][mask])
    with pa.OSFile(str(recorder.path)) as source:
        read = pa.ipc.open_stream(source).read_all()
    lengths = read.column("advantages").combine_chunks().value_lengths().to_pylist()
    assert lengths[4:] == [1, 1, 1, 1]  # one number for a sequence
    assert second.lag is None


@pytest.mark.parametrize("form", ["segments", "cu_seqlens", "jagged"])
def test_a_packed_batch_is_recorded_as_the_padded_one(form, tmp_path):
    lengths = torch.tensor([16, 3, 9, 1])
    inside = torch.arange(16) < lengths[:, None]
    padded = batch(5)
    padded["mask"] = padded["mask"] * inside
    padded |= {"tokens": torch.arange(64).view(4, 16), "entropy": torch.rand(4, 16)}
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    packed = {name: x[inside][None] if x.shape == inside.shape else x for name, x in padded.items()}
    where = {"layout": Packed(cu_seqlens=ends)}
    if form == "segments":
        where = {"layout": Packed(segments=torch.arange(4).repeat_interleave(lengths)[None])}
    if form == "jagged":
        where = {}
        packed = {
            name: torch.nested.nested_tensor_from_jagged(x[0], ends) if x.shape[0] == 1 else x
            for name, x in packed.items()
        }
    sequences = {
        "group": [0, 0, 1, 1],
        "reward": [0.0, 1.0, 0.5, 0.25],
        "version": torch.tensor([1, 2, 3, 4]),
    }
    for name, tensors in {"padded": padded, "packed": packed | where}.items():
        with Recorder(tmp_path / name) as recorder:
            recorder.add(**tensors, **sequences, step=4)
    (expected,), (result,) = (read_record(tmp_path / name) for name in ("padded", "packed"))
    for name in (
        "logp_old",
        "log_ratio",
        "advantages",
        "mask",
        "entropy",
        "lag",
        "token",
        "position",
        "group",
        "reward",
    ):
        assert_array_equal(getattr(result, name), getattr(expected, name), err_msg=name)


def test_the_anchor_may_be_the_engine(tmp_path):
    given = batch(2)
    rollout = given["logp_old"] - 0.2
    with Recorder(tmp_path, method="FixedClip(0.2)", anchor="rollout") as recorder:
        recorder.add(**given, logp_rollout=rollout)
    expected = Audit.from_batch(
        Batch.read(*given.values(), logp_anchor=rollout), method="FixedClip(0.2)"
    ).metrics()
    assert replay_record(tmp_path).audits[RUN].metrics()["clip_high"] == expected["clip_high"]
    with Recorder(tmp_path / "none", method="FixedClip(0.2)", anchor="rollout") as recorder:
        recorder.add(**given)
    with pytest.raises(ValueError, match=r"0000.arrow, call 1 has no log-probabilities of the rollout"):
        replay_record(tmp_path / "none")


def test_half_precision_moves_no_rate_by_much(tmp_path):
    rates = {}
    for dtype in ("float32", "float16"):
        with Recorder(tmp_path / dtype, method="FixedClip(0.2)", dtype=dtype) as recorder:
            for step in range(8):
                recorder.add(**batch(step, rows=32, columns=256))
        seen = replay_record(tmp_path / dtype, {"Band": "Band()", "GSPO": "GSPO(0.02, 0.02)"})
        rates[dtype] = [audit.metrics() for audit in seen.audits.values()]
    for whole, half in zip(*rates.values(), strict=True):
        for name in ("clip_high", "clip_low", "blocked_mass_below_0.1"):
            assert half[name] == pytest.approx(whole[name], rel=5e-3)
    # Of about 60,000 tokens without repetition; docs/audit.md has the figures of real ones.
    sizes = [file.stat().st_size for file in sorted(tmp_path.glob("*/*.arrow"))]
    assert sizes[0] < 0.6 * sizes[1]


def test_every(tmp_path):
    state = torch.get_rng_state()
    record(tmp_path / "every", range(10), every=4)
    assert [loss.step for loss in read_record(tmp_path / "every")] == [0, 4, 8]
    with Recorder(tmp_path / "calls", every=2) as recorder:
        for number in range(3):
            recorder.add(**batch(number))
    assert len(list(read_record(tmp_path / "calls"))) == 2
    assert torch.equal(torch.get_rng_state(), state)


def test_processes_and_resumption(tmp_path):
    """Two processes; one is stopped at step 3, resumed from a checkpoint at 2, and repeats step 2."""
    record(tmp_path, [0, 1, 2, 3], process=0)
    record(tmp_path, [0, 1, 2], process=1)
    record(tmp_path, [2, 3, 4], process=0)
    names = sorted(file.name for file in tmp_path.glob("*.arrow"))
    assert names == ["tokens-00000-0000.arrow", "tokens-00000-0001.arrow", "tokens-00001-0000.arrow"]
    assert [loss.step for loss in read_record(tmp_path)] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert [loss.step for loss in read_record(tmp_path / names[0])] == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", ["schema", "every loss", "no digests"])
def test_a_file_of_which_nothing_can_be_read_is_set_aside_when_the_run_goes_on(damage, tmp_path):
    """As a loss of power leaves it; the resumed run records, and its record is read."""
    path = record(tmp_path, [0, 1])
    content = path.read_bytes()
    if damage == "schema":
        path.write_bytes(bytes(len(content)))
    elif damage == "every loss":
        end_of_schema = int(path.with_suffix(".sha256").read_text().split()[1])
        path.write_bytes(content[:end_of_schema].ljust(len(content), b"\0"))
    else:
        path.with_suffix(".sha256").unlink()
    damaged = path.read_bytes()
    with pytest.warns(UserWarning, match=f"set aside as damaged-{path.name}"):
        later = record(tmp_path, [2, 3])
    assert later.name == "tokens-00000-0001.arrow"
    assert (tmp_path / f"damaged-{path.name}").read_bytes() == damaged
    with pytest.warns(
        UserWarning, match="the losses before step 2 are missing, as no file before tokens-00000-0001"
    ):
        assert [loss.step for loss in read_record(tmp_path)] == [2, 3]
    assert record(tmp_path, [4]).name == "tokens-00000-0002.arrow"


@pytest.mark.parametrize(("every", "steps"), [(1, ([0, 1], [4, 5])), (2, ([0, 2], [8, 10]))])
def test_a_gap_between_two_files_is_said(every, steps, tmp_path):
    for part in steps:
        record(tmp_path, part, every=every)
    last, first = steps[0][-1], steps[1][0]
    with pytest.warns(
        UserWarning, match=f"process 0: the losses of steps {last + 1} to {first - 1} are missing"
    ):
        assert [loss.step for loss in read_record(tmp_path)] == [*steps[0], *steps[1]]


def test_what_was_flushed_is_forced_to_the_disk_with_its_name(tmp_path, monkeypatch):
    flushed = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino) or fsync(descriptor)
    )
    recorder = Recorder(tmp_path / "record")
    files = {file.stat().st_ino for file in (tmp_path / "record").iterdir()}
    folders = {folder.stat().st_ino for folder in (tmp_path, tmp_path / "record")}
    assert files | folders <= {*flushed}
    flushed.clear()
    recorder.add(**batch(0), step=0)
    assert flushed == []
    recorder.flush()
    assert {*flushed} == files


def test_a_folder_whose_files_tell_different_methods(tmp_path):
    record(tmp_path, [0, 1], process=0)
    record(tmp_path, [1, 2], process=1, method="FixedClip(0.1)")
    seen = replay_record(tmp_path, {"Band": "Band()"})
    assert {name: sorted(steps) for name, steps in seen.by_step.items()} == {"Band": [0, 1, 2], RUN: [1, 2]}
    assert "audit/if/the run/clip_high" not in seen.rows[0]
    assert "audit/if/the run/clip_high" in seen.rows[1]
    seen = replay_record(record(tmp_path / "none").parent, {})  # neither a method nor others to try
    assert list(seen.audits) == ["FixedClip(0.2)"]
    assert seen.setup == Setup()


def by_hand(folder, number=FORMAT, **columns):
    """Write a valid file with one sequence of two tokens by pyarrow, without the Recorder."""
    kinds = {"step": pa.int64(), "version": pa.list_(pa.int64()), "entropy": pa.list_(pa.float16())}
    kinds |= dict.fromkeys(("advantages", "logp_old", "log_ratio", "log_weight"), pa.list_(pa.float32()))
    kinds |= {name: value.type for name, value in columns.items()}
    given = {"advantages": [[0.5]], "logp_old": [[-1.0, -2.0]], "log_ratio": [[0.0, 0.5]]} | columns
    said = {"format": number, "bandpo": "another", "method": None, "anchor": "trainer", "framework": "mine"}
    schema = pa.schema(kinds).with_metadata({META: json.dumps(said)})
    arrays = [pa.array(given.get(name, [None]), kind) for name, kind in kinds.items()]
    path = folder / "tokens-00000-0000.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write_batch(pa.record_batch(arrays, schema=schema))
    write_digests(path)
    return path


def test_a_file_by_another_writer_is_read(tmp_path):
    """It may lack the columns that are not required, and have others that are not known."""
    (loss,) = read_record(by_hand(tmp_path))
    assert loss.logp.tolist() == [[-1.0, -1.5]]
    assert (loss.token, loss.reward, loss.generation, loss.step) == (None,) * 4
    assert (loss.position, loss.update, loss.truncated, loss.logp_rollout) == (None,) * 4
    more = {"reward": pa.array([0.25], pa.float32()), "token": pa.array([[7, 9]], pa.list_(pa.int32()))}
    (loss,) = read_record(by_hand(tmp_path, **more, mine=pa.array(["not known"])))
    assert (loss.token.tolist(), loss.reward.tolist(), loss.group) == ([[7, 9]], [0.25], None)


def test_a_file_of_the_format_before_is_read(tmp_path):
    """Version 4 counts versions in steps, and does not say when they were read."""
    steps = {"step": pa.array([9], pa.int64()), "version": pa.array([[7]], pa.list_(pa.int64()))}
    (loss,) = read_record(by_hand(tmp_path, 4, **steps))
    assert loss.lag.tolist() == [[2, 2]]
    assert (loss.current_version, loss.version_at, loss.collision) == (None, "token", None)


@pytest.mark.parametrize("version_at", ["token", "answer", "group"])
def test_the_age_is_counted_in_versions(version_at, tmp_path):
    given = batch(0)
    versions = torch.tensor([4, 3, 4, 2])
    collision = torch.randn(4, 16) / 10
    with Recorder(tmp_path, version_at=version_at) as recorder:
        recorder.add(**given, step=40, version=versions, current_version=4, collision=collision)
    (loss,) = read_record(tmp_path)
    mask = given["mask"].bool()
    ages = (4 - versions)[:, None].expand(4, 16)
    assert_array_equal(loss.lag[loss.mask], ages[mask])
    assert_array_equal(loss.collision[loss.mask], collision[mask])
    assert (loss.step, loss.current_version, loss.version_at) == (40, 4, version_at)


def test_a_moment_of_versions_that_is_unknown_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"version_at must be one of token, answer, group, got 'batch'"):
        Recorder(tmp_path, version_at="batch")


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_a_file_of_another_format_is_refused(number, tmp_path):
    by_hand(tmp_path, number)
    message = rf"format {number} \(bandpo another\), this version reads the formats 4 and 5; read it with"
    with pytest.raises(ValueError, match=message):
        list(read_record(tmp_path))


@pytest.mark.parametrize("column", REQUIRED_COLUMNS)
def test_a_file_without_a_required_column_is_refused(column, tmp_path):
    rewritten(record(tmp_path), lambda table: table.drop_columns([column]))
    with pytest.raises(ValueError, match=rf"0000.arrow lacks the column {column}$"):
        list(read_record(tmp_path))


@pytest.mark.parametrize("column", sorted({*record_schema("float32").names} - {*REQUIRED_COLUMNS}))
def test_any_other_column_may_be_missing(column, tmp_path):
    path = record(tmp_path)
    whole = [*read_record(tmp_path)]
    rewritten(path, lambda table: table.drop_columns([column]))
    losses = [*read_record(tmp_path)]
    assert [getattr(loss, column) for loss in losses] == [None] * 3
    for loss, original in zip(losses, whole, strict=True):
        assert_array_equal(loss.logp, original.logp)
        assert loss.step == original.step


def test_what_may_be_missing_is_read_back(tmp_path):
    given = batch(0)
    tokens = torch.arange(64).view(4, 16)
    added = {"group": [0, 0, 1, 1], "reward": torch.rand(4), "truncated": [True, False, False, True]}
    with Recorder(tmp_path, sampling={"temperature": 0.7}) as recorder:
        recorder.add(**given, **added, tokens=tokens, generation=3, update=1)
        with pytest.raises(ValueError, match=r"reward has shape \(3,\); there are 4 sequences"):
            recorder.add(**given, reward=[1.0, 2.0, 3.0])
    (loss,) = read_record(tmp_path)
    mask = given["mask"].bool()
    assert loss.token[loss.mask].tolist() == tokens[mask].tolist()
    assert loss.position[loss.mask].tolist() == (tokens % 16)[mask].tolist()
    assert (loss.generation, loss.update, loss.sampling) == (3, 1, {"temperature": 0.7})
    for name, value in added.items():
        assert_array_equal(getattr(loss, name), np.asarray(value))


def test_the_page_has_every_column():
    page = (ROOT / "docs/audit.md").read_text()
    words = {"list<item: ": "list of ", "halffloat": "float16", "float>": "float32", ">": ""}
    for field in record_schema("float32"):
        kind = str(field.type)
        for ours, said in words.items():
            kind = kind.replace(ours, said)
        assert f"| `{field.name}` | {kind} |" in page


def test_a_call_may_have_a_method_of_its_own(tmp_path):
    given = batch(0)
    with Recorder(tmp_path, method="Band(KL(), 0.1)") as recorder:
        recorder.add(**given)
        recorder.add(**given, method=Method(FixedClip(0.1)))  # the method of this call alone
    loss, other = read_record(tmp_path)
    assert parse(loss.method).clip == Band(KL(), 0.1)
    assert parse(other.method).clip == FixedClip(0.1)


def test_a_kill_loses_nothing_that_was_added_and_a_torn_tail_is_left_out(tmp_path):
    recorder = Recorder(tmp_path)
    for step in range(5):
        recorder.add(**batch(step), step=step)
        assert [loss.step for loss in read_record(tmp_path)] == list(range(step + 1))
    path = recorder.path
    whole = path.read_bytes()
    sizes = {}
    for size in range(len(whole), 1800, -97):
        path.write_bytes(whole[:size])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            steps = [loss.step for loss in read_record(tmp_path)]
        assert steps == list(range(len(steps)))
        sizes[size] = len(steps)
        assert len(said) <= 1
        assert all("is cut off and is left out" in str(warning.message) for warning in said)
    assert sorted(set(sizes.values())) == [0, 1, 2, 3, 4, 5]
    path.write_bytes(b"")  # killed before its first word
    path.with_suffix(".sha256").write_bytes(b"")
    assert list(read_record(tmp_path)) == []
    with pytest.raises(ValueError, match="holds no tokens: nothing was added before it was closed or killed"):
        replay_record(tmp_path)


def test_batches_before_their_first_loss_cannot_be_replayed(tmp_path):
    with Recorder(tmp_path, method="FixedClip(0.2)") as recorder:
        recorder.add(**{name: x for name, x in batch(0).items() if name != "logp"})
    (loss,) = read_record(tmp_path)
    assert (loss.has_logp, np.abs(loss.log_ratio).max()) == (False, 0)
    with pytest.raises(
        ValueError, match=r"holds no tokens of a loss: .* only batches before their first loss"
    ):
        replay_record(tmp_path)


def rewritten(path, change=lambda table: table, meta=None):
    """Write the file again with another table or other metadata."""
    with pa.OSFile(str(path)) as source:
        table = pa.ipc.open_stream(source).read_all()
    said = dict(table.schema.metadata)
    table = change(table)
    table = table.replace_schema_metadata(said if meta is None else meta(said))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    write_digests(path)


def other_format(said):
    return {META: json.dumps(json.loads(said[META]) | {"format": 7, "bandpo": "3.1"}).encode()}


@pytest.mark.parametrize(
    ("change", "meta", "message"),
    [
        (lambda t: t.drop_columns(["log_ratio"]), None, "lacks the column log_ratio$"),
        (lambda t: t.drop_columns(["step", "entropy"]), None, "lacks the columns step, entropy$"),
        (
            lambda t: t,
            other_format,
            r"format 7 \(bandpo 3.1\), this version reads the formats 4 and 5; read it with",
        ),
        (
            lambda t: t,
            lambda _: {},
            "is no record of bandpo.audit.Recorder: its schema has no metadata of bandpo",
        ),
    ],
)
def test_another_kind_of_stream_is_refused(change, meta, message, tmp_path):
    path = record(tmp_path)
    rewritten(path, change, meta)
    with pytest.raises(ValueError, match=rf"tokens-00000-0000.arrow .*{message}"):
        list(read_record(tmp_path))


def test_a_record_cannot_have_a_module_imported(tmp_path, monkeypatch):
    (tmp_path / "evil_record.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = record(tmp_path / "run", method="FixedClip(0.2)")

    def evil(said):
        return {META: said[META].replace(b"FixedClip(low=0.2, high=0.2)", b"evil_record.X()")}

    rewritten(path, lambda t: t, evil)
    with pytest.warns(UserWarning, match=r"evil_record.X.*name it yourself by --run-method"):
        seen = replay_record(path.parent, {"Band": "Band()"})
    assert (list(seen.audits), seen.setup.method) == (["Band"], None)
    assert list(replay_record(path.parent, {}, method="FixedClip(0.2)").audits) == [RUN]


def test_foreign_and_damaged_files_are_named(tmp_path):
    other = tmp_path / "other.arrow"
    other.write_bytes(b"PAR1 and what follows")
    with pytest.raises(ValueError, match=r"other.arrow is no record of .*: it is no Arrow stream"):
        list(read_record(other))
    path = record(tmp_path / "run", range(5))
    whole = bytearray(path.read_bytes())
    third = bytes(whole).index(b"\xff\xff\xff\xff", len(whole) // 2)
    whole[third - 16 : third] = b"\x01" * 16
    path.write_bytes(whole)
    with pytest.warns(UserWarning, match=r"0000.arrow: what was call 3 of 5 is damaged and is left out"):
        assert [loss.step for loss in read_record(tmp_path / "run")] == [0, 1, 3, 4]
    with pytest.raises(ValueError, match="holds no record; give the folder that bandpo"):
        list(read_record(tmp_path))
    (tmp_path / "run" / "tokens-00001-0000.arrow").write_bytes(b"\xff\xff\xff\xff\x10")
    with (
        pytest.warns(UserWarning, match="what follows call 0 is cut off"),
        pytest.warns(UserWarning, match=r"has no tokens-00001-0000\.sha256 .* so that damage is not noticed"),
    ):
        assert list(read_record(tmp_path / "run" / "tokens-00001-0000.arrow")) == []


def test_a_record_without_its_digests_is_read_and_that_is_said(tmp_path):
    path = record(tmp_path, range(3))
    path.with_suffix(".sha256").unlink()
    with pytest.warns(UserWarning, match=r"has no tokens-00000-0000\.sha256 with its digests"):
        assert [loss.step for loss in read_record(tmp_path)] == [0, 1, 2]


def test_a_damaged_line_of_the_digests_costs_two_losses(tmp_path):
    path = record(tmp_path, range(5))
    digests = path.with_suffix(".sha256")
    lines = digests.read_text().splitlines(keepends=True)
    digests.write_text("".join(lines[:2]) + "x" + "".join(lines[2:]))
    with pytest.warns(UserWarning, match=r"what was calls 2 to 3 of 5 is damaged"):
        assert [loss.step for loss in read_record(tmp_path)] == [0, 3, 4]


def test_a_batch_that_decompresses_to_too_much_is_refused_before_it_does(tmp_path, monkeypatch):
    path = record(tmp_path, range(1))
    monkeypatch.setattr("rlvet.records.record.LARGEST_BATCH", 100)
    with pytest.raises(
        ValueError, match=r"0000\.arrow, call 1 cannot be read: it takes .* bytes, and at most 100 are"
    ):
        list(read_record(path))


def test_values_that_cannot_be_right_are_named_and_not_lost(tmp_path):
    given = batch(0)
    given["mask"][:] = 1
    spoilt = {name: x.clone() for name, x in given.items()}
    spoilt["logp"][1, 2], spoilt["logp_old"][3, 0] = math.nan, 0.7
    with Recorder(tmp_path) as recorder:
        recorder.add(**given)
        recorder.add(**spoilt)  # training goes on
    place = r"2 sequences .* left out; .*0000.arrow, call 2, row 2: logp is nan at counted token 3"
    with pytest.warns(UserWarning, match=place):
        _, second = read_record(tmp_path)
    assert second.mask.sum(1).tolist() == [16, 0, 16, 0]
    with pytest.warns(UserWarning, match="2 sequences"):
        seen = replay_record(tmp_path)
    expected = Audit.from_batch(Batch.read(*given.values()), method=FixedClip()) + Audit.from_batch(
        Batch.read(*(x[[0, 2]] for x in spoilt.values())), method=FixedClip()
    )
    assert seen.audits["clip 0.2"].metrics()["clip_high"] == expected.metrics()["clip_high"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logp_rollout", -math.inf, "logp_rollout is -inf"),
        ("logp_rollout", 0.3, "logp_rollout is 0.3"),
        ("logp_old", 0.7, "logp_old is 0.7 at counted token 1"),
        ("advantages", math.inf, "advantages is inf at counted token 1"),
    ],
)
def test_other_values_that_cannot_be_right_are_named(name, value, message, tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.add(**batch(0) | {name: torch.full((4, 16), value)})
    with pytest.warns(UserWarning, match=f"row 1: {message}"):
        list(read_record(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"dtype": "bfloat16"}, "dtype must be 'float32' or 'float16', got 'bfloat16'"),
        ({"anchor": "engine"}, "anchor must be 'trainer' or 'rollout', got 'engine'"),
        ({"method": "GSPPO()"}, "unknown name 'GSPPO'"),
        ({"method": Band(radius=torch.tensor(0.1))}, "Tensor has no text form"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_a_file_is_made(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Recorder(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logp": torch.zeros(3)}, r"logp has shape \(3,\), logp_old \(4, 16\)"),
        ({"logp_old": torch.zeros(3)}, r"logp_old must have the shape \(batch, time\), got \(3,\)"),
        ({"mask": torch.ones(4)}, r"mask has shape \(4,\), logp \(4, 16\)"),
        ({"advantages": torch.ones(3)}, r"advantages of shape \(3,\) fits neither the tokens \(4, 16\) nor"),
        ({"version": torch.ones(5)}, r"version of shape \(5,\) fits neither"),
    ],
)
def test_shapes_that_cannot_be_are_refused(wrong, message, tmp_path):
    with Recorder(tmp_path) as recorder:
        with pytest.raises(ValueError, match=message):
            recorder.add(**batch(0) | wrong)
        recorder.add(**batch(1))
    assert len(list(read_record(tmp_path))) == 1
    with pytest.raises(ValueError, match="is closed; create another Recorder to record more"):
        recorder.add(**batch(0))


def test_rows_without_a_counted_token(tmp_path):
    given = batch(0)
    given["mask"][1] = 0
    nothing = given | {"mask": torch.zeros(4, 16)}
    with Recorder(tmp_path) as recorder:
        recorder.add(**given)
        recorder.add(**nothing)
    expected = Audit.from_batch(Batch.read(*given.values()), method=FixedClip(), counterfactuals={}).metrics()
    found = replay_record(tmp_path, {"clip": FixedClip()}).audits["clip"].metrics()
    assert (found["tokens"], found["clip_high"]) == (expected["tokens"], expected["clip_high"])


def test_what_to_install_is_said(tmp_path, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(record_format.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install \./packages/bandpo"):
        Recorder(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk without room")
def test_a_disk_that_is_full_when_a_record_is_closed(tmp_path):
    """Closing says which file it is; the end of a process, which has its own error then, says nothing."""
    for name in ("closed", "left open"):
        recorder = Recorder(tmp_path / name)
        full = Path("/dev/full").open("wb")  # noqa: SIM115 - the recorder closes it
        recorder._file._file = recorder._file._open_files.enter_context(full)
        if name == "closed":
            with pytest.raises(OSError, match=r"No space left on device: '.*tokens-00000-0000\.arrow'"):
                recorder.close()
        file = weakref.ref(recorder._file)
        del recorder, full
        for generation in (1, 2):  # a collection of all objects takes half a second, and is seldom needed
            if file() is not None:
                gc.collect(generation)
        assert file() is None
