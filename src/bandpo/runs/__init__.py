"""Runs as they lie on a disk: logs, records of tokens, batches that frameworks wrote, and configurations.

`open_run` returns a `Run`, from which every diagnosis, audit and report is computed. Reading a log or a configuration
needs the standard library and PyYAML; reading a record needs numpy and pyarrow; nothing here needs torch, but for the
batches that slime, miles and SkyRL save with it.
"""

from bandpo.runs.record import LossBatch
from bandpo.runs.run import Run, open_run
from bandpo.runs.setup import Setup

__all__ = ["LossBatch", "Run", "Setup", "open_run"]
