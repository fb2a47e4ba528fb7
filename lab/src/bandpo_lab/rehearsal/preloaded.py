"""What a rehearsal's fork server imports before it forks. Importing this module makes a process such a server.

All of a rehearsal's processes descend from the server. It ends them when it loses the process that started it, however
that one ended.
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
"""What the processes of a run import for ten seconds each."""
FIRST_JOB = "01000000"
"""The id that a Ray gives its first driver, of which each run has one."""
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def _end(*_: object) -> None:
    end_descendants(os.getpid())
    os._exit(0)


signal.signal(signal.SIGTERM, _end)
prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
prctl(PR_SET_CHILD_SUBREAPER, 1)
with open(os.devnull, "w", encoding="utf-8") as nothing:
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nothing.fileno(), stream.fileno())
sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
os.environ |= environment(Path())
# Ray reads these when it is imported. A worker needs its job, and the process whose end it follows.
os.environ |= {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(os.getpid())}
for module in MODULES:
    with contextlib.suppress(Exception):  # the run imports it again, and its log shows the error
        importlib.import_module(module)
gc.freeze()  # so forks do not scan what the server has imported
