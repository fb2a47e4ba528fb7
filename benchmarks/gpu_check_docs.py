"""Write the results of `gpu_check.py` into research/reports/benchmarks.md, between its two markers.

python benchmarks/gpu_check_docs.py            # updates the page
python benchmarks/gpu_check_docs.py --check    # exits with 1 if the page does not match the results
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_check.json"
PAGE = ROOT / "research" / "reports" / "benchmarks.md"
START, END = "<!-- measured: benchmarks/gpu_check_docs.py -->\n", "<!-- end of measured -->\n"
NOT_YET = "not yet measured"
# The goals: at least this share of a copy's speed, and at most these ratios to the baselines and seconds of the host.
COPY_SHARE = 0.6
TEXTBOOK_RATIO = 1.2
HOST_SECONDS = 60e-6
HEAD_RATIO = 1.0
STEP_RATIO = 1.01


def table(header, rows):
    """Return a Markdown table with its first column left-aligned and the other columns right-aligned."""
    rules = ["---"] + ["---:"] * (len(header) - 1)
    lines = ([cell.replace("|", "\\|") for cell in cells] for cells in (header, rules, *rows))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def pivot(corner, cells):
    """Return a table of a dictionary of rows, each a dictionary by column. Missing cells are empty."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = [[name, *(row.get(column, "") for column in columns)] for name, row in cells.items()]
    return table([corner, *columns], rows)


def format_ratio(paired):
    """Format a ratio with its quartiles and its number of pairs."""
    return f"{paired['ratio']:.3f} ({paired['low']:.3f} to {paired['high']:.3f}, {paired['pairs']} pairs)"


def gibibytes(peak):
    """Format a number of bytes in GiB; return a string, the reason for a missing number, unchanged."""
    return peak if isinstance(peak, str) else f"{peak / 2**30:.2f}"


def goal_row(name, value, word, limit):
    """Return a row of the table of goals: name, goal, measured value (None if not measured), and if it is met."""
    aim = [name, f"{word} {limit}"]
    if value is None:
        return [*aim, NOT_YET, ""]
    met = value >= limit if word == "at least" else value <= limit
    return [*aim, f"{value:.3f}", "yes" if met else "no"]


def goals(sections):
    """Return the table of the goals and their results."""
    rows = [*loss_goals(sections.get("losses", {}).get("rows", ())), *head_goals(sections)]
    steps = [row for name, part in sections.items() if name.startswith("trl ") for row in part["rows"]]
    for row in steps:
        if row["arm"] != "GRPOTrainer":
            name = f"TRL step, {row['model']}, {row['arm']}: times GRPOTrainer's"
            rows.append(goal_row(name, row["batch"]["ratio"], "at most", STEP_RATIO))
    if not steps:
        rows.append(goal_row("TRL step: times GRPOTrainer's", None, "at most", STEP_RATIO))
    return table(["goal", "aim", "measured", "met"], rows)


def loss_goals(rows):
    """Return the rows of the goals for Band with kernels and compiled, at the largest shape and at the worst."""
    measured = [row for row in rows if "device" in row]
    by_name = defaultdict(dict)
    for row in measured:
        by_name[row["contestant"]][tuple(row["shape"])] = row
    textbook = by_name["textbook clip 0.2, compiled"]
    return [
        *band_goals("Band with kernels", by_name["Band(KL(), 0.05), kernels, 21 bytes"], textbook),
        *band_goals("compiled Band", by_name["Band(KL(), 0.05), compiled"], textbook),
    ]


def band_goals(name, band, textbook):
    """Return the rows of the goals for one way to compute Band, from its rows and those of the textbook by shape."""
    case = f"{name}, forward and backward"
    largest = max(band.values(), key=lambda row: row["tokens"], default=None)
    ratios = [band[shape]["device"] / textbook[shape]["device"] for shape in band if shape in textbook]
    hosts = [row["host"] * 1e6 for row in band.values()]
    tokens = f", {largest['tokens']:,} tokens" if largest else ""
    return [
        goal_row(
            f"{case}{tokens}: share of a copy's speed", largest and largest["of_copy"], "at least", COPY_SHARE
        ),
        goal_row(
            f"{case}, worst shape: times the compiled textbook clip",
            max(ratios, default=None),
            "at most",
            TEXTBOOK_RATIO,
        ),
        goal_row(
            f"{case}, worst shape: µs of the host", max(hosts, default=None), "at most", HOST_SECONDS * 1e6
        ),
    ]


def head_goals(sections):
    """Return the rows of the goal for the head without logits, without kernels and with them."""
    seconds = {row["variant"]: row.get("seconds") for row in sections.get("head", {}).get("rows", ())}
    full = seconds.get("full logits")
    rows = []
    for variant in ("linear_logp", "linear_logp, kernels=True"):
        ours = seconds.get(variant)
        ratio = ours / full if ours and full else None
        rows.append(goal_row(f"{variant}: times full logits", ratio, "at most", HEAD_RATIO))
    return rows


