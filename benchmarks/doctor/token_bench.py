"""Run `rlvet diagnose` on the runs of `token_faults.py`, and count how often it is right.

    PYTHONPATH=benchmarks/doctor python benchmarks/doctor/token_bench.py --seeds 900 901 --healthy 40 --keep build/runs

A diagnosis is right if its first code is one of those that the fault expects. Two kinds of errors are counted
separately: a code that the record excludes, in any finding or as an alternative to one, and an onset that is more than
a batch off. A record that exists in the folder of --keep is read, not made again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from token_faults import FAULTS, HEALTHY, UNUSUAL, TokenFault, TokenSetting, random_setting, train

from rlvet import diagnose
from rlvet.checks.diagnosis import Diagnosis


def healthy_setting(seed: int) -> tuple[str, TokenSetting]:
    """Return the name and the settings of a healthy run. Consecutive seeds go through the kinds of unusual runs.

    The learning rate is a fifth of that of the runs with a fault, at which some policies move by three nats in a batch
    or lose their entropy.
    """
    name = list(UNUSUAL)[seed % len(UNUSUAL)]
    setting = random_setting(seed)
    return name, replace(setting, learning_rate=setting.learning_rate / 5, **UNUSUAL[name])


def train_and_diagnose(name: str, fault: TokenFault, setting: TokenSetting, keep: Path | None) -> Diagnosis:
    """Train unless the record is in the folder ``keep``, and diagnose the record."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if keep is not None:
            folder = keep / f"{setting.seed} {name.replace('/', '-')}"
        if not any(folder.glob("*.arrow")):
            train(folder, fault, setting)
        return diagnose(folder)


def verdict(fault: TokenFault, setting: TokenSetting, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the result of a diagnosis, and which parts of it are right."""
    first = diagnosis.findings[0] if diagnosis.findings else None
    codes = ["ok"] if first is None else [first.code, *first.or_else]
    is_right = codes[0] in fault.expected
    named = {code for finding in diagnosis.findings for code in (finding.code, *finding.or_else)}
    result = {
        "codes": codes,
        "right": is_right,
        "excluded": sorted(named & {*fault.excluded}),
        "alarms": [finding.code for finding in diagnosis.tested if finding.ok is False],
        "headline": diagnosis.headline,
    }
    if fault.midway and is_right and first is not None:
        expected = setting.onset * (setting.updates if setting.steps_of_updates else 1)
        tolerance = setting.updates if setting.steps_of_updates else 1
        result["onset"] = first.onset
        result["onset_right"] = first.onset is not None and abs(first.onset - expected) <= tolerance
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), help="names of faults; all by default")
    parser.add_argument("--healthy", type=int, default=26, help="healthy runs")
    parser.add_argument("--first", type=int, default=1000, help="seed of the first of them")
    parser.add_argument("--keep", type=Path, help="folder in which the records stay")
    parser.add_argument("--output", type=Path, help="JSON lines, one a run")
    options = parser.parse_args()
    torch.set_num_threads(1)

    planned = [
        (name, FAULTS[name], random_setting(seed)) for name in options.faults for seed in options.seeds
    ]
    for seed in range(options.first, options.first + options.healthy):
        name, setting = healthy_setting(seed)
        planned.append((f"healthy: {name}", HEALTHY, setting))

    results: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, fault, setting in planned:
        diagnosis = train_and_diagnose(name, fault, setting, options.keep)
        result = {"name": name, "seed": setting.seed} | verdict(fault, setting, diagnosis)
        results[name].append(result)
        if fault is HEALTHY:
            passed = not result["alarms"]
        else:
            passed = result["right"] and not result["excluded"]
        print(
            "  " if passed else "X ",
            name,
            setting.seed,
            result["headline"],
            result.get("onset", ""),
            flush=True,
        )
        if options.output:
            with options.output.open("a") as file:
                print(json.dumps(result), file=file)

    of_faults = [result for name in options.faults for result in results[name]]
    healthy_names = [name for name in results if name not in FAULTS]
    of_healthy = [result for name in healthy_names for result in results[name]]
    midway = [result for result in of_faults if "onset_right" in result]
    print(
        f"right in {sum(result['right'] for result in of_faults)} of {len(of_faults)} runs with a fault; "
        f"a cause that is excluded in {sum(bool(result['excluded']) for result in of_faults)}; "
        f"the onset right in {sum(result['onset_right'] for result in midway)} of {len(midway)} found midway; "
        f"alarms in {sum(bool(result['alarms']) for result in of_healthy)} of {len(of_healthy)} healthy runs"
    )


if __name__ == "__main__":
    main()
