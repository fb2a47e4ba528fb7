"""What a node has for a run of verl at full size, and what of it would end the run or slow it down.

`examine_node` reads the machine, `findings` judges what it read. Nothing is started, and no GPU is touched.
"""

from __future__ import annotations

import csv
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

LOCK = Path(__file__).with_name("recipes") / "gpu.txt"
"""The versions of the one environment for verl."""
PACKAGES = ("torch", "verl", "ray", "vllm", "transformers")
"""Packages whose version has to be the lock's."""
OF_MEGATRON = ("megatron-core", "transformer-engine", "apex", "mbridge")
PORTS = {6379: "Ray", 8265: "Ray's dashboard and jobs"}
SHARED_MEMORY = 8.0
"""GiB of /dev/shm that NCCL, vLLM's workers and Ray's object store are given here at least; a container has 0.06."""
OPEN_FILES = 8192
"""Open files below which Ray warns."""
SOCKET_PATH, RAY_SOCKET = 107, 64
"""Bytes that the path of a socket may have, and those of Ray's own part of it."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as nvidia-smi describes it; memory in GiB."""

    name: str
    memory: float
    used: float
    compute_mode: str
    driver: str


@dataclass(frozen=True)
class Node:
    """What was read on a machine; sizes in GiB."""

    python: str = ""
    libc: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    driver_cuda: str = ""
    """The newest CUDA that the driver runs; empty without nvidia-smi."""
    links: str = ""
    """How the first two GPUs are joined, such as NV18."""
    torch_cuda: str | None = None
    """The CUDA that torch was built for; None for a build without."""
    torch_sees: int = 0
    packages: Mapping[str, str] = field(default_factory=dict)
    locked: Mapping[str, str] = field(default_factory=dict)
    nvcc: str = ""
    cores: int = 0
    memory: float = 0.0
    shared_memory: float = 0.0
    open_files: int = 0
    free_space: Mapping[str, float] = field(default_factory=dict)
    address: str = ""
    infiniband: tuple[str, ...] = ()
    busy_ports: tuple[int, ...] = ()
    ray_folder: str = ""
    ray_running: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One line of the checklist.

    Attributes:
        topic: What it is about.
        state: ``stop`` for what would end the run, ``look`` for what may slow it down or is to be known.
        evidence: What was read.
        consequence: What the run meets, and what to do; empty where the state is ``ok``.
    """

    topic: str
    state: Literal["ok", "look", "stop"]
    evidence: str
    consequence: str = ""


def examine_node(output: Path) -> Node:
    """Return what this machine has.

    Args:
        output: The folder for checkpoints, whose disk is measured.
    """
    gpus, driver_cuda, links = _nvidia_smi()
    torch_cuda, torch_sees = _torch()
    ray_folder = os.environ.get("RAY_TMPDIR") or str(Path(os.environ.get("TMPDIR", "/tmp")) / "ray")  # noqa: S108
    disks = {"checkpoints": output, "Ray's logs and spilled objects": Path(ray_folder)}
    names = (
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_SOCKET_IFNAME",
        "RAY_ADDRESS",
    )
    environment = {name: os.environ.get(name) or os.environ.get(name.upper(), "") for name in names}
    return Node(
        python=platform.python_version(),
        libc=_libc(),
        gpus=gpus,
        driver_cuda=driver_cuda,
        links=links,
        torch_cuda=torch_cuda,
        torch_sees=torch_sees,
        packages={
            name: installed
            for name in (*PACKAGES, "flash-attn", *OF_MEGATRON)
            if (installed := _version(name))
        },
        locked=_locked(),
        nvcc=shutil.which("nvcc") or "",
        cores=len(os.sched_getaffinity(0)),
        memory=_memory(),
        shared_memory=shutil.disk_usage("/dev/shm").total / 2**30 if Path("/dev/shm").is_dir() else 0.0,  # noqa: S108
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        free_space={name: _free(folder) for name, folder in disks.items()},
        address=_address(),
        infiniband=tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
        busy_ports=tuple(port for port in PORTS if _is_busy(port)),
        ray_folder=ray_folder,
        ray_running=(Path(ray_folder) / "ray_current_cluster").exists(),
        environment={name: value for name, value in environment.items() if value},
    )


def _nvidia_smi() -> tuple[tuple[Gpu, ...], str, str]:
    """Return the GPUs, the driver's CUDA and the link between the first two; empty without nvidia-smi or a GPU."""
    fields = "name,memory.total,memory.used,compute_mode,driver_version"
    table = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    gpus = []
    for row in csv.reader(table.splitlines(), skipinitialspace=True):
        if len(row) == 5:
            name, total, used, mode, driver = row
            gpus.append(Gpu(name, float(total) / 1024, float(used) / 1024, mode, driver))
    cuda = re.search(r"CUDA Version: *([\d.]+)", _output("nvidia-smi"))
    link = (
        re.search(r"^GPU0\s+X\s+(\S+)", _output("nvidia-smi", "topo", "-m"), re.M) if len(gpus) > 1 else None
    )
    return tuple(gpus), cuda[1] if cuda else "", link[1] if link else ""


