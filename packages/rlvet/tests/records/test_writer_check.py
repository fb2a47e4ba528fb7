"""`check_record` accepts what a writer was given, and names the column of each mistake."""

import math

import pytest
import torch

from bandpo.audit import Recorder
from bandpo.testing import check_record
from helpers.records import write_digests
from rlvet.records.format import record_schema

pa = pytest.importorskip("pyarrow")

ROWS, LENGTH = 6, 8


def known_loss(seed=0):
    """Return a loss with every quantity, as `Recorder.add` takes it."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(ROWS, LENGTH, generator=g)
    ids = torch.randint(5, 90, (ROWS, LENGTH), generator=g)
    return {
        "logp": (old + 0.1 * torch.randn(old.shape, generator=g)).clamp(max=0),
        "logp_old": old,
        "logp_rollout": (old + 0.01 * torch.randn(old.shape, generator=g)).clamp(max=0),
        "advantages": torch.randn(ROWS, generator=g),
        "mask": torch.arange(LENGTH) < torch.tensor([8, 3, 5, 8, 1, 6])[:, None],
        "entropy": 2 * torch.rand(old.shape, generator=g),
        "tokens": ids,
        "group": torch.tensor([4, 4, 4, 9, 9, 9]),
        "reward": torch.rand(ROWS, generator=g),
        "truncated": torch.tensor([True, False, False, True, False, False]),
        "version": torch.tensor([9, 9, 9, 8, 8, 8]),
        "step": 11,
        "generation": 5,
        "update": 1,
    }


def write_stream(folder, columns, sealed=True):
    """Write a record of one loss as another project would, with the columns in the place of the right ones."""
    loss = known_loss()
    counted = loss["mask"]

    def lists(values):
        return [row[here].tolist() for row, here in zip(values, counted, strict=True)]

    right = {
        "step": [loss["step"]] * ROWS,
        "version": [[version] for version in loss["version"].tolist()],
        "advantages": [[advantage] for advantage in loss["advantages"].tolist()],
        "logp_old": lists(loss["logp_old"]),
        "log_ratio": lists(loss["logp"] - loss["logp_old"]),
        "log_weight": lists(loss["logp_old"] - loss["logp_rollout"]),
        "entropy": lists(loss["entropy"]),
        "token": lists(loss["tokens"]),
        "generation": [loss["generation"]] * ROWS,
        "update": [loss["update"]] * ROWS,
        **{name: loss[name].tolist() for name in ("group", "reward", "truncated")},
    }
    written = right | columns(right) if columns else right
    schema = record_schema("float32")
    schema = pa.schema([schema.field(name) for name in written if written[name] is not None])
    schema = schema.with_metadata({"bandpo": '{"format": 4, "sampling": {"temperature": 0.7}}'})
    file = folder / "tokens-00000-0000.arrow"
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        arrays = [pa.array(written[field.name], field.type) for field in schema]
        stream.write_batch(pa.record_batch(arrays, schema=schema))
    if sealed:
        write_digests(file)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_the_recorder_was_given(dtype, tmp_path):
    losses = [known_loss(seed) for seed in range(3)]
    with Recorder(tmp_path, method="DAPO()", dtype=dtype, sampling={"temperature": 0.7}) as recorder:
        for loss in losses:
            recorder.add(**loss)
    tolerance = 1e-5 if dtype == "float32" else 2e-3
    settings = {"method": "DAPO(low=0.2, high=0.28)", "anchor": "trainer", "sampling": {"temperature": 0.7}}
    check_record(tmp_path, losses, **settings, tolerance=tolerance)
    # Arrays and lists are as good as tensors, and groups may have other numbers.
    lists = [{name: torch.as_tensor(values).tolist() for name, values in loss.items()} for loss in losses]
    for values in lists:
        values["group"] = [0, 0, 0, 1, 1, 1]
    check_record(tmp_path, lists, tolerance=tolerance)
    with pytest.raises(AssertionError, match="3 losses were read, and 2 were expected"):
        check_record(tmp_path, losses[:2], tolerance=tolerance)
    with pytest.raises(AssertionError, match="anchor is 'trainer', expected 'rollout'"):
        check_record(tmp_path, losses, anchor="rollout", tolerance=tolerance)
    with pytest.raises(
        AssertionError, match=r"sampling is \{'temperature': 0.7\}, expected \{'temperature': 1.0\}"
    ):
        check_record(tmp_path, losses, sampling={"temperature": 1.0}, tolerance=tolerance)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            [[0, 0, 0, 1, 1, 1]] * 2,
            "loss 2, column group: 0 is another group than in loss 1, of the same generated",
        ),
        (
            [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]],
            "loss 2, column group: a group that is 0 in loss 1, of the same generated batch, is 2",
        ),
    ],
)
def test_groups_that_each_loss_numbers_anew(written, message, tmp_path):
    """A batch is split over two losses. The first mistake joins groups, and the second divides them."""
    joins = written[0] == written[1]
    groups = [[5, 5, 5, 6, 6, 6], [7, 7, 7, 8, 8, 8] if joins else [5, 5, 5, 6, 6, 6]]
    losses = [known_loss(seed) | {"generation": 3} for seed in range(2)]
    with Recorder(tmp_path) as recorder:
        for loss, numbers in zip(losses, written, strict=True):
            recorder.add(**loss | {"group": torch.tensor(numbers)})
    expected = [loss | {"group": torch.tensor(numbers)} for loss, numbers in zip(losses, groups, strict=True)]
    with pytest.raises(AssertionError, match=message):
        check_record(tmp_path, expected)
    # Losses of two batches may use a number for two groups.
    check_record(
        tmp_path, [expected[0], {name: expected[1][name] for name in expected[1] if name != "generation"}]
    )


def test_what_another_writer_wrote(tmp_path):
    write_stream(tmp_path, None)
    check_record(tmp_path, [known_loss()], sampling={"temperature": 0.7})


def negated(rows):
    return [[-x for x in row] for row in rows]


def added(rows, more):
    return [[x + y for x, y in zip(row, other, strict=True)] for row, other in zip(rows, more, strict=True)]


MISTAKES = {
    "the other sign of the ratio": (
        lambda right: {"log_ratio": negated(right["log_ratio"])},
        "column log_ratio: .*: it has the opposite sign; log_ratio is log π − log π_old",
    ),
    "log π in the place of the ratio": (
        lambda right: {"log_ratio": added(right["log_ratio"], right["logp_old"])},
        "column log_ratio: .*: it holds log π itself",
    ),
    "the other sign of the weight": (
        lambda right: {"log_weight": negated(right["log_weight"])},
        "column log_weight: .*: it has the opposite sign",
    ),
    "log μ in the place of the weight": (
        lambda right: {"log_weight": added(right["logp_old"], negated(right["log_weight"]))},
        "column log_weight: .*: it holds log μ itself",
    ),
    "old log-probabilities of the token before": (
        lambda right: {"logp_old": [[-0.5, *row[:-1]] for row in right["logp_old"]]},
        "column logp_old: .*: these are the values of the token before",
    ),
    "ids of the token after": (
        lambda right: {"token": [[*row[1:], 1] for row in right["token"]]},
        "column token: .*: these are the values of the token after",
    ),
    "the engine's as old ones": (
        lambda right: {"logp_old": added(right["logp_old"], negated(right["log_weight"]))},
        "column logp_old: .*: these are the values of logp_rollout",
    ),
    "old ones to the base 2": (
        lambda right: {"logp_old": [[x / math.log(2) for x in row] for row in right["logp_old"]]},
        "column logp_old: .*: it is in logarithms to the base 2; .* in nats",
    ),
    "the age in the place of the version": (
        lambda right: {"version": [[11 - version] for (version,) in right["version"]]},
        "column version: .*: it is the age of the weights",
    ),
    "advantages of other sequences": (
        lambda right: {"advantages": right["advantages"][1:] + right["advantages"][:1]},
        "column advantages: .*: these are the values of other sequences",
    ),
    "probabilities": (
        lambda right: {"logp_old": [[math.exp(x) for x in row] for row in right["logp_old"]]},
        "sequences hold NaN, an infinite value or a log-probability above 0.*logarithms, in nats",
    ),
    "other groups": (
        lambda right: {"group": [0, 1, 1, 2, 2, 2]},
        "column group: sequences 1 and 2 are in two groups, and the opposite was expected",
    ),
    "rewards of which one is null": (
        lambda right: {"reward": [None, *right["reward"][1:]]},
        "column reward: it is missing, or null for a sequence",
    ),
    "no ids": (
        lambda right: {"token": None},
        "column token: it is missing or null, though tokens is expected",
    ),
    "another update": (lambda right: {"update": [0] * ROWS}, "column update: it is 0, expected 1; update is"),
    "no step": (lambda right: {"step": [None] * ROWS}, "column step: it is missing, expected 11"),
    "truncated negated": (
        lambda right: {"truncated": [not x for x in right["truncated"]]},
        "column truncated: truncated is 0 of sequence 1, expected 1",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_column(name, tmp_path):
    columns, message = MISTAKES[name]
    write_stream(tmp_path, columns)
    with pytest.raises(AssertionError, match=f"loss 1.*{message}"):
        check_record(tmp_path, [known_loss()])


def test_a_mask_that_is_not_applied(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.add(**known_loss() | {"mask": None})
    with pytest.raises(AssertionError, match=r"sequence 2: 8 tokens count, and 3 .*the mask is not applied"):
        check_record(tmp_path, [known_loss()])


def test_a_required_column_that_is_missing_is_named(tmp_path):
    write_stream(tmp_path, lambda right: {"log_weight": None})
    with pytest.raises(ValueError, match="lacks the column log_weight"):
        check_record(tmp_path, [known_loss()])


def test_a_record_without_digests(tmp_path):
    write_stream(tmp_path, None, sealed=False)
    with pytest.raises(AssertionError, match=r"the reader warns: .*digests"):
        check_record(tmp_path, [known_loss()])


def test_a_batch_that_cannot_be_compared_is_refused(tmp_path):
    write_stream(tmp_path, None)
    with pytest.raises(ValueError, match="loss 1: token is not a quantity of a record; did you mean tokens"):
        check_record(tmp_path, [known_loss() | {"token": [1]}])
    with pytest.raises(ValueError, match="loss 1 lacks logp_old"):
        check_record(tmp_path, [{"logp": [[-1.0]]}])
    with pytest.raises(ValueError, match=r"loss 1: reward has the shape \(2,\), expected \(6,\)"):
        check_record(tmp_path, [known_loss() | {"reward": [1.0, 2.0]}])
    with pytest.raises(ValueError, match="tolerance"):
        check_record(tmp_path, [known_loss()], tolerance=0.0)
