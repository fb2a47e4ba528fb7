"""Check whether a node can run verl at full size.

`examine_node` reads the properties of the machine, and `check_node` finds problems in them. No process is started on a
GPU.
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
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Literal

from bandpo_lab.cluster.cost import Checkpoints

LOCK = Path(__file__).parents[1] / "recipes" / "gpu.txt"
"""The lock file of the environment for verl."""
PACKAGES = ("torch", "verl", "ray", "vllm", "transformers")
"""The packages whose versions are compared with the lock file."""
MEGATRON_PACKAGES = ("megatron-core", "transformer-engine", "apex", "mbridge")
"""The packages that verl's Megatron engine needs."""
PLUGIN = "bandpo.integrations.verl"
"""The module of bandpo that verl loads as a plug-in, by an entry point of the package or by `EXTERNAL_MODULES`."""
EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"
"""The environment variable with modules that each process of verl imports, separated by commas."""
EXTERNAL_PLUGINS = "VERL_USE_EXTERNAL_PLUGINS"
"""The environment variable with the names of the plug-ins that verl loads: ``auto`` for all, ``none``, or a list."""
SHARED_MEMORY = 8.0
"""The smallest /dev/shm for NCCL, vLLM's workers and Ray's object store, in GiB; a container has 0.06 by default."""
OPEN_FILES = 8192
"""The limit of open files below which Ray warns."""
SOCKET_PATH = 107
"""The longest path of a Unix socket, in bytes."""
RAY_SOCKET = 64
"""The length of the part of a socket's path that Ray appends to its folder, in bytes."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, as nvidia-smi describes it; memory in GiB."""

    name: str
    memory: float
    used: float
    compute_mode: str
    driver: str


@dataclass(frozen=True)
class Node:
    """The properties of a machine; sizes in GiB."""

    python: str = ""
    libc: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    driver_cuda: str = ""
    """The newest version of CUDA that the driver supports; empty without nvidia-smi."""
    torch_cuda: str | None = None
    """The version of CUDA that torch was built for; None for a build without CUDA."""
    torch_gpus: int = 0
    """The number of GPUs that torch can use."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """The installed versions."""
    locked: Mapping[str, str] = field(default_factory=dict)
    """The versions in the lock file."""
    plugin_problem: str = ""
    """The reason why verl would not load bandpo's plug-in; empty if it would."""
    nvcc: str = ""
    """The path of the CUDA compiler; empty if there is none."""
    cores: int = 0
    memory: float = 0.0
    shared_memory: float = 0.0
    open_files: int = 0
    """The limit of open files."""
    free_space: Mapping[str, float] = field(default_factory=dict)
    """The free space by the use of the folder."""
    address: str = ""
    """The IPv4 address of this machine's name."""
    infiniband: tuple[str, ...] = ()
    ray_folder: str = ""
    ray_running: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """The environment variables that affect a run."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: The subject of the check.
        state: ``stop`` for a problem that would end the run, ``look`` for one that may slow it down, else ``ok``.
        evidence: The properties that were checked.
        consequence: The effect on the run, and the advice; empty if the state is ``ok``.
    """

    topic: str
    state: Literal["ok", "look", "stop"]
    evidence: str
    consequence: str = ""


def examine_node(output: Path) -> Node:
    """Read the properties of this machine.

    Args:
        output: The folder for checkpoints, whose free space is read.
    """
    gpus, driver_cuda = _nvidia_smi()
    torch_cuda, torch_gpus = _torch()
    versions = {name: _version(name) for name in (*PACKAGES, "flash-attn", *MEGATRON_PACKAGES)}
    shared_memory = 0.0
    if Path("/dev/shm").is_dir():  # noqa: S108
        shared_memory = shutil.disk_usage("/dev/shm").total / 2**30  # noqa: S108
    ray_folder = os.environ.get("RAY_TMPDIR") or str(Path(os.environ.get("TMPDIR", "/tmp")) / "ray")  # noqa: S108
    # The folders whose free space is read, by their use.
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
        torch_cuda=torch_cuda,
        torch_gpus=torch_gpus,
        packages={name: version for name, version in versions.items() if version},
        locked=_locked_versions(),
        plugin_problem=unseen_plugin() or "",
        nvcc=shutil.which("nvcc") or "",
        cores=len(os.sched_getaffinity(0)),
        memory=_memory(),
        shared_memory=shared_memory,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        free_space={name: _free(folder) for name, folder in disks.items()},
        address=_address(),
        infiniband=tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
        ray_folder=ray_folder,
        ray_running=(Path(ray_folder) / "ray_current_cluster").exists(),
        environment={name: value for name, value in environment.items() if value},
    )


