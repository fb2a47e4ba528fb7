"""Writes what `gpu_check.py` measured into docs/measured/benchmarks.md, between its two marks.

python benchmarks/gpu_check_docs.py            # renews the page
python benchmarks/gpu_check_docs.py --check    # exits with 1 where the page is not what the data say
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_check.json"
PAGE = ROOT / "docs" / "measured" / "benchmarks.md"
START, END = "<!-- measured: benchmarks/gpu_check_docs.py -->\n", "<!-- end of measured -->\n"
NOT_YET = "not yet measured"
# The least share of copy bandwidth; the most, in units of what it is compared with.
COPY_SHARE, TEXTBOOK_RATIO, STEP_RATIO = 0.8, 1.1, 1.01


def table(header, rows):
    """Markdown; the first column names the row."""
    rules = ["---"] + ["---:"] * (len(header) - 1)
    lines = ([cell.replace("|", "\\|") for cell in cells] for cells in (header, rules, *rows))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def pivot(corner, cells):
    """A table from a dictionary of dictionaries, column by row; what is missing is left empty."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = [[name, *(row.get(column, "") for column in columns)] for name, row in cells.items()]
    return table([corner, *columns], rows)


def spread(against):
    """A ratio with its quartiles and number of pairs."""
    return f"{against['ratio']:.3f} ({against['low']:.3f} to {against['high']:.3f}, {against['pairs']} pairs)"


def gibibytes(peak):
    """A number of bytes; a reason why there is none stays as it is."""
    return peak if isinstance(peak, str) else f"{peak / 2**30:.2f}"


def judged(name, value, word, limit):
    """A row: what was aimed at, what came out (None where nothing did), and whether that is good enough."""
    aim = [name, f"{word} {limit}"]
    if value is None:
        return [*aim, NOT_YET, ""]
    met = value >= limit if word == "at least" else value <= limit
    return [*aim, f"{value:.3f}", "yes" if met else "no"]


def goals(sections):
    """What was aimed at, and whether it is met."""
    compiled = [
        row
        for row in sections.get("speed", {}).get("rows", ())
        if row["what"] == "loss" and row.get("contestant", "").endswith(", compiled")
    ]
    # Judged where the device is full; smaller batches are launches more than work.
    most = max((row["tokens"] for row in compiled), default=0)
    largest = {row["contestant"]: row for row in compiled if row["tokens"] == most}
    band, textbook = (largest.get(f"{name}, compiled") for name in ("Band(KL(), 0.05)", "textbook clip 0.2"))
    where = "compiled Band, forward and backward" + (f", {most:,} tokens" if most else "")
    ratio = band and textbook and band["seconds"] / textbook["seconds"]
    rows = [
        judged(f"{where}: share of copy bandwidth", band and band["of_copy"], "at least", COPY_SHARE),
        judged(f"{where}: times the compiled textbook clip", ratio, "at most", TEXTBOOK_RATIO),
    ]
    steps = [row for name, part in sections.items() if name.startswith("trl ") for row in part["rows"]]
    for row in steps:
        if row["arm"] != "GRPOTrainer":
            name = f"TRL step, {row['model']}, {row['arm']}: times GRPOTrainer's"
            rows.append(judged(name, row["batch"]["ratio"], "at most", STEP_RATIO))
    if not steps:
        rows.append(judged("TRL step: times GRPOTrainer's", None, "at most", STEP_RATIO))
    return table(["goal", "aim", "measured", "met"], rows)


def speed(rows):
    """Milliseconds, and the share of copy bandwidth."""
    cells = defaultdict(dict)
    for row in rows:
        if row["what"] == "copy":
            copy = f"{row['bytes_per_second'] / 1e9:,.0f} GB/s"
            continue
        name = f"{row['what']}: {row.get('contestant', 'all')}"
        cell = row.get("skipped") or f"{row['seconds'] * 1e3:.3f} ms ({row['of_copy']:.2f})"
        cells[name][f"{row['tokens']:,} tokens"] = cell
    return (
        f"A copy moves {copy}, read and written. In brackets the share of it that is reached, if every tensor is moved "
        f"once (28 bytes a token for the loss, 12 for the bounds).\n\n{pivot('', cells)}"
    )


