"""Lines of Python in each house, against their budgets: what a reader has to get through.

    python scripts/size.py

Every line of every .py file that git tracks counts, blank ones and docstrings too. Exits with 1 where a budget is
exceeded. Meet it by deleting: longer lines or denser code would move the number and help nobody.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSES = {
    "library": (("src/",), 11_500),
    "lab, studies": (("lab/src/", "studies/"), 10_500),
    "tests": (("tests/", "lab/tests/", "conftest.py"), 16_500),
    "adapters to copy": (("contrib/",), None),
    "tools": (("scripts/", "benchmarks/", "docs/"), None),
}


def main() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    exceeded = False
    for house, (places, budget) in HOUSES.items():
        lines = sum(
            len((ROOT / name).read_text().splitlines())
            for name in listed
            if name.startswith(places) and (ROOT / name).exists()
        )
        exceeded |= budget is not None and lines > budget
        print(f"{house:17}{lines:7,d}" + (f" of {budget:,d}" if budget else ""))
    if exceeded:
        sys.exit("over budget: delete something")


if __name__ == "__main__":
    main()
