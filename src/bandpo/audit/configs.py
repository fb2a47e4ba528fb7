"""What a run was trained with, as its configuration files tell it: its method, and the updates that a batch gets.

Nothing that these files name is imported or called. Frameworks write them by themselves.
"""

from __future__ import annotations

import json
import math
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bandpo.audit.files import shipped, unpickled
from bandpo.audit.logs import Row
from bandpo.audit.record import told_method
from bandpo.audit.settings import Setup
from bandpo.divergences import KL, TotalVariation
from bandpo.methods import CISPO, GPG, GSPO, SAPO, Method, PrimeRL
from bandpo.objectives import (
    ClippedWeight,
    DropOutside,
    DualClip,
    GammaWeight,
    GeometricMean,
    RatioCap,
    SigmoidGate,
    Surrogate,
)
from bandpo.rules import Band, ClipRule, FixedClip, TwoSided, Unclipped
from bandpo.text import as_method

Config = Mapping[str, Any]
LARGEST = 2**24
"""Bytes above which a file is no configuration: those of all frameworks are below 2**16."""
FRAMEWORKS: Mapping[str, Mapping[str, Any]] = shipped("frameworks")
"""What each framework's log holds and no other's (``log``). By dotted names: a setting of its own (``own``), what
stands before its adapter's ``method`` (``ours``), and what makes the updates of a batch, unless data are older."""


def setup_of(run: Path, rows: Sequence[Row], method: Method | ClipRule | str | None = None) -> Setup:
    """What a run with a log was trained with, as the log's keys and its own configuration tell.

    Args:
        run: Its folder, or the log.
        rows: The log, whose keys may tell the framework.
        method: Its method, where no configuration tells it, e.g. ``"GSPO()"``.

    Raises:
        ValueError: the method cannot be read.

    >>> setup_of(Path("steps.jsonl"), [{"step": 1, "actor/pg_clipfrac": 0.4}], "GSPO()").framework
    'verl'
    """
    given = None if method is None else as_method(method)
    keys, told = {key for row in rows for key in row}, trained_with(run, given)
    logged = next(
        (name for name, its in FRAMEWORKS.items() if any(k.endswith(tuple(its["log"])) for k in keys)), None
    )
    if logged in (None, told.framework):
        return told
    return Setup(logged, given)  # the configuration is of something else


def trained_with(run: Path, given: Method | None = None) -> Setup:
    """What the newest configuration in a run's folder tells, or that beside a log.

    Args:
        run: The folder, or the log.
        given: The method, where no configuration tells it.

    >>> import tempfile
    >>> run = Path(tempfile.mkdtemp())
    >>> _ = (run / "config.yaml").write_text("loss_fn: {ratio_clip_min: 0.2, ratio_clip_max: 0.28, ratio_clip_c: null}")
    >>> trained_with(run).method
    FixedClip(low=0.2, high=0.28)
    """
    if run.suffix == ".jsonl":  # whose first line our driver writes in verl's file logger
        with suppress(OSError, StopIteration, ValueError), run.open() as lines:
            if text := at(json.loads(next(lines)), "data.bandpo.method"):
                return Setup("verl", told_method(text, run, given))
    if run.is_dir():
        files = [file for name in _READ for file in run.rglob(name)]
    else:
        files = [file for name in _READ for file in (run.parent / name, run.parent / ".hydra" / name)]
    files = [file for file in files if file.is_file()]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            said = _READ[file.name](file) if file.stat().st_size <= LARGEST else {}
        except Exception:  # noqa: S112  (damaged, or another program's: the log is there in any case)
            continue
        for name in _STOCK:
            if at(said, FRAMEWORKS[name]["own"]) is not None:
                stale = bool(said.get("lag")) if name == "trl" else None  # which only `bandpo train` sets
                return Setup(name, _method(name, said, file, given), _updates(name, said), stale)
    return Setup(method=given)


def at(config: Config, name: str) -> Any:
    """A setting by its dotted name; None if it is not there."""
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _yaml(file: Path) -> Config:
    """hydra's, NeMo-RL's, that of `bandpo train`, or wandb's, which has each setting under ``value``."""
    import yaml

    said = yaml.safe_load(file.read_bytes())
    said = said.get("arguments", said)
    return {name: x["value"] if isinstance(x, Mapping) and "value" in x else x for name, x in said.items()}


