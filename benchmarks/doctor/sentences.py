"""Count the printed sentences that the rows of a log contradict, by kind.

    PYTHONPATH=tests:benchmarks/doctor python benchmarks/doctor/sentences.py --random 10000 --logs FOLDER

The logs are random ones, the simulated faults and healthy runs of `log_scenarios.py`, and every prefix of the logs in
a folder. The reader of the sentences is `tests/helpers/printed_sentences.py`, which shares no code with the checks.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from log_scenarios import SCENARIOS, SHAPES, healthy, rough

from helpers.printed_sentences import violations
from helpers.random_logs import canonical, random_rows
from rlvet import open_run
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log_checks import log_findings
from rlvet.errors import InvalidValue
from rlvet.runs.logs import Log
from rlvet.runs.quantities import named_rows


def diagnose_rows(rows) -> tuple[Diagnosis, str]:
    log = Log.of(rows)
    diagnosis = Diagnosis(log_findings(log.rows), rows=log.rows, log=log)
    return diagnosis, diagnosis.as_text(verbose=True)


def simulated(seeds: range) -> Iterator[list[dict[str, float]]]:
    for seed in seeds:
        for scenario in SCENARIOS.values():
            yield scenario.rows(seed)
        for shape in SHAPES:
            yield healthy(seed, shape)
            yield rough(seed, shape)


def stored_rows(folder: Path) -> Iterator[tuple[str, list]]:
    """Yield the name and the rows of each log in a folder that can be read."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name == "README.md":
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                rows = open_run(path).rows
            except (InvalidValue, OSError):
                continue
        yield f"{path.parent.name}/{path.name}", list(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random", type=int, default=1000, help="number of random logs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of them")
    parser.add_argument("--simulated", type=int, default=2, help="seeds of the simulated runs, from 900 on")
    parser.add_argument("--logs", type=Path, help="a folder of logs, all prefixes of which are diagnosed")
    options = parser.parse_args()

    counts: Counter[tuple[str, str, str]] = Counter()
    logs: Counter[str] = Counter()

    def count(source: str, rows, text: str) -> None:
        logs[source] += 1
        found = violations(text, rows)
        logs[f"{source}: with a violation"] += bool(found)
        counts.update((source, *violation) for violation in found)

    for seed in range(options.first, options.first + options.random):
        _, text = diagnose_rows(rows := random_rows(seed))
        count("random logs", rows, text)
    for rows in simulated(range(900, 900 + options.simulated)):
        _, text = diagnose_rows(rows)
        count("simulated runs", named_rows(canonical(rows)), text)
    if options.logs:
        turned_ok = Counter()
        for name, rows in stored_rows(options.logs):
            was_fault = False
            for length in range(1, len(rows) + 1):
                prefix = rows[:length]
                diagnosis = Diagnosis(log_findings(prefix), rows=prefix, log=Log.of([]))
                count("prefixes of stored logs", prefix, diagnosis.as_text(verbose=True))
                if was_fault and diagnosis.headline.startswith("ok"):
                    turned_ok[name] += 1
                was_fault = not diagnosis.healthy
        print("a fault in a prefix, and ok one row later:", dict(turned_ok))
    for source, number in logs.items():
        print(f"{number:7d} {source}")
    kinds: Counter[tuple[str, str]] = Counter()
    for (_, kind, what), number in counts.items():
        kinds[kind, what] += number
    for (source, kind, what), number in sorted(counts.items()):
        print(f"{number:7d} {source}: {kind}: {what}")
    print(f"{sum(counts.values()):7d} in all")


if __name__ == "__main__":
    main()
