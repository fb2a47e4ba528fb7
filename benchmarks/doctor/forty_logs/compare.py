"""Compare the first lines of ``rlvet diagnose`` with the readings of ``readings.tsv``.

    python benchmarks/doctor/forty_logs/compare.py FOLDER OUTPUT

OUTPUT is a file beside this one: ``results.tsv`` for first tries, ``after_mending.tsv`` for later ones. FOLDER holds
each log as ``NUMBER/NAME``, with the number of the table and the name that its repository gives it. The logs are not
part of this repository.
"""

import csv
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent


def rating(name: str, reading: dict[str, str]) -> str:
    """Return the rating of a first line that names a finding, ``ok``, ``no-verdict`` or ``several-runs``."""
    for kind in ("right", "fair"):
        if name in reading[kind].split():
            return kind
    if name in ("no-verdict", "several-runs", "error"):
        return "refused"
    return "silent" if name == "ok" else "wrong"


def first_line(log: Path) -> str:
    """Return what ``rlvet diagnose`` says first of a log."""
    run = subprocess.run(
        ["rlvet", "diagnose", log.name], cwd=log.parent, capture_output=True, text=True, check=False
    )
    return (run.stdout or run.stderr).splitlines()[0]


def name_of(line: str) -> str:
    """Return the name of the finding, or of the refusal, that a first line begins with."""
    if re.search(r"holds \d+ runs", line):
        return "several-runs"
    name = re.split(r" or |:", line, maxsplit=1)[0]
    return name.replace(" ", "-")


def main(folder: str, output: str) -> None:
    """Write the first lines with their ratings, and print how many first lines have each rating."""
    counts: Counter[str] = Counter()
    with (HERE / "readings.tsv").open() as file, (HERE / output).open("w") as out:
        out.write("log\trating\tfirst line\n")
        for reading in csv.DictReader(file, delimiter="\t"):
            line = first_line(Path(folder) / reading["log"] / Path(reading["path"]).name)
            rated = rating(name_of(line), reading)
            counts[rated] += 1
            out.write(f"{reading['log']}\t{rated}\t{line}\n")
    print(dict(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