def habits(rows):
    """How often each check came out how."""
    outcomes, buffers = defaultdict(lambda: defaultdict(list)), {}
    for row in rows:
        found = row["found"] if "found" in row else f"failed: {row['failed'].splitlines()[0]}"
        if isinstance(found, float):
            buffers[row["of"]] = {"peak, in tensors of the tokens' size": f"{found:.2f}"}
        else:
            outcomes[row["check"]][str(found)].append(row["of"])
    cells = [
        [check, "; ".join(f"{found} ({len(of)})" for found, of in by_outcome.items())]
        for check, by_outcome in outcomes.items()
    ]
    text = table(["check", "outcome (of how many losses)"], cells)
    return text + (f"\n\n{pivot('forward and backward, the gradient included', buffers)}" if buffers else "")


def trl(rows):
    """The trainers by model."""
    header = [
        "trainer",
        "s a batch",
        "times GRPOTrainer (quartiles)",
        "an update alone",
        "peak, GiB",
    ]
    lead = f"{rows[0]['parameters'] / 1e6:,.1f} M parameters, bfloat16, a batch of generation, scoring and 4 updates."
    cells = [
        [
            row["arm"],
            f"{row['seconds']:.3f}",
            *(["1", "1"] if row["arm"] == "GRPOTrainer" else [spread(row["batch"]), spread(row["update"])]),
            gibibytes(row["peak"]),
        ]
        for row in rows
    ]
    return f"{lead}\n\n{table(header, cells)}"


def head(rows):
    """Time and memory by variant."""
    lead = "Vocabulary {vocabulary:,}, {tokens:,} tokens, width {width:,}, bfloat16.".format(**rows[0])
    cells = {
        row["variant"]: {"": row["skipped"]}
        if "skipped" in row
        else {
            "ms": f"{row['seconds'] * 1e3:.1f}",
            "peak growth, GiB": gibibytes(row["peak"]),
            "loss": f"{row['loss']:.5f}",
            "norm of the gradient": f"{row['gradient']:.5f}",
        }
        for row in rows
    }
    return f"{lead}\n\n{pivot('loss', cells)}"


def accuracy(rows):
    """Worst relative error of the margins."""
    cells = defaultdict(dict)
    for row in rows:
        cell = row.get("skipped") or f"{row['error']:.1e}"
        cells[row["divergence"]][f"{row['dtype']}, {row['mode']}"] = cell
    return pivot("divergence", cells)


TITLES = {
    "speed": "Bounds and losses against a copy",
    "habits": "Synchronisation, graphs, buffers",
    "trl": "A TRL step",
    "head": "From hidden states to a loss",
    "accuracy": "Accuracy: worst relative error of the margins",
}
BODIES = {"speed": speed, "habits": habits, "trl": trl, "head": head, "accuracy": accuracy}


def block(results):
    """What stands between the marks, for the JSON of `gpu_check.py`, or None."""
    if results is None:
        return f"On a GPU: {NOT_YET}."
    stamp = results["stamp"]
    packages = ("torch", "triton", "transformers", "trl", "liger-kernel", "verl")
    versions = ", ".join(f"{k} {stamp[k]}" for k in packages if stamp.get(k))
    size = "in the small form, whose times mean nothing" if stamp["small"] else "in full"
    parts = [
        f"Measured on {stamp['device']} on {stamp['date']}, {size}, at revision {stamp['revision']}: {versions}.",
        goals(results["sections"]),
    ]
    for name, found in results["sections"].items():
        kind, _, model = name.partition(" ")
        ended = found["status"]
        if ended == "skipped":
            ended += f": {found['reason']}"
        elif ended == "failed":
            ended += f": {found['error'].strip().splitlines()[-1]}"
        else:
            ended += f" in {found['seconds']:.0f} s"
        parts.append(f"**{TITLES[kind]}{model and ', ' + model}** ({ended}).")
        if found["rows"]:
            parts.append(BODIES[kind](found["rows"]))
    return "\n\n".join(parts)


def renewed(page, results=RESULTS):
    """The text of the page with what the data say, or that there are none."""
    found = json.loads(results.read_text()) if results.exists() else None
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"the page has lost its marks {START.strip()} and {END.strip()}")
    return f"{before}{START}\n{block(found)}\n\n{END}{after}"


def renew():
    """Write the page."""
    PAGE.write_text(renewed(PAGE.read_text()))


def main():
    """Renew or check."""
    if "--check" not in sys.argv:
        renew()
    elif renewed(PAGE.read_text()) != PAGE.read_text():
        sys.exit(f"error: {PAGE} is not what the data say; run python benchmarks/gpu_check_docs.py")


if __name__ == "__main__":
    main()
