"""Diagnose a training log: find the problems of a run, with a remedy for each.

What it shows: `rlvet.open_run`, which reads the logs that TRL, verl, prime-rl and SkyRL write by default,
`rlvet.diagnose`, and the contents of a diagnosis: the headline, the findings with their advice, the
checks that passed, and those that are not possible with this log.

If no path is given, it writes the log of a simulated TRL run with one fault: the entropy of the policy falls from 1.2
to 0.1 nats, while the reward is constant.

What it needs: ``pip install ./packages/rlvet`` in a clone, without torch. On the command line it is ``rlvet diagnose
PATH``.

How to run it (about 1 second)::

    python examples/diagnose_a_log.py
    python examples/diagnose_a_log.py runs/mine

What one should see::

    300 log steps of trl in .../trainer_state.json
    headline: entropy-collapse: entropy 1.06 → 0.111 nats per token, while the reward went 0.297 → 0.3
    fix: entropy-collapse, since step 182: entropy 1.06 → 0.111 nats per token, while ...
      do: add an entropy bonus (entropy_coef, in newer versions) or lower the learning rate (learning_rate), ...
    look: plateau, since step 1: mean reward 0.299 from step 1 to 300, the whole run; ...
    ...
"""

import argparse
import json
import math
import random
import tempfile
from pathlib import Path

from rlvet import diagnose, open_run


def write_faulty_log(folder):
    """Write a ``trainer_state.json``, as transformers' Trainer does, with 300 simulated steps."""
    noise = random.Random(0)
    history = []
    for step in range(1, 301):
        progress = step / 300
        history.append(
            {
                "step": step,
                "learning_rate": 1e-6,
                "grad_norm": 0.3,
                "reward": 0.30 + noise.gauss(0, 0.03),
                # The fault: a falling entropy is fine while the reward rises, but here it does not.
                "entropy": 1.2 * math.exp(-2.5 * progress),
                # The remaining metrics are those of a healthy run.
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
    parser.add_argument("path", nargs="?", help="a run folder or a log; by default a simulated log")
    path = parser.parse_args().path or write_faulty_log(tempfile.mkdtemp(prefix="bandpo-"))

    # Files are read when they are needed. `rows` has one dictionary per log step, with the same names of quantities
    # for all frameworks.
    run = open_run(path)
    framework = run.setup.framework or "an unknown framework"
    print(f"{len(run.rows)} log steps of {framework} in {path}")

    diagnosis = diagnose(run)
    print(f"headline: {diagnosis.headline}")

    # Causes come before their effects. The severities "stop" and "fix" are faults, "look" and "note" are not.
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