def unseen_plugin() -> str | None:
    """Return why verl would not load bandpo's plug-in in this environment, with the fix; None if verl would.

    A folder of sources on PYTHONPATH has no metadata, so verl finds no entry point in it. verl then meets bandpo late,
    when it builds the settings of a loss of bandpo's. No setting is checked before Ray starts, and a loss that is named
    by ``loss_mode`` alone is unknown.
    """
    modules = os.environ.get(EXTERNAL_MODULES, "").split(",")
    if PLUGIN in modules:
        return None
    install = (
        f"install bandpo (pip install --no-deps ./packages/bandpo), or export {EXTERNAL_MODULES}={PLUGIN}"
    )
    names = {point.name for point in entry_points(group="verl.plugins") if point.value == PLUGIN}
    if not names:
        return (
            f"verl does not see bandpo's plug-in: no installed package has an entry point of {PLUGIN}, and a folder of "
            f"sources on PYTHONPATH has none; {install}"
        )
    plugins = os.environ.get(EXTERNAL_PLUGINS, "auto").strip().lower()
    if plugins != "auto" and not names & {name.strip() for name in plugins.split(",")}:
        return (
            f"{EXTERNAL_PLUGINS}={plugins} keeps verl from loading bandpo's plug-in: unset it, or write auto"
        )
    return None


def _nvidia_smi() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs and the driver's version of CUDA; both are empty without nvidia-smi or a GPU."""
    fields = "name,memory.total,memory.used,compute_mode,driver_version"
    table = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    gpus = []
    for row in csv.reader(table.splitlines(), skipinitialspace=True):
        if len(row) == 5:
            name, total, used, mode, driver = row
            gpus.append(Gpu(name, float(total) / 1024, float(used) / 1024, mode, driver))
    cuda = re.search(r"CUDA Version: *([\d.]+)", _output("nvidia-smi"))
    return tuple(gpus), cuda[1] if cuda else ""


def _output(*command: str) -> str:
    """Return the output of a command; empty if it is not installed or fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout if run.returncode == 0 else ""


def _torch() -> tuple[str | None, int]:
    """Return the version of CUDA that torch was built for, and the number of GPUs that it can use."""
    try:
        import torch
    except ModuleNotFoundError:
        return None, 0
    return torch.version.cuda, torch.cuda.device_count() if torch.version.cuda else 0


def _libc() -> tuple[int, int] | None:
    """Return the version of glibc; None for another C library."""
    name, text = platform.libc_ver()
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return (int(numbers[1]), int(numbers[2])) if name == "glibc" and numbers else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _locked_versions() -> dict[str, str]:
    """Return the versions of `PACKAGES` in the lock file."""
    versions = {}
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        name, _, version = line.split(" ")[0].partition("==")
        if version and name in PACKAGES:
            versions[name] = version
    return versions


def _memory() -> float:
    """Return the memory of the machine, or the limit of the container if that is less, in GiB."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if file.is_file():
            text = file.read_text(encoding="utf-8").strip()
            if text.isdecimal():
                sizes.append(int(text))
    return min(sizes) / 2**30


def _free(folder: Path) -> float:
    """Return the free space for a folder that need not exist yet, in GiB."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free / 2**30


def _address() -> str:
    """Return the IPv4 address of this machine's name; empty if the name has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def check_node(
    node: Node, gpus: int, nodes: int = 1, checkpoints: Checkpoints | None = None
) -> list[Finding]:
    """Return the results of all checks for a run.

    Args:
        node: The properties of the node, from `examine_node`.
        gpus: The GPUs that the run needs on each node.
        nodes: The nodes of the run.
        checkpoints: The checkpoints that the run keeps; None if its model is not known.
    """
    return [
        _check_gpus(node, gpus),
        _check_driver(node),
        *_check_use(node),
        _check_packages(node),
        _check_plugin(node),
        _check_attention(node),
        _check_compiler(node),
        _check_megatron(node),
        _check_processors(node, gpus),
        _check_shared_memory(node),
        _check_open_files(node),
        _check_disks(node, checkpoints),
        _check_ray(node),
        _check_proxy(node),
        *([_check_network(node)] if nodes > 1 else []),
    ]


