"""Run `rlvet diagnose` on runs with a fault and on healthy runs, and write a table in research/reports/rlvet.

    PYTHONPATH=benchmarks/doctor python benchmarks/doctor/run.py --seeds 10 11 12 --healthy 40

A run takes seconds. Results are kept in --output, so that an interrupted benchmark can be continued. A diagnosis is
right if its first code is one of those that the fault expects.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from faults import FAULTS, Fault, Setting, train
from rlvet import diagnose

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "research/reports/rlvet/report.md"
MARKS = "<!-- bench: begin -->", "<!-- bench: end -->"


def healthy(seed: int) -> Setting:
    """Return a setting of a healthy run; consecutive seeds go through all combinations."""
    return Setting(
        seed,
        temperature=(1.0, 0.7, 1.2)[seed % 3],
        length=(8, 12, 40)[seed // 3 % 3],
        low_precision=bool(seed % 2),
        scratchpad=seed // 3 % 3 == 2,
        updates=(4, 2, 8)[seed // 9 % 3],
    )


def random_setting(seed: int) -> Setting:
    """Return a setting with all values drawn at random."""
    draw = random.Random(seed)
    updates = draw.choice((2, 4, 8))
    scratchpad = draw.random() < 0.3
    return Setting(
        seed,
        temperature=draw.choice((1.0, 1.0, 0.7, 1.2)),
        length=40 if scratchpad else draw.choice((8, 12, 16)),
        low_precision=draw.random() < 0.5,
        batches=draw.randint(5, 10),
        updates=updates,
        scratchpad=scratchpad,
        learning_rate=draw.choice((3e-5, 1e-4, 2e-4)),
        minibatches=draw.choice((1, updates)),
        steps_of_updates=draw.random() < 0.5,
        task="product" if scratchpad else "digits",
        columns=draw.random() < 0.8,
    )


def run_and_diagnose(fault: Fault, setting: Setting, keep: Path | None = None) -> dict[str, object]:
    """Train with a fault and diagnose the record, which is kept in the folder ``keep`` if given."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        train(folder, fault, setting)
        diagnosis = diagnose(folder)
    first = diagnosis.findings[0] if diagnosis.findings else None
    codes = (first.code, *first.or_else) if first else ("ok",)
    alarms = [f.code for f in diagnosis.tested if f.ok is False]
    return {"codes": codes, "alarms": alarms, "headline": diagnosis.headline}


def table(rows: list[dict]) -> str:
    """Return a Markdown table of the first codes and their faults, and the numbers of right diagnoses and alarms."""
    lines = ["| what is said first | of |", "|---|---|"]
    names_by_code = {}
    right = 0
    for name, fault in FAULTS.items():
        of_fault = [row for row in rows if row["name"] == name]
        right += sum(row["codes"][0] in fault.expected for row in of_fault)
        for codes in sorted({" or ".join(row["codes"]) for row in of_fault}):
            names_by_code.setdefault(codes, []).append(name)
    lines += [f"| `{codes}` | {'; '.join(names)} |" for codes, names in names_by_code.items()]
    healthy_rows = [row for row in rows if row["name"] == "healthy"]
    alarms = sum(bool(row["alarms"]) for row in healthy_rows)
    faults = len(rows) - len(healthy_rows)
    lines += [
        "",
        f"On this bench: right in {right} of {faults} runs with a fault, "
        f"alarms in {alarms} of {len(healthy_rows)} healthy runs.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--healthy", type=int, default=20, help="healthy runs")
    parser.add_argument("--first", type=int, default=1000, help="seed of the first of them")
    parser.add_argument("--output", type=Path, default=ROOT / "build/doctor.jsonl")
    parser.add_argument("--varied", action="store_true", help="vary all settings, of faults too")
    parser.add_argument(
        "--write", action="store_true", help="write the table into research/reports/rlvet/report.md"
    )
    parser.add_argument("--keep", type=Path, help="folder in which the records stay")
    options = parser.parse_args()
    torch.set_num_threads(1)
    faulty_setting = random_setting if options.varied else Setting
    healthy_setting = random_setting if options.varied else healthy
    planned = [
        (name, fault, faulty_setting(seed)) for seed in options.seeds for name, fault in FAULTS.items()
    ]
    planned += [("healthy", Fault(), healthy_setting(options.first + k)) for k in range(options.healthy)]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    if options.output.exists():
        rows = [json.loads(line) for line in options.output.open()]
    with options.output.open("a") as file:
        for name, fault, setting in planned:
            key = {"name": name, "setting": asdict(setting)}
            if any(row["name"] == name and row["setting"] == key["setting"] for row in rows):
                continue
            keep = options.keep and options.keep / f"{setting.seed} {name}"
            rows.append(key | run_and_diagnose(fault, setting, keep))
            print(name, setting.seed, rows[-1]["headline"], flush=True)
            print(json.dumps(rows[-1]), file=file, flush=True)
    print(table(rows))
    if not options.write:
        return
    before, _, marked = PAGE.read_text().partition(MARKS[0])
    after = marked.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n{table(rows)}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
