"""Write the table of results into README.md, between its two marks, from the study's data.

python scripts/readme_results.py            # after a study: renews the table
python scripts/readme_results.py --check    # exits with 1 where README.md is not what the data say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bandpo.lab.study.collect import read_records
from bandpo.lab.study.plan import parse_study
from bandpo.lab.study.tables import glance_table

ROOT = Path(__file__).parent.parent
DATA = ROOT / "results" / "clipping" / "results.json"
START, END = "<!-- results: scripts/readme_results.py -->\n", "<!-- end of results -->\n"


def renewed(readme: str, data: Path = DATA) -> str:
    """The text of README.md with the table that the data give."""
    results = json.loads(data.read_text())
    table = glance_table(parse_study(results["study"]), read_records(results))
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table.markdown()}\n\n{table.caption}\n\n{END}{after}"


def main() -> None:
    """Renew or check."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    new = renewed(text)
    if "--check" not in sys.argv:
        readme.write_text(new)
    elif new != text:
        sys.exit("error: README.md's results are not those of the data; run python scripts/readme_results.py")


if __name__ == "__main__":
    main()
