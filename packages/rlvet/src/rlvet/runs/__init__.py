"""Readers of a run's files: logs, records of tokens, batches that frameworks saved, and configurations.

`open_run` returns a `Run`, from which every diagnosis, audit and report is computed. Reading a log or a configuration
needs the standard library and PyYAML, and reading a record needs numpy and pyarrow. Only the batches that slime, miles
and SkyRL save with torch need torch.
"""

from rlvet.runs.record import LossBatch
from rlvet.runs.run import Run, open_run
from rlvet.runs.setup import Setup

__all__ = ["LossBatch", "Run", "Setup", "open_run"]
