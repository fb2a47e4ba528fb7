import hashlib
import json
from pathlib import Path

import pyarrow.parquet
import pytest

from helpers.frameworks import needs

pytest.importorskip("math_verify")

from bandpo_lab.data.prepare import INSTRUCTION, prepare_data
from bandpo_lab.data.sets import GENERATED
from bandpo_lab.evals.grading import compute_score, reward

pytestmark = pytest.mark.usefixtures("one_grader")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(out, framework, name):
    return pyarrow.parquet.read_table(out / framework / f"{name}.parquet").to_pylist()


def dropped(out):
    """Why, by the row's id."""
    lines = map(json.loads, (out / "dropped.jsonl").read_text().splitlines())
    return {line["id"]: line["reason"] for line in lines}


@pytest.fixture
def sets(tmp_path):
    return [
        write(tmp_path / "my-train.jsonl", [
            {"question": "What is 1 + 1?", "answer": "2"},
            {"question": "What is 7 + 8 * 3?", "answer": "#### 31"},
            {"question": "what is 7+8*3", "answer": "31"},
            {"question": "How much is nothing?", "answer": ""},
            {"question": "Tell me an interval of which this is the end", "answer": "\\frac{"},
        ]),
        write(tmp_path / "held.jsonl", [{"problem": "What is $1+1$?", "answer": 2.0}]),
    ]  # fmt: skip


def test_both_forms_the_manifest_and_what_was_dropped(sets, tmp_path):
    out = tmp_path / "out"
    manifest = prepare_data(sets, out)
    assert manifest == json.loads((out / "manifest.json").read_text())
    assert manifest == prepare_data(sets, tmp_path / "again")  # with the digest of each file
    user = {"role": "user", "content": f"What is 7 + 8 * 3?\n{INSTRUCTION}"}
    for_trl = {"prompt": [user], "answer": "31", "data_source": "my", "id": "my-train-1"}
    assert rows(out, "trl", "my-train") == [for_trl]
    assert rows(out, "verl", "my-train") == [
        {
            "data_source": "my",
            "prompt": [user],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "31"},
            "extra_info": {"split": "train", "index": 0, "id": "my-train-1", "problem": "What is 7 + 8 * 3?"},
        }
    ]
    entry = manifest["my-train"]
    assert (entry["rows"], entry["dropped"], entry["role"]) == (1, 4, "train")
    assert manifest["held"]["rows"] == 1
    for framework, digest in entry["sha256"].items():
        assert hashlib.sha256((out / framework / "my-train.parquet").read_bytes()).hexdigest() == digest
    reasons = dropped(out)
    assert reasons["my-train-0"] == "repeats held-0 (100%)"
    assert reasons["my-train-2"] == "repeats my-train-1 (100%)"
    assert reasons["my-train-3"] == "answer is ''"
    assert reasons["my-train-4"].startswith("answer: '\\\\frac{' is not read as mathematics")


def test_later_calls_know_the_evaluation_sets_of_earlier_ones(sets, tmp_path):
    out = tmp_path / "out"
    prepare_data(sets[1:], out)
    manifest = prepare_data(sets[:1], out)
    assert set(manifest) == {"held", "my-train"}
    assert [r["id"] for r in rows(out, "trl", "my-train")] == ["my-train-1"]
    dropped = (out / "dropped.jsonl").read_text()
    prepare_data(sets[:1], out, overwrite=True)
    assert (out / "dropped.jsonl").read_text() == dropped


