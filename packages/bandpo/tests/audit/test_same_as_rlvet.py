"""What bandpo and rlvet each have, as neither requires the other: one test for each holds both equal.

bandpo writes logs, records and the folders of a run's legs, and rlvet reads them.
"""

import ast
import difflib
import inspect
import itertools
import math
import tokenize
from pathlib import Path

import pytest
import torch

pytest.importorskip("rlvet")

import bandpo
import rlvet
from bandpo import parse
from bandpo.audit import Recorder, metric_names, record_format, sealed_file
from bandpo.integrations import legs, stock_methods
from rlvet.records import format as format_read
from rlvet.records import parts as record_parts
from rlvet.runs import configs, quantities
from rlvet.runs import legs as legs_read
from rlvet.runs import metric_names as names_read


def constants(module):
    """Return the constants of a module, by name."""
    return {name: value for name, value in vars(module).items() if name.isupper()}


def shared_constants(module, other):
    """Return the constants that two modules both have, as each has them."""
    mine, theirs = constants(module), constants(other)
    names = mine.keys() & theirs.keys()
    return {name: mine[name] for name in names}, {name: theirs[name] for name in names}


def test_the_names_of_metrics():
    expected = {**constants(names_read), "DETAIL": quantities.DETAIL}
    assert constants(metric_names) == expected
    assert len(expected) == 4


def test_the_format_of_a_record():
    pytest.importorskip("pyarrow")
    mine, theirs = shared_constants(record_format, format_read)
    assert mine == theirs
    assert mine.keys() == {"FORMAT", "META", "VERSION_AT"}
    for dtype in ("float32", "float16"):
        assert record_format.record_schema(dtype).equals(
            format_read.record_schema(dtype), check_metadata=True
        )
    assert {*format_read.REQUIRED_COLUMNS} <= {*record_format.record_schema("float32").names}


def test_the_parts_of_a_record_and_their_digests(tmp_path):
    mine, theirs = shared_constants(sealed_file, record_parts)
    assert mine == theirs
    assert mine.keys() == {"SUFFIX", "STREAM_END"}
    parts = [b"the schema", b"", b"\xff\xff\xff\xff" * 5, bytes(300)]
    file = sealed_file.SealedFile(tmp_path / "tokens-0-0.arrow")
    for part in parts:
        file.write_part(part)
    file.close()
    assert list(record_parts.read_parts(tmp_path / "tokens-0-0.arrow")) == [*enumerate(parts)]
    lines = (tmp_path / "tokens-0-0.sha256").read_bytes().splitlines(keepends=True)
    assert [bool(record_parts.LINE.fullmatch(line)) for line in lines] == [True] * len(parts)


def test_the_names_and_the_metadata_of_a_record_s_files(tmp_path):
    pytest.importorskip("pyarrow")
    for step in (1, 2):
        recorder = Recorder(tmp_path, method="DAPO()")
        logp = -torch.rand(2, 3) - 0.1
        recorder.add(logp=logp, logp_old=logp, advantages=torch.tensor([1.0, -1.0]), step=step)
        recorder.close()
    files = sorted(path.name for path in tmp_path.glob("*.arrow"))
    assert [format_read.FILE_NAME.fullmatch(name).groups() for name in files] == [
        ("00000", "0000"),
        ("00000", "0001"),
    ]
    assert [str(loss.method) for loss in rlvet.records.record.read_record(tmp_path)] == [
        str(parse("DAPO()"))
    ] * 2


def test_the_folders_of_legs(tmp_path):
    assert constants(legs) == constants(legs_read)
    created = [legs.new_leg(tmp_path) for _ in range(12)]
    (tmp_path / legs.LEGS / "notes").mkdir()
    assert legs_read.legs_of(tmp_path) == legs._legs_of(tmp_path) == created
    assert {legs_read.run_folder(leg / legs.METRICS) for leg in created} == {tmp_path}


