"""Faults and healthy runs, what `bandpo diagnose` says of each, and the table of it in docs/diagnose.md.

    PYTHONPATH=benchmarks/doctor python benchmarks/doctor/run.py --seeds 10 11 12 --healthy 40

A run takes seconds. What is done is kept in --output, so a run that is stopped goes on where it was. A fault is right
where the first code is one of its own; where a report names two causes that it cannot tell apart, both are its own.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from bandpo.doctor.diagnosis import diagnose
from faults import FAULTS, Fault, Setting, train

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/diagnose.md"
MARKS = "<!-- bench: begin -->", "<!-- bench: end -->"


def healthy(seed: int) -> Setting:
    """Every combination of precision, length and temperature in turn."""
    return Setting(
        seed,
        temperature=(1.0, 0.7, 1.2)[seed % 3],
        length=(8, 12, 40)[seed // 3 % 3],
        low_precision=bool(seed % 2),
        scratchpad=seed // 3 % 3 == 2,
        updates=(4, 2, 8)[seed // 9 % 3],
    )


def varied(seed: int) -> Setting:
    """All that may vary, drawn at random; lags and versions are told as a trainer of the kind would."""
    draw = random.Random(seed)
    updates, scratchpad = draw.choice((2, 4, 8)), draw.random() < 0.3
    return Setting(
        seed,
        temperature=draw.choice((1.0, 1.0, 0.7, 1.2)),
        length=40 if scratchpad else draw.choice((8, 12, 16)),
        low_precision=draw.random() < 0.5,
        batches=draw.randint(5, 10),
        updates=updates,
        scratchpad=scratchpad,
        learning_rate=draw.choice((3e-5, 1e-4, 2e-4)),
        parts=draw.choice((1, updates)),
        steps_of_updates=draw.random() < 0.5,
        task="product" if scratchpad else "digits",
        columns=draw.random() < 0.8,
    )


def said_of(fault: Fault, setting: Setting, keep: Path | None = None) -> dict[str, object]:
    """What is said of one run, whose record may be kept."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        train(folder, fault, setting)
        found = diagnose(folder)
    first = found.findings[0] if found.findings else None
    codes = (first.code, *first.or_else) if first else ("ok",)
    alarms = [f.code for f in found.tested if f.ok is False]
    return {"codes": codes, "alarms": alarms, "headline": found.headline}


def table(rows: list[dict]) -> str:
    """What was said × faults; then how often it was right, and how often a healthy run raised an alarm."""
    lines, said, right = ["| what is said first | of |", "|---|---|"], {}, 0
    for name, fault in FAULTS.items():
        of = [row for row in rows if row["name"] == name]
        right += sum(row["codes"][0] in fault.expected for row in of)
        for codes in sorted({" or ".join(row["codes"]) for row in of}):
            said.setdefault(codes, []).append(name)
    lines += [f"| `{codes}` | {'; '.join(names)} |" for codes, names in said.items()]
    fine = [row for row in rows if row["name"] == "healthy"]
    alarms = sum(bool(row["alarms"]) for row in fine)
    faults = len(rows) - len(fine)
    lines += [
        "",
        f"On this bench: right in {right} of {faults} runs with a fault, "
        f"alarms in {alarms} of {len(fine)} healthy runs.",
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
    parser.add_argument("--write", action="store_true", help="write the table into docs/diagnose.md")
    parser.add_argument("--keep", type=Path, help="folder in which the records stay, for rivals.py")
    options = parser.parse_args()
    torch.set_num_threads(1)
    of_fault, of_healthy = (varied, varied) if options.varied else (Setting, healthy)
    wanted = [(name, fault, of_fault(seed)) for seed in options.seeds for name, fault in FAULTS.items()]
    wanted += [("healthy", Fault(), of_healthy(options.first + k)) for k in range(options.healthy)]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in options.output.open()] if options.output.exists() else []
    with options.output.open("a") as file:
        for name, fault, setting in wanted:
            key = {"name": name, "setting": asdict(setting)}
            if any(row["name"] == name and row["setting"] == key["setting"] for row in rows):
                continue
            keep = options.keep and options.keep / f"{setting.seed} {name}"
            rows.append(key | said_of(fault, setting, keep))
            print(name, setting.seed, rows[-1]["headline"], flush=True)
            print(json.dumps(rows[-1]), file=file, flush=True)
    print(table(rows))
    if not options.write:
        return
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n{table(rows)}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