def _check_gpus(node: Node, count: int) -> Finding:
    gpus = node.gpus
    kinds = ", ".join(f"{gpu.name} with {gpu.memory:.0f} GiB" for gpu in dict.fromkeys(gpus))
    visible = node.environment.get("CUDA_VISIBLE_DEVICES", "")
    evidence = f"{len(gpus)}: {kinds}" if gpus else "nvidia-smi shows none"
    if visible:
        evidence += f"; CUDA_VISIBLE_DEVICES={visible}"
    if not gpus:
        return Finding(
            "GPUs",
            "stop",
            evidence,
            "Nothing trains here, but rehearsals run; the other checks are of this machine as well",
        )
    if len(gpus) < count:
        return Finding(
            "GPUs", "stop", evidence, f"verl waits for {count}: set trainer.n_gpus_per_node={len(gpus)}"
        )
    if node.torch_gpus < count:
        return Finding(
            "GPUs",
            "stop",
            f"{evidence}; torch sees {node.torch_gpus}",
            "See the driver and the build of torch below",
        )
    if min(gpu.memory for gpu in gpus) < 79:
        return Finding(
            "GPUs",
            "look",
            evidence,
            "The recommended recipes are meant for 80 GB: try bandpo-lab run verl --one-step first",
        )
    return Finding("GPUs", "ok", evidence)


def _check_driver(node: Node) -> Finding:
    torch = f"torch {node.packages.get('torch', 'is not installed')}"
    torch += f" for CUDA {node.torch_cuda}" if node.torch_cuda else " without CUDA"
    driver = f"driver {node.gpus[0].driver} for CUDA {node.driver_cuda}" if node.gpus else "no driver"
    evidence = f"{driver}; {torch}"
    if node.torch_cuda is None:
        return Finding(
            "driver", "stop", evidence, "This torch trains on no GPU: install the environment for verl"
        )
    if not node.gpus:
        return Finding("driver", "look", evidence, "The driver is checked on a node with a GPU")
    if int(node.driver_cuda.split(".")[0] or 0) < int(node.torch_cuda.split(".")[0]):
        return Finding(
            "driver",
            "stop",
            evidence,
            "torch.cuda.is_available() is False. A newer driver needs root; without it, install a build of torch for "
            "the driver's CUDA",
        )
    return Finding("driver", "ok", evidence)


def _check_use(node: Node) -> list[Finding]:
    """Check that the GPUs are free for the two processes that verl starts on each."""
    if not node.gpus:
        return []
    modes = {gpu.compute_mode for gpu in node.gpus}
    most_used = max(gpu.used for gpu in node.gpus)
    evidence = f"compute mode {', '.join(sorted(modes))}; up to {most_used:.1f} GiB in use"
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
    if most_used > 1:
        return [
            Finding(
                "use of GPUs",
                "stop",
                evidence,
                "vLLM ends with 'Free memory on device … is less than desired GPU memory utilization': end the "
                "processes on the GPUs (nvidia-smi lists them)",
            )
        ]
    return [Finding("use of GPUs", "ok", evidence)]


def _check_packages(node: Node) -> Finding:
    differences = []
    for name in PACKAGES:
        installed = node.packages.get(name)
        locked = node.locked.get(name)
        if installed is None:
            differences.append(f"{name} is missing (lock: {locked})")
        elif locked and installed.split("+")[0] != locked:
            differences.append(f"{name} {installed} (lock: {locked})")
    if not node.python.startswith("3.12."):
        differences.append(f"Python {node.python} (lock: 3.12)")
    versions = ", ".join(f"{name} {node.packages[name]}" for name in PACKAGES if name in node.packages)
    evidence = f"Python {node.python}; {versions}"
    absent = [name for name in PACKAGES if name not in node.packages]
    advice = "docs/install.md has the environment for verl"
    if absent:
        return Finding("packages", "stop", evidence, "\n".join([*differences, advice]))
    if node.libc is not None and node.libc < (2, 28):
        return Finding(
            "packages",
            "stop",
            f"{evidence}; glibc {node.libc[0]}.{node.libc[1]}",
            "The wheels need glibc 2.28",
        )
    if differences:
        return Finding("packages", "look", evidence, "\n".join([*differences, advice]))
    return Finding("packages", "ok", evidence)