def _training_args(file: Path) -> Config:
    """transformers' ``training_args.bin``: a pickle in an archive."""
    with zipfile.ZipFile(file) as archive:
        inside = next(info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
        return unpickled(archive.read(inside), file).state if inside.file_size <= LARGEST else {}


_READ: Mapping[str, Callable[[Path], Config]] = {
    "training_args.bin": _training_args,
    "config.yaml": _yaml,
    "trainer.json": lambda file: json.loads(file.read_bytes()),  # prime-rl's
    "trainer.toml": lambda file: tomllib.loads(file.read_text("utf-8")),
}


def trl_method(config: Config) -> Method:
    """The method that a stock GRPOTrainer's loss is under its arguments."""
    low, high, loss_type = config["epsilon"], config.get("epsilon_high"), config["loss_type"]
    high, level = low if high is None else high, config["importance_sampling_level"]
    if loss_type in TRL_CLIPS:
        delta = config.get("delta")
        return Method(
            FixedClip(min(low, 1.0), high), Surrogate() if delta is None else RatioCap(delta), level
        )
    objective = {
        "cispo": lambda: ClippedWeight(high),  # which is the bound itself there
        "sapo": lambda: SigmoidGate(config["sapo_temperature_pos"], config["sapo_temperature_neg"]),
        "vespo": lambda: GammaWeight(
            *(config[f"vespo_{name}"] for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"))
        ),
    }.get(loss_type, Surrogate)
    return Method(Unclipped(), objective(), "token" if loss_type == "vespo" else level)


TRL_CLIPS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""TRL's ``loss_type``s that clamp the ratio."""


def verl_method(name: str, actor: Config) -> Method | None:
    """The method that verl's loss of a ``loss_mode`` is under the actor's settings; None if it is none of bandpo's."""
    ends = actor["clip_ratio_low"], actor["clip_ratio_high"]
    low, high = (actor["clip_ratio"] if end is None else end for end in ends)
    match name:
        case "vanilla":
            return Method(FixedClip(min(low, 1.0), high), DualClip(actor["clip_ratio_c"]))
        case "dppo_tv" | "dppo_kl":
            divergence = TotalVariation() if name == "dppo_tv" else KL()
            lower, upper = (Band(divergence, radius, math.inf) for radius in (low, high))
            return Method(
                lower if lower == upper else TwoSided(lower, upper), DropOutside(actor["clip_ratio_c"])
            )
        case "gspo":
            return GSPO(low, high)
        case "sapo":
            return SAPO(actor["tau_pos"], actor["tau_neg"])
        case "gpg":
            return GPG()
        case "geo_mean":  # whose ends are distances of log r from 0
            return Method(FixedClip(-math.expm1(-low), math.expm1(high)), GeometricMean())
        case "cispo":
            return CISPO(low, high)
    return None


def _verl(config: Config) -> Method | None:
    actor = at(config, "actor_rollout_ref.actor")
    loss = actor["policy_loss"]
    return verl_method(loss.get("audited") or loss["loss_mode"], actor)


def _skyrl(config: Config) -> Method | None:
    settings = at(config, "trainer.algorithm")
    clip = FixedClip(settings["eps_clip_low"], settings["eps_clip_high"])
    return {
        "regular": Method(clip),
        "dual_clip": Method(clip, DualClip(settings["clip_ratio_c"])),
        "gspo": GSPO(clip.low, clip.high),
    }.get(settings["policy_loss_type"])


def _nemo_rl(config: Config) -> Method | None:
    loss = config["loss_fn"]
    if loss.get("use_cispo") or loss.get("disable_ppo_ratio"):
        return None
    most = loss["ratio_clip_c"]
    level = "sequence" if loss.get("sequence_level_importance_ratios") else "token"
    objective = Surrogate() if most is None else DualClip(most)
    return Method(FixedClip(loss["ratio_clip_min"], loss["ratio_clip_max"]), objective, level)


def _prime_rl(config: Config) -> Method | None:
    loss = config["loss"]
    radius = loss["dppo_mask_low"]
    return PrimeRL(radius, loss["kl_tau"]) if radius == loss["dppo_mask_high"] else None


_STOCK: Mapping[str, Callable[[Config], Method | None]] = {
    "trl": trl_method,
    "verl": _verl,
    "skyrl": _skyrl,
    "nemo-rl": _nemo_rl,
    "prime-rl": _prime_rl,
}
"""The method of a framework's own loss."""


def _method(framework: str, config: Config, file: Path, given: Method | None) -> Method | None:
    text = at(config, f"{FRAMEWORKS[framework]['ours']}method")
    if isinstance(text, str) and text:
        told, level = told_method(text, file, given), config.get("importance_sampling_level")
        return replace(told, level=level) if told and told.only_rule and level else told
    try:
        return _STOCK[framework](config) or given
    except (LookupError, TypeError, ValueError):
        return given  # a setting is of another version, or is not told


def _updates(framework: str, config: Config) -> float | None:
    above, _, below = FRAMEWORKS[framework]["updates"].partition(" / ")
    *factors, divisor = (at(config, name) for name in (*above.split(" * "), below))
    told = all(isinstance(x, int) and x > 0 for x in (*factors, divisor))
    return math.prod(factors) / divisor if told else None