def device(rows):
    """Return the table of the device's times, their share of a copy's speed, and the host's times."""
    cells = defaultdict(dict)
    compared = [row for row in rows if row.get("what") == "decisions"]
    for row in rows:
        if row in compared:
            continue
        shape = "{} × {:,}".format(*row["shape"])
        if "device" not in row:
            cell = row.get("skipped") or f"failed: {row['failed'].splitlines()[0]}"
        elif row["contestant"] == "copy":
            cell = f"{row['device'] * 1e3:.3f} ms"
        else:
            cell = f"{row['device'] * 1e3:.3f} ms ({row['of_copy']:.2f}), {row['host'] * 1e6:.0f} µs"
        cells[row["contestant"]][shape] = cell
    return (
        "The time of the device for one call, in brackets its share of a copy's speed if every tensor is moved once "
        "(28 bytes a token for a loss, forward and backward, or as its name says, 12 for the bounds), and the time of "
        "the host.\n\n"
        f"{pivot('rows × tokens', cells)}" + (f"\n\n{decisions(compared)}" if compared else "")
    )


def decisions(rows):
    """Return the table of the clip decisions of the kernels against those of the loss without them."""
    cells = []
    for row in rows:
        if "differ" in row:
            counts = [f"{row[key]:,}" for key in ("tokens", "differ", "beyond_rounding", "at_a_bound")]
            cells.append([row["contestant"], *counts, f"{row['gradient']:.1e}"])
        else:
            cells.append(
                [row["contestant"], f"{row['tokens']:,}", row.get("skipped") or row["failed"], "", "", ""]
            )
    header = [
        "kernels against eager",
        "tokens",
        "decisions that differ",
        "not at a bound",
        "tokens at a bound",
    ]
    return table([*header, "gradient, largest difference"], cells)


def habits(rows):
    """Return the table of checks, with the number of losses for each outcome."""
    outcomes = defaultdict(lambda: defaultdict(list))
    buffers = {}
    for row in rows:
        outcome = row["found"] if "found" in row else f"failed: {row['failed'].splitlines()[0]}"
        if isinstance(outcome, float):
            buffers[row["of"]] = {"peak, in tensors of the tokens' size": f"{outcome:.2f}"}
        else:
            outcomes[row["check"]][str(outcome)].append(row["of"])
    cells = [
        [check, "; ".join(f"{outcome} ({len(losses)})" for outcome, losses in by_outcome.items())]
        for check, by_outcome in outcomes.items()
    ]
    text = table(["check", "outcome (of how many losses)"], cells)
    if buffers:
        text += f"\n\n{pivot('forward and backward, the gradient included', buffers)}"
    return text


def trl(rows):
    """Return the table of TRL's trainers for one model."""
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
            *(
                ["1", "1"]
                if row["arm"] == "GRPOTrainer"
                else [format_ratio(row["batch"]), format_ratio(row["update"])]
            ),
            gibibytes(row["peak"]),
        ]
        for row in rows
    ]
    return f"{lead}\n\n{table(header, cells)}"


def head(rows):
    """Return the table of time and memory by variant."""
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
    """Return the table of the worst relative errors of the margins."""
    cells = defaultdict(dict)
    for row in rows:
        cell = row.get("skipped") or f"{row['error']:.1e}"
        cells[row["divergence"]][f"{row['dtype']}, {row['mode']}"] = cell
    return pivot("divergence", cells)


TITLES = {
    "losses": "Losses, forward and backward",
    "bounds": "Bounds",
    "habits": "Synchronisation, graphs, buffers",
    "trl": "A TRL step",
    "head": "From hidden states to a loss",
    "accuracy": "Accuracy: worst relative error of the margins",
}
BODIES = {
    "losses": device,
    "bounds": device,
    "habits": habits,
    "trl": trl,
    "head": head,
    "accuracy": accuracy,
}


def describe_stamp(stamp):
    """Return where and when a section was measured, and with which versions."""
    packages = ("torch", "triton", "transformers", "trl", "liger-kernel", "verl")
    versions = ", ".join(f"{package} {stamp[package]}" for package in packages if stamp.get(package))
    size = "in the small form, whose times mean nothing" if stamp["small"] else "in full"
    return f"on {stamp['device']} on {stamp['date']}, {size}, at revision {stamp['revision']}: {versions}"


def block(results):
    """Return the text between the markers, from the JSON of `gpu_check.py` or, if there is none, from None."""
    if results is None:
        return f"On a GPU: {NOT_YET}."
    paragraphs = [goals(results)]
    for name, section in results.items():
        kind, _, model = name.partition(" ")
        status = section["status"]
        if status == "skipped":
            status += f": {section['reason']}"
        elif status == "failed":
            status += f": {section['error'].strip().splitlines()[-1]}"
        else:
            status += f" in {section['seconds']:.0f} s"
        measured = describe_stamp(section["stamp"])
        paragraphs.append(f"**{TITLES[kind]}{model and ', ' + model}** ({status}). Measured {measured}.")
        if section["rows"]:
            paragraphs.append(BODIES[kind](section["rows"]))
    return "\n\n".join(paragraphs)


def updated_page(page, results=RESULTS):
    """Return the text of the page with the results, or with a note that there are none.

    Raises:
        ValueError: if the page has no markers.
    """
    data = json.loads(results.read_text()) if results.exists() else None
    before, start, marked = page.partition(START)
    _, end, after = marked.partition(END)
    if not (start and end):
        raise ValueError(f"the page has no markers {START.strip()} and {END.strip()}; add them")
    return f"{before}{START}\n{block(data)}\n\n{END}{after}"


def update_page():
    """Write the page."""
    PAGE.write_text(updated_page(PAGE.read_text()))


def main():
    """Update the page, or check it with ``--check``."""
    if "--check" not in sys.argv:
        update_page()
    elif updated_page(PAGE.read_text()) != PAGE.read_text():
        sys.exit(f"error: {PAGE} does not match the results; run python benchmarks/gpu_check_docs.py")


if __name__ == "__main__":
    main()