def _output(*command: str) -> str:
    """Return what a command prints; nothing if it is not here or fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout if run.returncode == 0 else ""


def _torch() -> tuple[str | None, int]:
    """Return the CUDA that torch was built for, and how many GPUs it sees."""
    try:
        import torch
    except ModuleNotFoundError:
        return None, 0
    return torch.version.cuda, torch.cuda.device_count() if torch.version.cuda else 0


def _libc() -> tuple[int, int] | None:
    name, text = platform.libc_ver()
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return (int(numbers[1]), int(numbers[2])) if name == "glibc" and numbers else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _locked() -> dict[str, str]:
    lines = (line.split(" ")[0].split("==") for line in LOCK.read_text(encoding="utf-8").splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2 and line[0] in PACKAGES}


def _memory() -> float:
    """Return the memory of the machine, or what the container may use of it."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if file.is_file() and (text := file.read_text(encoding="utf-8").strip()).isdecimal():
            sizes.append(int(text))
    return min(sizes) / 2**30


def _free(folder: Path) -> float:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free / 2**30


def _address() -> str:
    """Return the IPv4 address to which this machine's own name leads; empty if to none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _is_busy(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def findings(node: Node, gpus: int, nodes: int = 1, checkpoints: float = 0.0) -> list[Finding]:
    """Return the checklist for a run.

    Args:
        node: What `examine_node` read.
        gpus: GPUs that the run wants on each node.
        nodes: Nodes of the run.
        checkpoints: GB that the checkpoints take which are kept.
    """
    return [
        _of_gpus(node, gpus),
        _of_driver(node),
        *_of_use(node),
        *([_of_links(node)] if gpus > 1 else []),
        _of_packages(node),
        _of_attention(node),
        _of_compiler(node),
        _of_megatron(node),
        _of_processors(node, gpus),
        _of_shared_memory(node),
        _of_open_files(node),
        _of_disks(node, checkpoints),
        _of_ray(node),
        _of_proxy(node),
        *([_of_network(node)] if nodes > 1 else []),
    ]


def _of_gpus(node: Node, wanted: int) -> Finding:
    here = node.gpus
    described = ", ".join(f"{gpu.name} with {gpu.memory:.0f} GiB" for gpu in dict.fromkeys(here))
    visible = node.environment.get("CUDA_VISIBLE_DEVICES", "")
    evidence = f"{len(here)}: {described}" if here else "nvidia-smi shows none"
    if visible:
        evidence += f"; CUDA_VISIBLE_DEVICES={visible}"
    if not here:
        return Finding(
            "GPUs",
            "stop",
            evidence,
            "Nothing trains here. Rehearsals do; the rest of this list is of this machine",
        )
    if len(here) < wanted:
        return Finding(
            "GPUs", "stop", evidence, f"verl waits for {wanted}: set trainer.n_gpus_per_node={len(here)}"
        )
    if node.torch_sees < wanted:
        return Finding(
            "GPUs",
            "stop",
            f"{evidence}; torch sees {node.torch_sees}",
            "See the driver and the build of torch below",
        )
    if min(gpu.memory for gpu in here) < 79:
        return Finding(
            "GPUs",
            "look",
            evidence,
            "The recommended recipes are meant for 80 GB: try bandpo-lab run verl --one-step first",
        )
    return Finding("GPUs", "ok", evidence)


def _of_driver(node: Node) -> Finding:
    built = f"torch {node.packages.get('torch', 'is not installed')}"
    built += f" for CUDA {node.torch_cuda}" if node.torch_cuda else " without CUDA"
    driver = f"driver {node.gpus[0].driver} for CUDA {node.driver_cuda}" if node.gpus else "no driver"
    evidence = f"{driver}; {built}"
    if node.torch_cuda is None:
        return Finding(
            "driver", "stop", evidence, "This torch trains on no GPU: install the environment for verl"
        )
    if node.gpus and int(node.driver_cuda.split(".")[0] or 0) < int(node.torch_cuda.split(".")[0]):
        return Finding(
            "driver",
            "stop",
            evidence,
            "torch.cuda.is_available() is False. A newer driver needs root; without it, install a build of torch for "
            "the driver's CUDA",
        )
    return Finding("driver", "ok", evidence)


def _of_use(node: Node) -> list[Finding]:
    """Judge whether the GPUs are free for the two processes that verl puts on each."""
    if not node.gpus:
        return []
    modes = {gpu.compute_mode for gpu in node.gpus}
    most = max(gpu.used for gpu in node.gpus)
    evidence = f"compute mode {', '.join(sorted(modes))}; up to {most:.1f} GiB in use"
    if modes != {"Default"}:
        return [
            Finding(
                "use of GPUs",
                "stop",
                evidence,
                "The trainer and vLLM share each GPU, and this mode lets one process in: as root, "
                "nvidia-smi -c DEFAULT",
            )
        ]
    if most > 1:
        return [
            Finding(
                "use of GPUs",
                "stop",
                evidence,
                "vLLM ends with 'Free memory on device … is less than desired GPU memory utilization': end what is "
                "there (nvidia-smi)",
            )
        ]
    return [Finding("use of GPUs", "ok", evidence)]


def _of_links(node: Node) -> Finding:
    if not node.links:
        return Finding("links", "look", "not known", "nvidia-smi topo -m tells how the GPUs are joined")
    if node.links.startswith("NV"):
        return Finding("links", "ok", f"{node.links} between the first two GPUs")
    return Finding(
        "links",
        "look",
        f"{node.links} between the first two GPUs, no NVLink",
        "FSDP gathers weights over PCIe, which takes longer: with more tokens in a micro-batch it does so less often, "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )


def _of_packages(node: Node) -> Finding:
    differences = []
    for name in PACKAGES:
        here, locked = node.packages.get(name), node.locked.get(name)
        if here is None:
            differences.append(f"{name} is missing (lock: {locked})")
        elif locked and here.split("+")[0] != locked:
            differences.append(f"{name} {here} (lock: {locked})")
    evidence = ", ".join(f"{name} {node.packages[name]}" for name in PACKAGES if name in node.packages)
    evidence = f"Python {node.python}; {evidence}"
    absent = [name for name in PACKAGES if name not in node.packages]
    advice = "docs/install.md has the environment for verl"
    if absent:
        return Finding("packages", "stop", evidence, f"{'; '.join(differences)}: {advice}")
    if node.libc is not None and node.libc < (2, 28):
        return Finding(
            "packages",
            "stop",
            f"{evidence}; glibc {node.libc[0]}.{node.libc[1]}",
            "The wheels need glibc 2.28",
        )
    if differences:
        return Finding("packages", "look", evidence, f"{'; '.join(differences)}: {advice}")
    if not node.python.startswith("3.12."):
        return Finding("packages", "look", evidence, f"The lock is for Python 3.12: {advice}")
    return Finding("packages", "ok", evidence)


def _of_attention(node: Node) -> Finding:
    if "flash-attn" in node.packages:
        return Finding("FlashAttention", "ok", f"flash-attn {node.packages['flash-attn']}")
    return Finding(
        "FlashAttention",
        "look",
        "flash-attn is not installed",
        "Add +actor_rollout_ref.model.override_config.attn_implementation=sdpa, which is slower and allows no sequence "
        "parallelism, or install a wheel",
    )


def _of_compiler(node: Node) -> Finding:
    if node.nvcc:
        return Finding("CUDA compiler", "ok", node.nvcc)
    return Finding(
        "CUDA compiler",
        "look",
        "no nvcc on the PATH",
        "The wheels bring CUDA's libraries, without root. Only flash-attn from source and kernels that are compiled at "
        "run time need a compiler; NVIDIA's runfile installs it into a "
        "folder of yours: --toolkit --toolkitpath=FOLDER",
    )


def _of_megatron(node: Node) -> Finding:
    here = [f"{name} {node.packages[name]}" for name in OF_MEGATRON if name in node.packages]
    missing = [name for name in OF_MEGATRON if name not in node.packages]
    evidence = f"{', '.join(here) or 'none'} of {', '.join(OF_MEGATRON)}"
    consequence = (
        "For actor_rollout_ref.actor.strategy=megatron alone, which no recipe uses and bandpo did not run. Its loss is "
        "the same function; "
    )
    consequence += (
        f"without {missing[0]} verl warns 'megatron engine is not available' and leaves the engine out"
        if missing
        else "look at the gradient check of the first step"
    )
    return Finding("Megatron", "look", evidence, consequence)


def _of_processors(node: Node, gpus: int) -> Finding:
    evidence = f"{node.cores} cores, {node.memory:.0f} GiB"
    # A trainer and a rollout server for each GPU; by verl's defaults 8 agents and 8 workers for the reward.
    wanted = 2 * gpus + 16
    if node.cores < wanted:
        return Finding(
            "processors",
            "look",
            evidence,
            f"verl starts {wanted} processes: fewer cores make the reward wait, and Ray queues what it has no core "
            "for; lower actor_rollout_ref.rollout.agent.num_workers and reward.num_workers",
        )
    return Finding("processors", "ok", evidence)


def _of_shared_memory(node: Node) -> Finding:
    evidence = f"/dev/shm has {node.shared_memory:.1f} GiB"  # noqa: S108
    if node.shared_memory < SHARED_MEMORY:
        return Finding(
            "shared memory",
            "stop",
            evidence,
            "NCCL ends with 'unhandled system error' or a bus error, and Ray spills to the disk: start the container "
            "with --shm-size=64g or --ipc=host",
        )
    return Finding("shared memory", "ok", evidence)


def _of_open_files(node: Node) -> Finding:
    if node.open_files < OPEN_FILES and node.open_files >= 0:
        return Finding(
            "open files",
            "look",
            f"ulimit -n is {node.open_files}",
            f"Ray warns below {OPEN_FILES}: ulimit -n 65536",
        )
    return Finding("open files", "ok", f"ulimit -n is {node.open_files}")


def _of_disks(node: Node, checkpoints: float) -> Finding:
    evidence = ", ".join(f"{free:.0f} GiB free for {name}" for name, free in node.free_space.items())
    free = node.free_space.get("checkpoints", 0.0)
    if checkpoints and free * 2**30 < checkpoints * 1e9:
        return Finding(
            "disks",
            "stop",
            evidence,
            f"The checkpoints that are kept take {checkpoints:.0f} GB: name another folder",
        )
    if any(free < 20 for free in node.free_space.values()):
        return Finding(
            "disks", "look", evidence, "Ray warns from 95 % on and then refuses objects: RAY_TMPDIR=FOLDER"
        )
    return Finding("disks", "ok", evidence)


def _of_ray(node: Node) -> Finding:
    busy = [f"{port} ({PORTS[port]})" for port in node.busy_ports]
    ports = f"in use: {', '.join(busy)}" if busy else "its ports are free"
    evidence = f"its folder is {node.ray_folder}; {ports}"
    if len(node.ray_folder.encode()) + RAY_SOCKET > SOCKET_PATH:
        return Finding(
            "Ray", "stop", evidence, f"A path of a socket may have {SOCKET_PATH} bytes: RAY_TMPDIR=/tmp/r"
        )
    if node.ray_running or busy:
        return Finding(
            "Ray",
            "look",
            evidence,
            "A Ray runs here, or has left its address: a run joins it. recipes/cluster.sh stop ends one of yours",
        )
    return Finding("Ray", "ok", evidence)


def _of_proxy(node: Node) -> Finding:
    proxies = [name for name in ("http_proxy", "https_proxy") if name in node.environment]
    excluded = node.environment.get("no_proxy", "")
    evidence = f"{', '.join(proxies) or 'none'}; no_proxy={excluded}" if proxies else "none"
    if proxies and "127.0.0.1" not in excluded:
        return Finding(
            "proxy",
            "stop",
            evidence,
            "verl asks its own vLLM servers by HTTP, and the proxy answers instead: add 127.0.0.1, localhost and the "
            "nodes' addresses to no_proxy",
        )
    return Finding("proxy", "ok", evidence)


def _of_network(node: Node) -> Finding:
    fabric = ", ".join(node.infiniband) or "no InfiniBand"
    evidence = f"this machine's name leads to {node.address or 'no address'}; {fabric}"
    if not node.address or node.address.startswith("127."):
        return Finding(
            "network",
            "stop",
            evidence,
            "The other nodes are told an address that leads to themselves: RAY_HEAD_IP=ADDRESS for slurm.sbatch, "
            "ray start --node-ip-address elsewhere",
        )
    if not node.infiniband and "NCCL_SOCKET_IFNAME" not in node.environment:
        return Finding(
            "network",
            "look",
            evidence,
            "NCCL takes the first interface that it finds, often a container's: NCCL_SOCKET_IFNAME=eth0",
        )
    return Finding("network", "ok", evidence)


UNSEEN = (
    (
        "vLLM",
        "Its first start compiles kernels and captures graphs, and prints little. Where it fails, its own error stands "
        "above 'Engine core initialization failed'; actor_rollout_ref.rollout.enforce_eager=true leaves out both",
    ),
    (
        "vLLM",
        "Its probabilities differ from the trainer's, in bfloat16 more than in a rehearsal. "
        "training/rollout_probs_diff_mean says by how much, and is to stay as it is in step 1: it grows where weights "
        "do not arrive",
    ),
    (
        "eight GPUs",
        "NCCL starts when the model is spread over them. If the log stands still there: NCCL_DEBUG=INFO tells which "
        "way it took, and NCCL_P2P_DISABLE=1 leaves out the direct one",
    ),
    (
        "eight GPUs",
        "Memory is at its most in the update of the longest responses, not in step 1: bandpo-lab run verl --one-step "
        "makes every response as long as it may get",
    ),
    (
        "eight GPUs",
        "timing_s/gen ends with the longest response of all GPUs: the others wait",
    ),
    (
        "two nodes",
        "Both need the same environment and the same paths for --data and --output-dir: each node writes its part of a "
        "checkpoint, and one that writes elsewhere makes the resume fail",
    ),
    (
        "Megatron",
        "verl's settings for it are another file (--config-name ppo_megatron_trainer), into which the recipes do not "
        "compose; a checkpoint is merged with --backend megatron",
    ),
)
"""What the first steps at full size meet that no check on an idle node can see."""


def report(node: Node, gpus: int, nodes: int = 1, checkpoints: float = 0.0) -> tuple[str, bool]:
    """Return the checklist as text, and whether nothing in it would end the run."""
    rows = findings(node, gpus, nodes, checkpoints)
    lines = []
    for row in rows:
        lines.append(f"{row.state:4}  {row.topic}: {row.evidence}")
        if row.consequence:
            lines.append(f"      {row.consequence}")
    lines += ["", "Not to be seen on an idle node:"]
    lines += [f"      {topic}: {text}" for topic, text in UNSEEN]
    stops = [row.topic for row in rows if row.state == "stop"]
    lines += ["", f"STOPPED BY {', '.join(stops)}" if stops else "READY, as far as an idle node shows"]
    return "\n".join(lines), not stops
