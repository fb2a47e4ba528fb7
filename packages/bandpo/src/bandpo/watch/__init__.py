"""Checks during training: the findings of a diagnosis by rlvet, announced while a run trains.

No check is defined here, as all are rlvet's, and no trainer: those are in `bandpo.integrations`.
"""

from typing import TYPE_CHECKING, Any

from bandpo._siblings import require_rlvet

require_rlvet("bandpo.watch")

from bandpo.watch.run_watch import RunWatch  # noqa: E402 - imports rlvet

if TYPE_CHECKING:
    from bandpo.watch.trainer_callback import Watch

__all__ = ["RunWatch", "Watch"]


def __getattr__(name: str) -> Any:
    # A training loop of one's own needs no transformers, whose import takes seconds.
    if name == "Watch":
        from bandpo.watch.trainer_callback import Watch

        return Watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
