"""Checks during training: the findings of a diagnosis, announced while a run trains. This part needs rlvet."""

from bandpo.watch.run_watch import BandWarning, RunWatch
from bandpo.watch.trainer_callback import Watch

__all__ = ["BandWarning", "RunWatch", "Watch"]