def test_a_set_that_is_there_is_written_again_only_if_asked(sets, tmp_path):
    out = tmp_path / "out"
    prepare_data(sets, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    Path(sets[1]).unlink()  # refused before anything is loaded
    with pytest.raises(ValueError, match=r"out already holds held: .*--overwrite"):
        prepare_data([sets[1], "multiplication"], out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    write(Path(sets[1]), [{"problem": "What is 2+2?", "answer": 4}])
    assert prepare_data(sets[1:], out, overwrite=True).keys() == {"held", "my-train"}
    assert rows(out, "trl", "held")[0]["answer"] == "4"


GOLDS = ["4.5e33", "-1./3", "62.5%", "9 (apples)", "np.arcsin(10/13)", "9**9**9**9", "N=n", "2e-3"]


@pytest.mark.parametrize(
    ("role", "golds", "rows", "kept_bad"),
    [("train", None, 5, 0), ("eval", None, 8, 3), ("train", "keep", 8, 3), ("eval", "drop", 5, 0)],
)
def test_golds_that_cannot_be_graded_are_dropped_or_kept_and_listed(tmp_path, role, golds, rows, kept_bad):
    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    asked = zip(numbers, GOLDS, strict=True)
    path = write(tmp_path / "my.jsonl", [{"problem": f"What is {n}?", "answer": a} for n, a in asked])
    entry = prepare_data([path], tmp_path / "out", role=role, golds=golds)["my"]
    assert (entry["role"], entry["rows"], len(entry["unreadable golds"])) == (role, rows, kept_bad)
    bad = entry["unreadable golds"] or dropped(tmp_path / "out")
    assert list(bad) == ["my-5", "my-6", "my-7"]
    assert "9**9**9**9" in bad["my-5"]


def test_an_evaluation_set_that_an_earlier_training_set_repeats_is_refused(sets, tmp_path):
    out = tmp_path / "out"
    prepare_data([sets[0], "multiplication-train"], out, size=3)
    before = sorted(out.rglob("*"))
    with pytest.raises(
        ValueError, match=r"my-train, prepared earlier .* repeats 1 .*my-train-0 repeats held"
    ):
        prepare_data(sets[1:], out)
    assert sorted(out.rglob("*")) == before
    prepare_data(["multiplication"], out, size=3)
    assert prepare_data(sets, out, overwrite=True)["my-train"]["rows"] == 1


def test_the_packages_own_tasks(tmp_path):
    prepare_data(["multiplication"], tmp_path, size=3)
    multiplication = rows(tmp_path, "trl", "multiplication")[0]
    assert multiplication["prompt"].endswith("=")
    answer = multiplication["answer"]
    assert reward(["|" + answer], answer=[answer], data_source=["multiplication"]) == [1.0]
    row = rows(tmp_path, "verl", "multiplication")[0]
    assert compute_score(row["data_source"], "|1", row["reward_model"]["ground_truth"])["score"] == 0.0


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_set_is_made_with_the_defaults(tmp_path, name):
    entry = prepare_data([name], tmp_path)[name]
    assert entry["rows"] == len(rows(tmp_path, "trl", name)) > 0


def test_bad_input_is_refused_before_anything_is_written(sets, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="no set named"):
        prepare_data([], out)
    with pytest.raises(ValueError, match="same set twice"):
        prepare_data([sets[0], sets[0]], out)
    with pytest.raises(ValueError, match="belongs to one repository"):
        prepare_data(sets, out, revision="v1")
    with pytest.raises(ValueError, match="multiplication: size = 0 must be at least 1"):
        prepare_data([sets[0], "multiplication"], out, size=0)
    with pytest.raises(ValueError, match="neither"):
        prepare_data([*sets, "nonsense"], out)
    assert not out.exists()


def test_a_set_of_which_nothing_is_left_is_refused(sets, tmp_path):
    copy = write(tmp_path / "copy-train.jsonl", [{"problem": "What is 1+1?", "answer": "2"}])
    with pytest.raises(ValueError, match=r"copy-train: nothing left.*repeats held-0"):
        prepare_data([sets[1], copy], tmp_path / "out")
    assert not (tmp_path / "out").exists()  # nor the other set


def test_the_real_files_and_a_leak_among_them(real_data, tmp_path):
    names = ("aime24", "aime25", "amc23", "gsm8k_test")
    manifest = prepare_data([str(real_data / f"{n}.jsonl") for n in names], tmp_path / "out")
    assert [manifest[n]["rows"] for n in names] == [30, 30, 40, 1319]
    # The same problems as training data: every one of the 30 leaks, and none of GSM8K's does.
    leaky = tmp_path / "mixed-train.jsonl"
    gsm8k = (real_data / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:50]
    text = (real_data / "aime24.jsonl").read_text(encoding="utf-8") + "\n".join(gsm8k)
    leaky.write_text(text.replace("Find", "find"), encoding="utf-8")
    held_out = [str(real_data / f"{name}.jsonl") for name in names[:3]]
    mixed = prepare_data([str(leaky), *held_out], tmp_path / "leak")["mixed-train"]
    assert (mixed["rows"], mixed["dropped"]) == (50, 30)


@pytest.mark.slow
def test_verls_own_dataset_reads_what_is_written(sets, tmp_path):
    needs("verl")
    from omegaconf import OmegaConf
    from verl.utils.dataset import rl_dataset

    import byte_model

    prepare_data(sets[1:], tmp_path)
    config = OmegaConf.create({"max_prompt_length": 512, "cache_dir": str(tmp_path / "cache")})
    file = str(tmp_path / "verl" / "held.parquet")
    data = rl_dataset.RLHFDataset(file, tokenizer=byte_model.tokenizer(), config=config)
    assert len(data) == 1
    assert data[0]["reward_model"]["ground_truth"] == "2"
    assert data[0]["data_source"] == "held"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("manifest.json", '{"held": {"role": "exam"}}', r"manifest.json: held.role: Input should be 'train'"),
        ("dropped.jsonl", '{"set": "a", "id": "1"}\n', r"dropped.jsonl, line 1: reason: Field required"),
    ],
)
def test_a_damaged_file_of_an_earlier_call_is_named(sets, tmp_path, file, content, message):
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        prepare_data(sets, tmp_path)


@pytest.mark.parametrize("form", ["verl", "trl"])
def test_a_prepared_file_of_which_a_byte_has_changed_is_refused(sets, tmp_path, form):
    from bandpo_lab.evals.dataset_io import read_rows

    prepare_data(sets, tmp_path / "out")
    file = tmp_path / "out" / form / "held.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        ValueError,
        match=r"held\.parquet has changed since it was prepared \(its digest is not the one in manifest\.json",
    ):
        read_rows(file)