def _check_plugin(node: Node) -> Finding:
    if node.plugin_problem:
        return Finding("plug-in", "stop", f"{PLUGIN} is not loaded by verl", node.plugin_problem)
    return Finding("plug-in", "ok", f"verl loads {PLUGIN}")


def _check_attention(node: Node) -> Finding:
    if "flash-attn" in node.packages:
        return Finding("FlashAttention", "ok", f"flash-attn {node.packages['flash-attn']}")
    return Finding(
        "FlashAttention",
        "look",
        "flash-attn is not installed",
        "A start with verl's default attention is refused without it. Add "
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa, which is slower and allows no sequence "
        "parallelism, or install a wheel",
    )


def _check_compiler(node: Node) -> Finding:
    if node.nvcc:
        return Finding("CUDA compiler", "ok", node.nvcc)
    return Finding(
        "CUDA compiler",
        "look",
        "no nvcc on the PATH",
        "The wheels contain CUDA's libraries. Only flash-attn from source and kernels that are compiled at run time "
        "need a compiler; NVIDIA's runfile installs it without root into a folder of yours: --toolkit "
        "--toolkitpath=FOLDER",
    )


def _check_megatron(node: Node) -> Finding:
    installed = [f"{name} {node.packages[name]}" for name in MEGATRON_PACKAGES if name in node.packages]
    missing = [name for name in MEGATRON_PACKAGES if name not in node.packages]
    evidence = f"{', '.join(installed) or 'none'} of {', '.join(MEGATRON_PACKAGES)}"
    consequence = (
        "Needed for model_engine=megatron only, which no recipe uses and bandpo was not run with. Its loss is the same "
        "function; "
    )
    if missing:
        consequence += (
            f"without {missing[0]} verl warns 'megatron engine is not available' and skips the engine"
        )
    else:
        consequence += "look at the gradient check of the first step"
    return Finding("Megatron", "look", evidence, consequence)


def _check_processors(node: Node, gpus: int) -> Finding:
    evidence = f"{node.cores} cores, {node.memory:.0f} GiB"
    # A trainer and a rollout server for each GPU, and verl's default of 8 agents and 8 workers for the reward.
    processes = 2 * gpus + 16
    if node.cores < processes:
        return Finding(
            "processors",
            "look",
            evidence,
            f"verl starts {processes} processes: with fewer cores, the reward waits, and Ray queues tasks without a "
            "core; lower actor_rollout_ref.rollout.agent.num_workers and reward.num_workers",
        )
    return Finding("processors", "ok", evidence)


def _check_shared_memory(node: Node) -> Finding:
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


def _check_open_files(node: Node) -> Finding:
    if node.open_files < OPEN_FILES and node.open_files >= 0:
        return Finding(
            "open files",
            "look",
            f"ulimit -n is {node.open_files}",
            f"Ray warns below {OPEN_FILES}: ulimit -n 65536",
        )
    return Finding("open files", "ok", f"ulimit -n is {node.open_files}")


def _check_disks(node: Node, checkpoints: Checkpoints | None) -> Finding:
    space = ", ".join(f"{free:.0f} GiB free for {name}" for name, free in node.free_space.items())
    evidence = f"{space}; {checkpoints or '--model says how much the checkpoints take'}"
    free = node.free_space.get("checkpoints", 0.0)
    if checkpoints and free * 2**30 < checkpoints.total * 1e9:
        return Finding(
            "disks",
            "stop",
            evidence,
            "Too little: name another folder with --output-dir, or let the run keep fewer checkpoints, with "
            "trainer.max_actor_ckpt_to_keep=N",
        )
    if any(free < 20 for free in node.free_space.values()):
        return Finding(
            "disks", "look", evidence, "Ray warns from 95 % on and then refuses objects: RAY_TMPDIR=FOLDER"
        )
    return Finding("disks", "ok", evidence)


