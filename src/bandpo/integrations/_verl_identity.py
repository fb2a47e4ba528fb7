"""One identity for a run of verl: said before Ray starts, kept beside the checkpoints, and compared before a resume."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf, open_dict

from bandpo.errors import InvalidValue
from bandpo.text import as_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from bandpo.methods import Method

FILE = "bandpo-run.json"
"""In the folder of the checkpoints."""
APART = re.compile(
    r"""^(ray_kwargs|global_profiler|transfer_queue|skip|bandpo|recipe)\b | \.(profiler|val_kwargs|trace|prometheus)\.
    | ^trainer\.(device$|logger$|resume_|default_|max_|del_local|log_val|\w+_(freq|name|dir|time|timeout|class)$)
    | ^actor_rollout_ref\.actor\.policy_loss\. | \bval_ | validation_ | sandbox_fusion | nccl_timeout | log_stats
    | rollout\.(tensor_model|data|pipeline_model)_parallel_size | use_shm | update_weights_bucket | cudagraph
    | micro_batch_size | max_token_len | max_num_(batched_tokens|seqs)$ | dynamic_bsz | offload | _workers$ | prefetch
    | gpu_memory_utilization | checkpointing | enforce_eager | free_cache_engine | reshard_after_forward
    | torch_compile | entropy_from_logits
    """,
    re.VERBOSE,
)
"""Settings of memory, of measuring and of writing a run, on which the weights that it trains do not depend; and those
of the loss, which stand for themselves."""

PLACES = re.compile(r"^ray_kwargs|^recipe\.output|(experiment_name|default_local_dir)$|resume_")
"""Settings that say where a run is, not what."""


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting by its full name."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}".lstrip("."))
    else:
        yield key, value


def settings_of(config: DictConfig, loss: str) -> dict[str, Any]:
    """All settings that what is trained depends on, by their full names, and its loss."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    optim = plain["actor_rollout_ref"]["actor"]["optim"]
    longer = r"$^" if optim.get("lr_scheduler_type", "constant") != "constant" else r"^trainer\.total_"
    found = {k: v for k, v in leaves(plain) if not (APART.search(k) or re.search(longer, k))}
    loss = re.sub(r"\.0\b", "", loss)  # 10 and 10.0 are one number
    text = json.dumps(found | {"loss": loss}, default=str)
    data = plain.get("recipe", {}).get("data", "")
    return json.loads(text.replace(f'"{data}/', '"/'))  # a run's data may be moved


def announce(config: DictConfig, method: Method | None, said: Mapping[str, str], *, ours: bool) -> None:
    """Print what a run of bandpo's is, and hand it on with the config, to verl's trackers and to `keep`.

    ``said`` is the run in words, its loss first. Of others' runs only the checkpoints are looked at.

    Raises:
        ValueError: verl would go on in ``trainer.default_local_dir`` from another run, or from one that is not known.
    """
    settings = settings_of(config, said["loss"])
    every = dict(leaves(OmegaConf.to_container(config, resolve=True)))
    beside = {k: v for k, v in every.items() if k not in settings and not PLACES.search(k)}
    said = {**said, "checkpoints": _origin(config.trainer, settings, beside, ours)}
    if not ours:
        return
    for name, text in said.items():
        print(f"bandpo: {name:12}{text}", flush=True)
    with open_dict(config):
        text = None if method is None else as_text(method)
        kept = {"settings": json.dumps(settings), "beside": json.dumps(beside, default=str)}
        config.bandpo = {"method": text, "said": said, **kept}


def keep(run: Mapping[str, Any], folder: str) -> None:
    """Write what `announce` handed on beside the checkpoints, as training begins."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    kept = {name: json.loads(run[name]) for name in ("settings", "beside")}
    Path(folder, FILE).write_text(json.dumps({**run, **kept}, indent=1))


def _checkpoint(folder: Path) -> Path | None:
    tracker = folder / "latest_checkpointed_iteration.txt"
    return folder / f"global_step_{tracker.read_text().strip()}" if tracker.exists() else None


def _origin(trainer: Any, settings: Mapping[str, Any], beside: Mapping[str, Any], ours: bool) -> str:
    """Where training goes on from, in words; and a folder beside it that has checkpoints of the same run."""
    folder = Path(trainer.default_local_dir)
    start = _checkpoint(folder)
    if trainer.resume_mode == "resume_path":
        start = Path(str(trainer.resume_from_path))
        return f"{folder} goes on from {start}{_apart(start.parent, settings)}"
    if trainer.resume_mode == "disable":
        return f"{folder} starts at step 0"
    found = _apart(folder, settings)
    if found and ((folder / FILE).exists() or (start and ours)):
        raise InvalidValue(
            f"trainer.default_local_dir: {start or folder} is another run's{found}. Name another folder or "
            "trainer.experiment_name, or delete this one. To go on from its checkpoint all the same, write "
            f"trainer.resume_mode=resume_path trainer.resume_from_path={start}"
        )
    if start:
        return f"{folder} goes on from {start}"
    said = f"{folder} starts at step 0"
    for other in sorted(file.parent for file in folder.parent.glob(f"*/{FILE}") if file.parent != folder):
        if (there := _checkpoint(other)) and not _apart(other, settings):
            said += f"; {there} is of the same run{_apart(other, beside, 'beside')}; to go on from it, write "
            said += f"trainer.default_local_dir={other}"
    return said


def _apart(folder: Path, settings: Mapping[str, Any], part: str = "settings") -> str:
    """What the run of that folder has otherwise, in brackets; nothing if it is this one."""
    if not (file := folder / FILE).exists():
        return f" ({file} is not there to tell whose)"
    kept = json.loads(file.read_text()).get(part, settings)
    keys = (key for key in sorted(kept.keys() | settings.keys()) if kept.get(key) != settings.get(key))
    found = "; ".join(f"{key} {kept.get(key)} → {settings.get(key)}" for key in keys)
    return found and f" ({found})"
