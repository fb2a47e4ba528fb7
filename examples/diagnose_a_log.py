"""Diagnose a training log: what is wrong with the run, and what to do about it.

What it shows: `bandpo.runs.open_run` and `bandpo.doctor.diagnosis.diagnose`, which read the log that TRL, verl,
prime-rl or SkyRL writes anyway, and the parts of a diagnosis: the headline, the findings with their advice, the checks
that passed, and those that this log does not allow.

Without a path it makes up the log of a TRL run with one planted fault: the entropy of the policy falls from 1.2 to 0.1
nats, while the reward stays where it is.

What it needs: ``pip install .`` in a clone, without torch. On the command line it is ``bandpo diagnose PATH``.

How to run it (about 1 second)::

    python examples/diagnose_a_log.py
    python examples/diagnose_a_log.py runs/mine

What one should see::

    300 log steps of trl in .../trainer_state.json
    headline: entropy-collapse: entropy 1.06 → 0.111 nats per token, while the reward went 0.297 → 0.3: ...
    fix: entropy-collapse, since step 189: entropy 1.06 → 0.111 nats per token, while ...
      do: add an entropy bonus (entropy_coef), lower the learning rate (learning_rate), or resume from an earlier ...
    look: plateau, since step 1: reward 0.299 from step 1 to 300, 100% of the run; ...
    ...
"""

import argparse
import json
import math
import random
import tempfile
from pathlib import Path

from bandpo.doctor.diagnosis import diagnose
from bandpo.runs import open_run


def write_faulty_log(folder):
    """Write ``trainer_state.json`` as transformers' Trainer does, of a made-up run of 300 steps."""
    noise = random.Random(0)
    history = []
    for step in range(1, 301):
        done = step / 300
        history.append(
            {
                "step": step,
                "learning_rate": 1e-6,
                "grad_norm": 0.3,
                "reward": 0.30 + noise.gauss(0, 0.03),
                # The planted fault. An entropy that falls is no fault while the reward rises; here it does not.
                "entropy": 1.2 * math.exp(-2.5 * done),
                # What follows is as in a healthy run.
                "frac_reward_zero_std": 0.2,
                "completions/mean_length": 90.0,
                "completions/clipped_ratio": 0.02,
                "clip_ratio/region_mean": 0.002,
            }
        )
    path = Path(folder) / "trainer_state.json"
    path.write_text(json.dumps({"log_history": history}))
    return path


def main():
    """Print the diagnosis of a run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", help="a run folder or a log; by default a log is made up")
    path = parser.parse_args().path or write_faulty_log(tempfile.mkdtemp(prefix="bandpo-"))

    # A run opens its parts when they are first asked for. `rows` has one dictionary for each step of the log, under
    # names that are the same for all frameworks.
    run = open_run(path)
    framework = run.setup.framework or "an unknown framework"
    print(f"{len(run.rows)} log steps of {framework} in {path}")

    diagnosis = diagnose(run)
    print(f"headline: {diagnosis.headline}")

    # Causes stand before their effects. A severity of "stop" or "fix" is a fault, "look" and "note" are none.
    for finding in diagnosis.findings:
        since = "" if finding.onset is None else f", since step {finding.onset:g}"
        print(f"{finding.severity}: {finding.code}{since}: {finding.cause}")
        print(f"  do: {finding.advice}")
    for check in diagnosis.passed:
        print(f"passed: {check}")
    for check, advice in diagnosis.untested.items():
        print(f"not tested: {check}" + (f" ({advice})" if advice else ""))


if __name__ == "__main__":
    main()