def _check_ray(node: Node) -> Finding:
    evidence = f"its folder is {node.ray_folder}"
    if len(node.ray_folder.encode()) + RAY_SOCKET > SOCKET_PATH:
        return Finding(
            "Ray", "stop", evidence, f"A path of a socket may have {SOCKET_PATH} bytes: RAY_TMPDIR=/tmp/r"
        )
    if node.ray_running:
        return Finding(
            "Ray",
            "look",
            evidence,
            "A Ray runs here, or its address is left in the folder, and a run joins it. recipes/cluster.sh stop ends "
            "one of yours",
        )
    return Finding("Ray", "ok", evidence)


def _check_proxy(node: Node) -> Finding:
    proxies = [name for name in ("http_proxy", "https_proxy") if name in node.environment]
    excluded = node.environment.get("no_proxy", "")
    evidence = f"{', '.join(proxies) or 'none'}; no_proxy={excluded}" if proxies else "none"
    if proxies and "127.0.0.1" not in excluded:
        return Finding(
            "proxy",
            "stop",
            evidence,
            "verl's requests to its own vLLM servers go to the proxy: add 127.0.0.1, localhost and the nodes' "
            "addresses to no_proxy",
        )
    return Finding("proxy", "ok", evidence)


def _check_network(node: Node) -> Finding:
    fabric = ", ".join(node.infiniband) or "no InfiniBand"
    evidence = f"this machine's name has the address {node.address or 'none'}; {fabric}"
    if not node.address or node.address.startswith("127."):
        return Finding(
            "network",
            "stop",
            evidence,
            "The other nodes get an address that is their own: RAY_HEAD_IP=ADDRESS for slurm.sbatch, "
            "ray start --node-ip-address elsewhere",
        )
    if not node.infiniband and "NCCL_SOCKET_IFNAME" not in node.environment:
        return Finding(
            "network",
            "look",
            evidence,
            "NCCL uses the first network interface, often a container's: set NCCL_SOCKET_IFNAME=eth0",
        )
    return Finding("network", "ok", evidence)


NOT_VISIBLE_WHEN_IDLE = (
    (
        "vLLM",
        "Its first start compiles kernels and captures graphs, and prints little. If it fails, the error is in the log "
        "above 'Engine core initialization failed'; actor_rollout_ref.rollout.enforce_eager=true skips both",
    ),
    (
        "vLLM",
        "Its probabilities differ from the trainer's, in bfloat16 more than in a rehearsal. "
        "training/rollout_probs_diff_mean is the mean difference and must not grow after step 1: it grows if the "
        "weight sync fails",
    ),
    (
        "eight GPUs",
        "NCCL starts when the model is sharded over them. If the log stops there: NCCL_DEBUG=INFO logs the transport, "
        "and NCCL_P2P_DISABLE=1 turns off direct transfers between GPUs",
    ),
    (
        "eight GPUs",
        "Memory peaks in the update of the longest responses, not in step 1: with bandpo-lab run verl --one-step, "
        "every response has the maximal length",
    ),
    (
        "eight GPUs",
        "timing_s/gen ends with the longest response of all GPUs: the others wait",
    ),
    (
        "two nodes",
        "Both need the same environment and the same paths for --data and --output-dir: each node writes its part of a "
        "checkpoint, and if a part is elsewhere, the run cannot be resumed",
    ),
    (
        "Megatron",
        "A recipe takes it with model_engine=megatron actor_rollout_ref.actor.strategy=megatron. Its checkpoints are "
        "merged with --backend megatron",
    ),
)
"""Problems of the first steps at full size that cannot be seen on an idle node, each with its topic."""


def report(node: Node, gpus: int, nodes: int = 1, checkpoints: Checkpoints | None = None) -> tuple[str, bool]:
    """Return the results of `check_node` as a text, and True if no finding would end the run."""
    findings = check_node(node, gpus, nodes, checkpoints)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:4}  {finding.topic}: {finding.evidence}")
        if finding.consequence:
            lines += [f"      {line}" for line in finding.consequence.split("\n")]
    lines += ["", "Not to be seen on an idle node:"]
    lines += [f"      {topic}: {text}" for topic, text in NOT_VISIBLE_WHEN_IDLE]
    stops = [finding.topic for finding in findings if finding.state == "stop"]
    lines += ["", f"STOPPED BY {', '.join(stops)}" if stops else "READY, as far as an idle node shows"]
    return "\n".join(lines), not stops
