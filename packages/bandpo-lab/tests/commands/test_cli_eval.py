"""`bandpo-lab data prepare`, `bandpo-lab eval` and `bandpo-lab compare-evals` as commands, one after the other."""

import json
import re
import shutil
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("math_verify")

import byte_model
from bandpo_lab import cli
from bandpo_lab.files.validation import read_sealed_json, with_seal
from bandpo_lab.files.writing import seal
from bandpo_lab.tasks.multiplication import base_model_path

pytestmark = pytest.mark.usefixtures("one_grader")


@pytest.fixture
def bandpo_lab(monkeypatch, capsys, tmp_path):
    """Runs a command in this process, in an empty folder; what it printed, or the error that it ended with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["bandpo-lab", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert (stop.value.code or 0) == code, stop.value
        return str(stop.value) if code else capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """Folder of a model that can read anything, and answers noise."""
    return byte_model.save(tmp_path_factory.mktemp("model"))


def samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_the_embedded_model_by_default(bandpo_lab, tmp_path):
    table = bandpo_lab("eval", "--n", 4, "--limit", 8, "--output-dir", "first")
    assert "mean@4" in table
    assert "pass@4" in table
    assert len(samples(tmp_path / "first")) == 32
    report = json.loads((tmp_path / "first" / "report.json").read_text())
    assert report["multiplication"]["problems"] == 8
    before = (tmp_path / "first" / "samples.jsonl").read_bytes()
    assert bandpo_lab("eval", "--n", 4, "--limit", 8, "--output-dir", "first") == table
    assert (tmp_path / "first" / "samples.jsonl").read_bytes() == before
    bandpo_lab("eval", "--n", 4, "--limit", 8, "--output-dir", "second", "--seed", 1)
    assert (tmp_path / "second" / "samples.jsonl").read_bytes() != before
    assert "claimed" in bandpo_lab(
        "compare-evals", "first", "second"
    )  # a narrow terminal breaks the sentence
    assert "mean@4" in bandpo_lab("compare-evals", "first", "second", "--more-first", "second")
    told = json.loads(bandpo_lab("compare-evals", "first", "second", "--json"))["differences"]
    assert (told[0]["metric"], told[0]["verdict"]) == ("mean@4", "no difference can be claimed")
    settings, lines = (tmp_path / "second" / name for name in ("settings.json", "samples.jsonl"))
    # An evaluation by another version of the grader.
    content = read_sealed_json(settings)
    content["grader"] = f"0{content['grader']}"
    settings.write_text(json.dumps(with_seal(content)))
    assert "different graders" in bandpo_lab("compare-evals", "first", "second", code=2)
    bandpo_lab("eval", "--regrade", "--output-dir", "second")
    bandpo_lab("compare-evals", "first", "second")
    lines.write_text(lines.read_text().replace('"score": 0.0', '"score": 1.0'))
    assert "line 1 has changed" in bandpo_lab("compare-evals", "first", "second", code=2)


def test_new_weights_at_the_same_path_are_new_samples(bandpo_lab, tmp_path):
    shutil.copytree(base_model_path(), tmp_path / "run" / "model")
    evaluate = ["eval", "run/model", "--n", 1, "--limit", 2, "--output-dir", "samples"]
    sums = [{"prompt": "123*4=", "answer": "492", "data_source": "multiplication"}]
    (tmp_path / "sums.jsonl").write_text(json.dumps(sums[0]))
    evaluate += ["--data", "sums.jsonl", "--max-new-tokens", 4]
    bandpo_lab(*evaluate)
    weights = tmp_path / "run" / "model" / "model.safetensors"
    seal(tmp_path / "run", [weights])
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "has changed since it was saved" in bandpo_lab(*evaluate, code=2)
    seal(tmp_path / "run", [weights])
    assert "holds a run with weights = " in bandpo_lab(*evaluate, code=2)


def test_real_sets_from_preparation_to_report(bandpo_lab, reader, real_data, tmp_path):
    names = ("aime24", "aime25", "amc23")
    files = [real_data / f"{name}.jsonl" for name in names]
    table = bandpo_lab("data", "prepare", *files, "--output-dir", "data")
    assert all(name in table for name in names)
    data = [part for name in names for part in ("--data", f"data/trl/{name}.parquet")]
    bandpo_lab(
        "eval", reader, *data, "--n", 2, "--max-new-tokens", 4, "--batch-size", 16, "--output-dir", "run"
    )
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert {name: report[name]["problems"] for name in names} == {"aime24": 30, "aime25": 30, "amc23": 40}
    assert all(report[name]["metrics"]["mean@2"]["mean"] < 0.2 for name in names)
    assert len({(s["problem"], s["sample"]) for s in samples(tmp_path / "run")}) == 200


def test_golds_that_cannot_be_graded_are_found_before_an_evaluation(bandpo_lab, reader, tmp_path):
    rows = [("1+1?", "2"), ("Which N?", "N=n"), ("When?", "3:00")]
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    evaluate = ["eval", reader, "--data", "sums.jsonl", "--n", 1, "--max-new-tokens", 4]
    assert "2 golds cannot be used, 2 kept" in bandpo_lab(*evaluate, "--output-dir", "kept")
    assert len(samples(tmp_path / "kept")) == 3
    bandpo_lab(*evaluate, "--output-dir", "left", "--golds", "drop")
    report = json.loads((tmp_path / "left" / "report.json").read_text())["sums"]
    assert (report["problems"], list(report["unreadable golds"]["dropped"])) == (1, ["sums-1", "sums-2"])
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "Which?", "answer": "N=n"}) + "\n")
    ended = bandpo_lab(*evaluate, "--golds", "drop", "--output-dir", "none", code=2)
    assert "no problem is left" in ended


def test_a_chat_template_can_be_given(bandpo_lab, reader, tmp_path):
    (tmp_path / "sums.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    (tmp_path / "nothing.jinja").write_text("{% if false %}{{ messages }}{% endif %}")
    assert " train " in bandpo_lab("data", "prepare", "sums.jsonl", "--output-dir", "data", "--role", "train")
    evaluate = ["eval", reader, "--data", "data/trl/sums.parquet", "--n", 1, "--max-new-tokens", 4]
    bandpo_lab(*evaluate)
    ended = bandpo_lab(*evaluate, "--output-dir", "x", "--chat-template", "nothing.jinja", code=2)
    assert "has no tokens" in ended


def test_the_default_length_is_what_the_context_leaves(bandpo_lab, monkeypatch, capsys, tmp_path):
    (tmp_path / "sums.jsonl").write_text('{"problem": "What is 3+4?", "answer": "7"}\n')
    bandpo_lab("data", "prepare", "sums=sums.jsonl")
    words = ["eval", "--data", "data/trl/sums.parquet", "--n", 2, "--output-dir", "run"]
    monkeypatch.setattr(sys, "argv", ["bandpo-lab", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code, stop.value
    said = capsys.readouterr().err
    length = int(re.search(r"max_new_tokens is (\d+), not 4096: the longest prompt", said)[1])
    assert 0 < length < 128
    settings = json.loads((tmp_path / "run/settings.json").read_text())
    assert settings["sampling"]["max_new_tokens"] == length
    # A length that is given is used or refused.
    message = bandpo_lab(*words[:-1], "other", "--max-new-tokens", length + 1, code=2)
    assert f"lower max_new_tokens to {length}" in message
    (tmp_path / "long.jsonl").write_text(json.dumps({"problem": "What is 3+4? " * 50, "answer": "7"}) + "\n")
    bandpo_lab("data", "prepare", "long=long.jsonl", "--output-dir", "long")
    message = bandpo_lab("eval", "--data", "long/trl/long.parquet", "--output-dir", "third", code=2)
    assert "leaves no token of the model's context of 128" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--data", "no.parquet"], "no.parquet does not exist"),
        (["eval", "--server", "http://localhost:1/v1"], "--server needs the model's name on the server"),
        (["eval", "m", "--server", "localhost:1"], "must be an address such as"),
        (["compare-evals", "a", "b"], "a holds no evaluation"),
        (["data", "prepare", "aime99"], "'aime99' is neither"),
        (["eval", "/nowhere"], "/nowhere cannot be loaded as a model: "),
        (["eval", "runs/mine"], "runs/mine is the folder of a run"),
        (["eval", "--temperature", "inf"], "must be 0 (greedy) or more, and finite"),
        (["eval", "--output-dir", "file"], "file cannot be written: Not a directory"),
    ],
)
def test_mistakes_end_in_one_line(bandpo_lab, tmp_path, arguments, message):
    (tmp_path / "file").touch()
    (tmp_path / "runs/mine/model").mkdir(parents=True)
    (tmp_path / "runs/mine/model/config.json").write_text("{}")
    ended = bandpo_lab(*arguments, code=2)
    assert ended.startswith("error: ")
    assert message in ended
