"""The checklist of a node: what would end a run is found, and a sound node is ready."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bandpo_lab.cli.app import app
from bandpo_lab.cluster import node
from bandpo_lab.cluster.cost import Checkpoints
from bandpo_lab.cluster.node import Gpu, Node, check_node, examine_node, report, unseen_plugin
from helpers.sources import SOURCES

LOCKED = {"torch": "2.11.0", "verl": "0.9.1", "ray": "2.60.0", "vllm": "0.24.0", "transformers": "5.9.0"}
SOUND = Node(
    python="3.12.4",
    libc=(2, 35),
    gpus=8 * (Gpu("NVIDIA H100 80GB HBM3", 79.6, 0.0, "Default", "580.65.06"),),
    driver_cuda="13.0",
    torch_cuda="13.0",
    torch_gpus=8,
    packages=LOCKED | {"torch": "2.11.0+cu130", "flash-attn": "2.8.3"},
    locked=LOCKED,
    nvcc="/usr/local/cuda/bin/nvcc",
    cores=96,
    memory=1000.0,
    shared_memory=64.0,
    open_files=1_048_576,
    free_space={"checkpoints": 2000.0, "Ray's logs and spilled objects": 200.0},
    address="10.0.0.1",
    infiniband=("mlx5_0",),
    ray_folder="/tmp/ray",  # noqa: S108
)


KEPT = Checkpoints(3, 37.0)


def states(changed: Node, **options) -> dict[str, tuple[str, str]]:
    rows = check_node(changed, **({"gpus": 8} | options))
    return {row.topic: (row.state, row.consequence) for row in rows if row.state != "ok"}


def test_a_sound_node_is_ready():
    text, ready = report(SOUND, gpus=8, nodes=2, checkpoints=KEPT)
    assert ready
    assert "; 3 checkpoints of 37 GB are kept, 111 GB in all" in text
    assert "READY" in text
    # What nobody can say of an idle node is listed all the same.
    assert list(states(SOUND, nodes=2)) == ["Megatron"]
    assert "Not to be seen on an idle node:" in text


@pytest.mark.parametrize(
    ("changes", "topic", "words"),
    [
        ({"gpus": ()}, "GPUs", "Nothing trains here"),
        ({"gpus": SOUND.gpus[:4]}, "GPUs", "trainer.n_gpus_per_node=4"),
        ({"torch_gpus": 0}, "GPUs", "the build of torch"),
        ({"driver_cuda": "12.4"}, "driver", "torch.cuda.is_available"),
        ({"torch_cuda": None}, "driver", "trains on no GPU"),
        ({"gpus": 8 * (replace(SOUND.gpus[0], compute_mode="Exclusive_Process"),)}, "use of GPUs", "-c DEFAULT"),
        ({"gpus": 8 * (replace(SOUND.gpus[0], used=40.0),)}, "use of GPUs", "Free memory on device"),
        ({"packages": {"torch": "2.11.0"}}, "packages", "vllm is missing (lock: 0.24.0)"),
        ({"plugin_problem": "it is not there: install bandpo"}, "plug-in", "install bandpo"),
        ({"libc": (2, 17)}, "packages", "glibc 2.28"),
        ({"shared_memory": 0.0625}, "shared memory", "--shm-size"),
        ({"free_space": {"checkpoints": 50.0}}, "disks", "Too little: name another folder"),
        ({"ray_folder": "/" + "long/" * 10}, "Ray", "107 bytes"),
        ({"environment": {"http_proxy": "http://p:3128", "no_proxy": "example.org"}}, "proxy", "no_proxy"),
        ({"address": "127.0.1.1"}, "network", "RAY_HEAD_IP"),
    ],
)  # fmt: skip
def test_what_would_end_a_run_is_named_with_what_to_do(changes, topic, words):
    found = states(replace(SOUND, **changes), nodes=2, checkpoints=KEPT)
    assert found[topic][0] == "stop"
    assert words in found[topic][1]
    text, ready = report(replace(SOUND, **changes), 8, 2, KEPT)
    assert not ready
    assert text.splitlines()[-1] == f"STOPPED BY {topic}"


@pytest.mark.parametrize(
    ("changes", "topic"),
    [
        ({"packages": {**SOUND.packages, "vllm": "0.23.0"}}, "packages"),
        ({"python": "3.11.9"}, "packages"),
        ({"packages": LOCKED}, "FlashAttention"),
        ({"nvcc": ""}, "CUDA compiler"),
        ({"cores": 8}, "processors"),
        ({"open_files": 1024}, "open files"),
        ({"ray_running": True}, "Ray"),
        ({"infiniband": ()}, "network"),
    ],
)
def test_what_slows_a_run_down_does_not_stop_it(changes, topic):
    changed = replace(SOUND, **changes)
    assert states(changed, nodes=2)[topic][0] == "look"
    assert report(changed, 8, 2)[1]


MODULE = "bandpo.integrations.verl"
POINT = EntryPoint("bandpo", MODULE, "verl.plugins")
OTHER = EntryPoint("bandpo", "bandpo_fork.verl", "verl.plugins")


@pytest.mark.parametrize(
    ("points", "variables", "words"),
    [
        ((POINT,), {}, None),
        ((POINT,), {"VERL_USE_EXTERNAL_PLUGINS": "AUTO"}, None),
        ((POINT, OTHER), {"VERL_USE_EXTERNAL_PLUGINS": "other, bandpo"}, None),
        ((), {"VERL_USE_EXTERNAL_MODULES": f"mine,{MODULE}"}, None),
        ((POINT,), {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": MODULE}, None),
        ((), {}, f"export VERL_USE_EXTERNAL_MODULES={MODULE}"),
        ((OTHER,), {}, "pip install --no-deps ./packages/bandpo"),
        ((), {"VERL_USE_EXTERNAL_MODULES": "mine"}, "no installed package"),
        ((POINT,), {"VERL_USE_EXTERNAL_PLUGINS": "none"}, "VERL_USE_EXTERNAL_PLUGINS=none keeps verl from"),
        ((POINT,), {"VERL_USE_EXTERNAL_PLUGINS": "other"}, "unset it, or write auto"),
    ],
)
def test_a_plug_in_that_verl_does_not_see_is_said_with_the_fix(points, variables, words, monkeypatch):
    for name in ("VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(node, "entry_points", lambda group: [p for p in points if p.group == group])
    problem = unseen_plugin()
    assert problem is None if words is None else words in problem


def test_sources_on_pythonpath_alone_are_not_seen_by_verl(tmp_path):
    """In a process without the metadata of bandpo, as where only its sources are on the path."""
    hide = tmp_path / "sitecustomize.py"
    hide.write_text(
        "import importlib.metadata as m\n"
        "found = m.distributions\n"
        "m.distributions = lambda **k: (d for d in found(**k) if (d.name or '').lower() != 'bandpo')\n"
    )
    code = "from bandpo_lab.cluster.node import unseen_plugin; print(unseen_plugin())"
    path = os.pathsep.join([str(tmp_path), *map(str, SOURCES)])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VERL_USE")} | {"PYTHONPATH": path}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "verl does not see bandpo's plug-in" in process.stdout, process.stderr


NVIDIA_SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) for _ in 1 2; do echo "NVIDIA H200, 143771, 1024, Exclusive_Process, 575.57.08"; done ;;
  *) echo '| NVIDIA-SMI 575.57.08    Driver Version: 575.57.08    CUDA Version: 12.9     |' ;;
esac
"""


