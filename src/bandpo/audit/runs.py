"""What a log does not say of its run: the framework, and the method it was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo.audit.logs import Row
from bandpo.audit.record import metadata
from bandpo.audit.recorder import record_files
from bandpo.audit.settings import SETTINGS, framework_of
from bandpo.errors import InvalidValue
from bandpo.methods import Method, Parts
from bandpo.text import as_parts


@dataclass(frozen=True)
class Run:
    """What verdicts take from elsewhere than the log's numbers; None where it is not known."""

    framework: str | None = None
    """A key of `bandpo.audit.settings.SETTINGS`."""
    method: Parts | None = None


def known_run(
    path: Path, rows: Sequence[Row], *, framework: str | None = None, method: Method | str | None = None
) -> Run:
    """What is known of a run: what its config.yaml tells, or what is given; and its framework, given or told from keys.

    Args:
        path: The run folder of `bandpo train`, or any other log.
        rows: Its log.
        framework: Its framework, if that is to be said.
        method: What it was trained with, where no config.yaml says so, e.g. ``"GSPO()"``.

    Raises:
        ValueError: an unknown framework, or a method that cannot be read.

    >>> known_run(Path("steps.jsonl"), [{"step": 1, "actor/pg_clipfrac": 0.4}], method="GSPO()").framework
    'verl'
    """
    if framework is not None and framework not in SETTINGS:
        raise InvalidValue(f"framework {framework!r} is none of {', '.join(SETTINGS)}")
    given = None if method is None else as_parts(method)
    return Run(framework or framework_of(rows), _configured(path / "config.yaml") or given)


def recorded_run(path: Path) -> Run:
    """What a record says of its run.

    Args:
        path: The folder that `bandpo.Recorder` wrote, or one file of it.
    """
    said = metadata(record_files(path)[0])
    framework = next((name for name in SETTINGS if said["framework"].startswith(name)), None)
    return Run(framework, None if said["method"] is None else as_parts(**said["method"]))


def _configured(config: Path) -> Parts | None:
    if not config.is_file():
        return None
    import yaml

    try:
        settings: Any = yaml.safe_load(config.read_text())["arguments"]
        if settings["method"]:
            return as_parts(settings["method"])
        return as_parts(
            clip=settings["clip"],
            objective=settings["objective"],
            level=settings["importance_sampling_level"],
        )
    except (yaml.YAMLError, LookupError, TypeError, ValueError):
        return None  # another program's config.yaml, or a rule of a plug-in that is not here