LOWS = (0.0, 0.2, 3e-4, 1.5, 1, True, "0.2", None, math.nan)
HIGHS = (None, 0.28, 5.0, math.inf, False, "high")


def text_or_error(function, *arguments):
    """Return what a function returns, or the type and the message of the error that it raises."""
    try:
        return function(*arguments)
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        return type(error), str(error)


TRL_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "new", 3, None)


@pytest.mark.parametrize("loss_type", TRL_LOSSES)
def test_the_text_of_a_stock_method_of_trl(loss_type):
    texts = set()
    grid = itertools.product(
        LOWS, HIGHS, (None, 1.5, "4"), ("token", "sequence", "sequence_token", None), (1.0, "2")
    )
    for low, high, delta, level, number in grid:
        config = {
            "loss_type": loss_type,
            "importance_sampling_level": level,
            "epsilon": low,
            "epsilon_high": high,
        }
        config |= {"delta": delta, "sapo_temperature_pos": number, "sapo_temperature_neg": 1.05}
        config |= {f"vespo_{name}": number for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
        text = text_or_error(stock_methods.trl_method, config)
        assert text == text_or_error(configs.trl_method, config)
        texts.add(text)
        del config["vespo_k_pos"], config["sapo_temperature_pos"], config["epsilon_high"]
        assert text_or_error(stock_methods.trl_method, config) == text_or_error(configs.trl_method, config)
    assert len(texts) > 1


VERL_LOSSES = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "geo_mean",
    "cispo",
    "clip_cov",
    "kl_cov",
    "",
)


@pytest.mark.parametrize("loss_mode", VERL_LOSSES)
def test_the_text_of_a_stock_method_of_verl(loss_mode):
    grid = itertools.product(LOWS, (None, *LOWS), HIGHS, (3.0, "3"), (1.0, None))
    for ratio, low, high, dual, temperature in grid:
        actor = {"clip_ratio": ratio, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}
        actor |= {"tau_pos": temperature, "tau_neg": 1.05}
        expected = text_or_error(configs.verl_method, loss_mode, actor)
        assert text_or_error(stock_methods.verl_method, loss_mode, actor) == expected


def compared_texts(function):
    """Return the names of losses with which a function compares its setting ``loss_type`` or ``loss_mode``."""
    nodes = ast.walk(ast.parse(inspect.getsource(function)))
    comparisons = [
        node for node in nodes if isinstance(node, ast.Compare) and "loss_" in ast.unparse(node.left)
    ]
    values = [node for one in comparisons for node in ast.walk(one) if isinstance(node, ast.Constant)]
    return {node.value for node in values if isinstance(node.value, str)}


def test_the_grids_have_every_loss():
    """A loss that one package learns fails here until the grids above have it."""
    for module in (stock_methods, configs):
        assert TRL_LOSSES[:5] == module.TRL_CLIPS
        assert compared_texts(module.trl_method) <= {*TRL_LOSSES}
        assert compared_texts(module.verl_method) <= {*VERL_LOSSES}
        assert {"cispo", "vanilla"} <= compared_texts(module.verl_method)


def code(path):
    """Return the tokens of a file's code, without docstrings and comments."""
    with path.open("rb") as file:
        found = [(t.type, t.string) for t in tokenize.tokenize(file.readline)]
    dropped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return [text for kind, text in found if kind not in dropped and not text.startswith('"""')]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("_atomic", "_atomic"),
        ("_terminal", "_terminal"),
        ("core/_shown", "_shown"),
        ("core/_limits", "_limits"),
        ("cli/command_line", "cli/command_line"),
    ],
)
def test_the_files_that_both_have(mine, theirs):
    folders = [Path(package.__file__).parent for package in (bandpo, rlvet)]
    files = [folder / f"{name}.py" for folder, name in zip(folders, (mine, theirs), strict=True)]
    differences = difflib.unified_diff(*map(code, files), lineterm="", n=0)
    assert list(differences) == []
