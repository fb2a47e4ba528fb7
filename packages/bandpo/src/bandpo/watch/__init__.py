"""Checks during training: the findings of a diagnosis by rlvet, announced while a run trains."""

from bandpo._siblings import require_rlvet

require_rlvet("bandpo.watch")

from bandpo.watch.run_watch import RunWatch  # noqa: E402 - these modules import rlvet
from bandpo.watch.trainer_callback import Watch  # noqa: E402

__all__ = ["RunWatch", "Watch"]
