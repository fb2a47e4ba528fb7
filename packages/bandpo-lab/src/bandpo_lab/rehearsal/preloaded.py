"""The modules that a rehearsal's fork server imports before it forks.

Importing this module sets up the process as such a server. All processes of a rehearsal descend from it. It ends them
when the process that started it ends, for whatever reason.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
from pathlib import Path

from bandpo_lab.rehearsal.processes import PR_SET_PDEATHSIG, end_descendants, prctl
from bandpo_lab.rehearsal.run import environment

MODULES = (
    "hydra.main",
    "verl.trainer.constants_ppo",
    "verl.trainer.ppo.v1",
    "verl.experimental.reward_loop",
    "verl.experimental.reward_loop.reward_manager",
    "verl.workers.engine_workers",
    "verl.workers.engine.fsdp",
    "transformers.generation.utils",
    "transfer_queue",
)
"""The imports of a run's processes, which take ten seconds in each process if they are not inherited."""
FIRST_JOB = "01000000"
"""The id that Ray gives to its first driver; each run has one driver."""
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def _end(*_: object) -> None:
    # The signal comes again with each thread of the process that ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_descendants(os.getpid())
    os._exit(0)


signal.signal(signal.SIGTERM, _end)
prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
prctl(PR_SET_CHILD_SUBREAPER, 1)
# The output of the imports is discarded; each fork gets its own output.
with open(os.devnull, "w", encoding="utf-8") as devnull:
    for stream in (sys.stdout, sys.stderr):
        os.dup2(devnull.fileno(), stream.fileno())
sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
os.environ |= environment(Path())
# Ray reads these on import: a worker needs the id of its job, and of the process with which it ends.
os.environ |= {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(os.getpid())}
for module in MODULES:
    with contextlib.suppress(Exception):  # the run imports it again, and its log shows the error
        importlib.import_module(module)
gc.freeze()  # so that the garbage collector of a fork does not scan the imported modules
