"""A recipe launched for real: a Ray cluster of two nodes on this machine, a submitted job, one that loses a worker."""

import contextlib
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from helpers.frameworks import needs

needs("verl")

import psutil

from bandpo_lab.rehearsal import files
from bandpo_lab.rehearsal.inputs import choose_prompts, write_model, write_rows
from bandpo_lab.rehearsal.run import environment
from bandpo_lab.rehearsal.shrink import PROMPTS, changes, compose
from helpers.ports import free_port
from helpers.sources import ROOT, SOURCES

RECIPES = ROOT / "packages/bandpo-lab/src/bandpo_lab/recipes"
NAMES = ["qwen2.5-3b-instruct", "band-kl"]


def end_ray(temp_dir: Path) -> None:
    """Kills every process of the Ray whose temporary folder this is, which its daemons' command lines name."""
    family: set[psutil.Process] = set()
    for process in psutil.process_iter(["cmdline"]):
        if str(temp_dir) in " ".join(process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                family |= {process, *process.children(recursive=True)}
    family -= {psutil.Process(), *psutil.Process().parents()}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=10)


@pytest.fixture
def cluster(tmp_path_factory):
    """Environment of a running cluster: two nodes with one logical GPU each, whose processes know the CPU platform."""
    if shutil.which("ray") is None:
        pytest.skip("the command `ray` is not on the PATH")
    folder = tmp_path_factory.mktemp("c")
    port, dashboard = free_port(), free_port()
    settings = environment(folder) | {
        files.RUN: "first",
        "RAY_PORT": port,
        "RAY_DASHBOARD_PORT": dashboard,
        "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_TMPDIR": str(folder / "ray"),
        "GPUS": "1",
        "CPUS": "6",
        "BANDPO_OUTPUT": str(folder / "runs"),
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
    }
    try:
        for node in (["head"], ["worker", f"127.0.0.1:{port}"]):
            start = {k: v for k, v in settings.items() if k != "RAY_ADDRESS"}
            subprocess.run([RECIPES / "cluster.sh", *node], env=start, check=True, timeout=120)
        yield folder, settings
    finally:
        end_ray(folder / "ray")


def small(folder: Path, steps: int) -> list[str]:
    """The rehearsal's changes, without its private Ray and on two nodes."""
    model, rule = NAMES
    recipe = [f"+paper/model={model}", f"+paper/rule={rule}", "+paper=recommended"]
    config = compose(recipe, RECIPES, "ppo_trainer")
    tokenizer = write_model(config.actor_rollout_ref.model.path, folder / "model")
    prompts = choose_prompts(["nowhere"], "prompt", tokenizer, 512, 4 * PROMPTS)
    for split in ("train", "val"):
        write_rows(prompts.rows, folder / f"{split}.parquet")
    (folder / files.ANSWERS).write_text("{}")
    made = changes(config, folder, steps)
    return [*(c.override for c in made if not c.key.startswith("ray_kwargs")), "trainer.nnodes=2"]


def submit(folder: Path, settings: dict[str, str], steps: int) -> subprocess.Popen:
    command = [str(RECIPES / "launch.sh"), "submit", *NAMES, *small(folder, steps)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=settings, **output)


@pytest.mark.exhaustive
def test_a_submitted_job_is_followed_to_its_end_and_a_lost_worker_is_reported(cluster):
    folder, settings = cluster
    with submit(folder, settings, steps=1) as job:
        output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output[-4000:]
    assert "step:1 " in output
    assert "succeeded" in output
    assert (folder / "checkpoints/global_step_1/actor/model_world_size_2_rank_1.pt").exists()

    shutil.rmtree(folder / "checkpoints")
    lines = []
    with submit(folder, settings, steps=1000) as job:
        late = threading.Timer(400, job.kill)
        late.start()
        for line in job.stdout:
            lines.append(line)
            if "step:1 " in line:
                running = psutil.process_iter(["cmdline"])
                workers = (p for p in running if "ray::WorkerDict" in str(p.info["cmdline"]))
                next(p for p in workers if p.environ().get(files.FOLDER) == str(folder)).kill()
        late.cancel()
    output = "".join(lines)
    assert job.returncode not in (0, None), output[-4000:]
    assert "ActorDiedError" in output or "died unexpectedly" in output
    assert "failed" in output.lower()