def test_the_machine_is_read(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    read = examine_node(tmp_path / "runs")
    assert read.gpus == 2 * (Gpu("NVIDIA H200", 143771 / 1024, 1.0, "Exclusive_Process", "575.57.08"),)
    assert read.driver_cuda == "12.9"
    assert read.environment["https_proxy"] == "http://proxy:3128"
    assert read.locked["verl"] == "0.9.1"
    assert read.memory > 0
    assert read.cores > 0
    assert read.free_space["checkpoints"] > 0


def test_the_estimate_for_the_authors_settings_says_of_which_data_its_steps_are(tmp_path):
    options = ["--model", "qwen2.5-3b-instruct", "--settings", "authors", "--output-dir", str(tmp_path)]
    found = CliRunner().invoke(app, ["preflight", *options])
    assert "The 769 steps are 10 epochs of the recommended data." in found.output


def test_a_machine_without_a_gpu_says_so_and_lists_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = CliRunner().invoke(
        app, ["preflight", "--model", "qwen2.5-3b-instruct", "--output-dir", str(tmp_path)]
    )
    assert found.exit_code == 1
    assert (
        "qwen2.5-3b-instruct: 108 s a step, 24 h for 769 steps, 194 GPU hours, $485 at $2.50" in found.output
    )
    assert "10 epochs of the recommended data" not in found.output
    assert "stop  GPUs: nvidia-smi shows none" in found.output
    assert "shared memory: /dev/shm has" in found.output
    assert "eight GPUs:" in found.output
    assert found.output.splitlines()[-1].startswith("STOPPED BY GPUs")
    with pytest.raises(ValueError, match=r"did you mean qwen2.5-7b"):
        CliRunner().invoke(app, ["preflight", "--model", "qwen2.5-3b"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--model says how much the checkpoints take"),
        (["--settings", "authors"], "--model says how much the checkpoints take"),
        (["--model", "qwen2.5-3b-instruct"], "3 checkpoints of 37 GB are kept, 112 GB in all"),
        (
            ["--model", "qwen2.5-3b-instruct", "--settings", "authors"],
            "77 checkpoints of 37 GB are kept, 2,864 GB in all",
        ),
        (
            ["--model", "deepseek-r1-distill-qwen-1.5b", "--settings", "authors"],
            "77 checkpoints of 22 GB are kept, 1,663 GB in all",
        ),
    ],
)
def test_the_checkpoints_are_those_that_the_settings_keep(options, words, monkeypatch):
    monkeypatch.setattr(node, "examine_node", lambda _: SOUND)
    found = CliRunner().invoke(app, ["preflight", *options])
    [line] = [line for line in found.output.splitlines() if "disks: " in line]
    assert line.endswith(
        f"2000 GiB free for checkpoints, 200 GiB free for Ray's logs and spilled objects; {words}"
    )
    # 2000 GiB are 2147 GB.
    assert line.startswith("stop" if "2,864" in words else "ok")
    assert found.exit_code == ("2,864" in words)


def test_the_lock_is_the_one_of_the_recipes():
    assert node.LOCK.is_file()
    assert Path(node.LOCK).parent.name == "recipes"
    assert set(node._locked_versions()) == set(node.PACKAGES)
