"""`bandpo-lab train` refuses prepared data that has changed, and weights that are pickles, before it begins."""

import shutil

import pytest
import torch

from helpers.frameworks import needs

needs("trl")
pytest.importorskip("math_verify")

from bandpo_lab.data.prepare import prepare_data
from bandpo_lab.tasks.multiplication import base_model_path
from bandpo_lab.training.arguments import parse_arguments
from bandpo_lab.training.train import check_prepared_data, run_training

OPTIONS = (
    "--reward_funcs",
    "bandpo_lab.evals.grading.reward",
    "--num_iterations",
    "2",
    "--report_to",
    "none",
    "--use_cpu",
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    lines = [f'{{"problem": "{k}+{k}?", "answer": "{2 * k}"}}\n' for k in range(1, 20)]
    (folder / "sums-train.jsonl").write_text("".join(lines))
    prepare_data([f"my-train={folder / 'sums-train.jsonl'}"], folder / "data")
    return folder / "data"


def yaml_of(folder, **part):
    lines = "".join(f"    {key}: {value}\n" for key, value in part.items())
    file = folder / "run.yaml"
    file.write_text("datasets:\n  - " + lines.lstrip() + "model_name_or_path: multiplication\n")
    return ("--config", str(file))


def named_data(folder, data):
    return ("--model_name_or_path", "multiplication", "--dataset_name", str(data / "trl"))


def files_in_yaml(folder, data):
    return yaml_of(folder, path="parquet", data_files=data / "trl" / "my-train.parquet")


def pattern_in_a_folder(folder, data):
    return yaml_of(folder, path="parquet", data_dir=data / "trl", data_files="'*.parquet'")


def files_by_split(folder, data):
    return yaml_of(folder, path="parquet", data_files=f"{{train: [{data / 'trl' / 'my-train.parquet'}]}}")


@pytest.mark.parametrize("name", [named_data, files_in_yaml, pattern_in_a_folder, files_by_split])
def test_a_changed_byte_of_prepared_data_is_refused_before_the_run_begins(name, prepared, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    output = tmp_path / "run"
    arguments = parse_arguments([*name(tmp_path, data), *OPTIONS, "--output_dir", str(output)])
    check_prepared_data(arguments)
    file = data / "trl" / "my-train.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"my-train\.parquet has changed since it was prepared"):
        run_training(arguments)
    assert not output.exists()


@pytest.mark.filterwarnings("ignore:each batch is used for one optimiser step:UserWarning")
def test_weights_that_are_a_pickle_are_not_loaded(tmp_path, monkeypatch):
    model = tmp_path / "model"
    shutil.copytree(base_model_path(), model)
    (model / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(2)}, model / "pytorch_model.bin")
    options = ("--model_name_or_path", str(model), "--dataset_name", "multiplication", *OPTIONS)
    loaded = []
    monkeypatch.setattr(torch, "load", lambda *arguments, **_: loaded.append(arguments))
    arguments = parse_arguments([*options, "--output_dir", str(tmp_path / "run")])
    with pytest.raises(OSError, match="safetensors"):
        run_training(arguments)
    assert loaded == []
