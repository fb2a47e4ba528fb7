"""Tables in every layout: each row, key and value is read, or counted and named as not read."""

import json
import warnings

import pytest

from helpers.table_layouts import LAYOUTS, random_layout
from rlvet.errors import InvalidValue
from rlvet.runs.logs import read_log
from rlvet.runs.quantities import plain_key

SEEDS = range(480)
"""Seeds that were looked at."""


def losses(seed, folder, layouts=LAYOUTS):
    """Return what of a random table is neither read nor named, and the values that are read as others."""
    layout = random_layout(seed, layouts)
    file = folder / layout.name
    file.write_text(layout.text)
    try:
        log = read_log(file)
    except InvalidValue as error:
        return [f"refused: {str(error)[:200]}"]
    problems = []
    if len(log.rows) + log.unread_rows != layout.rows:
        problems.append(f"{len(log.rows)} + {log.unread_rows} rows of {layout.rows}")
    if bool(log.unread_rows) != any("row" in note and "not read" in note for note in log.notes):
        problems.append(f"{log.unread_rows} unread rows, notes {log.notes}")
    named = {plain_key(key) for keys in log.read.values() for key in keys}
    named |= {plain_key(key) for key in (*log.unread, *log.counters, *log.replaced)}
    problems += [f"key {key}" for key in layout.keys if key not in named]

    rows = {row["step"]: {plain_key(key): value for key, value in row.items()} for row in log.rows}
    for step, values in layout.values.items():
        for key, value in values.items():
            read = rows.get(step, {}).get(key)
            if step in rows and (read is None or abs(read - value) > 1e-9 * max(1, abs(value))):
                problems.append(f"step {step}: {key} is {value}, read {read}")
    unread_values = {plain_key(key): count for key, count in log.unread_values.items()}
    unread_keys = {plain_key(key) for key in (*log.unread, *log.counters)}
    for key, count in layout.unreadable.items():
        if key not in unread_keys and unread_values.get(key) != count:
            problems.append(f"{unread_values.get(key)} of {count} values of {key} are named")
    if set(unread_values) - set(layout.unreadable):
        problems.append(f"values {unread_values} are named, {layout.unreadable} are no numbers")
    return problems


@pytest.mark.parametrize("first", range(SEEDS.start, SEEDS.stop, 60))
def test_nothing_of_a_table_is_lost_in_silence(first, tmp_path):
    found = {seed: losses(seed, tmp_path) for seed in range(first, first + 60)}
    assert not {seed: (random_layout(seed).damage, problems) for seed, problems in found.items() if problems}


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(100_000, 110_000, 500))
def test_nothing_of_ten_thousand_tables_is_lost_in_silence(first, tmp_path):
    found = {seed: losses(seed, tmp_path) for seed in range(first, first + 500)}
    assert not {seed: problems for seed, problems in found.items() if problems}


MARKDOWN = """
| Step | Reward | KL (nats) | Cut off | Length |
|---|:-:|---|---|---|
| **1** | **0.1** | 0.001 | 12.5 % | 1,024 |
| 2 | `0.2` | — | 25% | 1,100 tokens |
| _3_ | 0.3† | 0.003 | 50% | 1.2k |
"""


def read(text, folder, name="table.md"):
    (folder / name).write_text(text)
    return read_log(folder / name)


def test_emphasis_units_and_thousands_are_layout(tmp_path):
    log = read(MARKDOWN, tmp_path)
    assert [row["reward"] for row in log.rows] == [0.1, 0.2, 0.3]
    assert [row.get("kl") for row in log.rows] == [0.001, None, 0.003]
    assert [row["Cut off"] for row in log.rows] == [0.125, 0.25, 0.5]
    assert [row["Length"] for row in log.rows] == [1024, 1100, 1200]
    assert log.unread == ("Cut off", "Length")
    assert log.unread_rows == 0


def test_a_row_without_a_step_and_a_cell_without_a_number_are_named(tmp_path):
    log = read(
        "| step | reward | kl |\n|---|---|---|\n| 1 | 0.1 | 0.01 |\n| 2 | 0.2 | high |\n| mean | 0.15 | 0.02 |\n",
        tmp_path,
    )
    assert [row["reward"] for row in log.rows] == [0.1, 0.2]
    assert log.unread_rows == 1
    assert log.unread_values == {"kl": 1}
    assert "1 row of a table is not read, as it has no step: '| mean | 0.15 | 0.02 |'" in log.notes
    assert "1 value that is no number is not read: 1 of kl, such as 'high'" in log.notes


def test_a_decimal_comma_is_no_thousands_separator(tmp_path):
    log = read("step;reward;kl\n1;0,5;1,024\n2;0,25;2,048\n", tmp_path, "log.csv")
    assert [row["kl"] for row in log.rows] == [1.024, 2.048]
    log = read(
        "| step | reward | tokens |\n|---|---|---|\n| 1 | 0.5 | 1,024 |\n| 2 | 0.5 | 2,048 |\n", tmp_path
    )
    assert [row["tokens"] for row in log.rows] == [1024, 2048]


def test_commas_that_may_be_decimal_are_not_read(tmp_path):
    log = read("step;reward;completion_length\n1;1;1,024\n2;1;2,048\n", tmp_path, "log.csv")
    assert log.unread == ("completion_length",)


def test_names_of_runs_are_no_numbers_with_units(tmp_path):
    (tmp_path / "runs.csv").write_text("run,step,reward\n1x,1,0.1\n2x,1,0.2\n2x,2,0.3\n")
    log = read_log(tmp_path / "runs.csv", run_name="2x")
    assert [row["reward"] for row in log.rows] == [0.2, 0.3]
    assert (log.unread, log.counters) == ((), ("step", "run"))


def test_columns_of_the_same_name_are_both_named(tmp_path):
    log = read("| step | reward | reward |\n|---|---|---|\n| 1 | 0.1 | 9 |\n| 2 | 0.2 | 9 |\n", tmp_path)
    assert [row["reward"] for row in log.rows] == [0.1, 0.2]
    assert log.unread == ("reward (2)",)


def test_a_table_without_steps_beside_one_with_steps_is_named(tmp_path):
    text = MARKDOWN + "\nThe ablation:\n\n| method | reward |\n|---|---|\n| a | 0.5 |\n| b | 0.6 |\n"
    log = read(text, tmp_path)
    assert len(log.rows) == 3
    assert log.unread_rows == 2
    assert "2 rows of a table are not read, as it has no column of steps: '| a | 0.5 |'" in log.notes


def test_a_header_of_two_rows_is_one(tmp_path):
    """pandas prints the name of its index in a second row."""
    text = (
        "<table><thead><tr><th></th><th>reward</th><th>kl</th></tr><tr><th>step</th><th></th><th></th></tr></thead>"
        "<tbody><tr><th>1</th><td>0.1</td><td>0.01</td></tr><tr><th>2</th><td>0.2</td><td>0.02</td></tr></tbody></table>"
    )
    log = read(text, tmp_path, "table.html")
    assert [(row["step"], row["reward"], row["kl"]) for row in log.rows] == [(1, 0.1, 0.01), (2, 0.2, 0.02)]


def test_a_notebook_s_printed_rows_are_read(tmp_path):
    rows = [f"{{'loss': 0.0, 'reward': {0.1 * step:.1f}, 'kl': 0.01}}\n" for step in range(1, 13)]
    output = {"output_type": "stream", "name": "stdout", "text": rows}
    content = {"cells": [{"cell_type": "code", "outputs": [output], "source": []}], "nbformat": 4}
    log = read(json.dumps(content), tmp_path, "train.ipynb")
    assert [row["reward"] for row in log.rows] == [round(0.1 * step, 1) for step in range(1, 13)]
    assert "a notebook" in log.source


def test_a_notebook_without_metrics_says_so(tmp_path):
    content = {"cells": [{"cell_type": "code", "outputs": [], "source": ["trainer.train()"]}], "nbformat": 4}
    with pytest.raises(InvalidValue, match="is a notebook, and none of its outputs has a row of metrics"):
        read(json.dumps(content), tmp_path, "train.ipynb")


def test_keys_of_any_case_are_the_same_in_json(tmp_path):
    rows = [{"STEP": step, "Reward": 0.1 * step, "Completions / Mean Length": 9.0} for step in range(1, 13)]
    log = read("".join(json.dumps(row) + "\n" for row in rows), tmp_path, "metrics.jsonl")
    assert [row["step"] for row in log.rows] == list(range(1, 13))
    assert log.rows[0]["length"] == 9.0
    assert log.read["reward"] == ("Reward",)


def test_values_and_rows_of_json_that_are_not_read_are_named(tmp_path):
    rows = [{"step": step, "reward": 0.1 * step, "kl": 0.1 if step > 2 else "high"} for step in range(1, 13)]
    rows[3] |= {"histogram": [1, 2], "model": "small", "nested": {"kl2": 0.5, "deep": {"x": 1}}}
    rows.append({"train_runtime": 4.0, "step": 13})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log = read("".join(json.dumps(row) + "\n" for row in rows), tmp_path, "metrics.jsonl")
    assert log.unread_values["kl"] == 2
    assert set(log.unread) == {"histogram", "model", "nested/kl2", "nested/deep/x"}
    # The summary of a training is no row that is not read.
    assert log.unread_rows == 0
    assert log.counters == ("step", "train_runtime")


def test_a_short_first_attempt_is_counted(tmp_path):
    rows = [{"step": step, "reward": 0.1} for step in (1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)]
    log = read("".join(json.dumps(row) + "\n" for row in rows), tmp_path, "metrics.jsonl")
    assert len(log.rows) == 11
    assert log.unread_rows == 3
    assert any("3 rows" in note and "restarted" in note for note in log.notes)


def test_a_table_beside_printed_rows_of_a_notebook_is_counted(tmp_path):
    printed = "".join(f"{{'loss': 0.0, 'reward': {0.1 * step:.1f}, 'kl': 0.01}}\n" for step in range(1, 13))
    table = "| step | reward | kl |\n|---|---|---|\n| 1 | 0.5 | 0.1 |\n"
    outputs = [{"output_type": "stream", "text": text} for text in (printed, table)]
    log = read(json.dumps({"cells": [{"outputs": outputs}]}), tmp_path, "train.ipynb")
    assert (len(log.rows), log.unread_rows) == (12, 1)
    assert "1 row of a table is not read, as the printed rows have more values" in log.notes


def test_a_small_table_in_the_output_of_a_loop_does_not_hide_its_rows(tmp_path):
    text = "".join(f"step {step}/30 | Reward: {0.01 * step:.2f} | KL: 0.01\n" for step in range(1, 31))
    table = "\nstep  accuracy  reward\n  10      0.50    0.41\n  20      0.51    0.42\n"
    log = read(text + table, tmp_path, "train.log")
    assert [row["reward"] for row in log.rows] == [round(0.01 * step, 2) for step in range(1, 31)]
    assert log.unread_rows == 2
    log = read("step 1 | Reward: 0.5 | KL: 0.1\n" + MARKDOWN, tmp_path, "train.log")
    assert len(log.rows) == 3
    assert log.unread_rows == 1


UNSEEN = {}
UNSEEN["polars"] = """shape: (3, 3)
┌──────┬────────┬───────┐
│ step ┆ reward ┆ kl    │
│ ---  ┆ ---    ┆ ---   │
│ i64  ┆ f64    ┆ f64   │
╞══════╪════════╪═══════╡
│ 1    ┆ 0.1    ┆ 0.01  │
│ 2    ┆ 0.2    ┆ null  │
│ 3    ┆ 0.3    ┆ 0.03  │
└──────┴────────┴───────┘
"""
UNSEEN["orgtbl"] = """| step | reward | kl |
|------+--------+----|
| 1 | 0.1 | 0.01 |
| 2 | 0.2 | 0.02 |
| 3 | 0.3 | 0.03 |
"""
UNSEEN["double grid"] = """╔════════╦══════════╦══════╗
║   step ║   reward ║   kl ║
╠════════╬══════════╬══════╣
║      1 ║      0.1 ║ 0.01 ║
╠════════╬══════════╬══════╣
║      2 ║      0.2 ║ 0.02 ║
╠════════╬══════════╬══════╣
║      3 ║      0.3 ║ 0.03 ║
╚════════╩══════════╩══════╝
"""
UNSEEN["rich title and caption"] = """          Training of my run
┏━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━┓
┃ Step ┃ Reward ┃ KL                  ┃
┡━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━┩
│ 1    │ 0.1    │ 0.01                │
│ 2    │ 0.2    │ 0.02                │
├──────┼────────┼─────────────────────┤
│ 3    │ 0.3    │ 0.03                │
└──────┴────────┴─────────────────────┘
         32 answers to a prompt
"""
UNSEEN["latex"] = r"""\begin{tabular}{rrr}
\toprule
step & reward & kl \\
\midrule
1 & 0.1 & 0.01 \\
2 & 0.2 & 0.02 \\
3 & \textbf{0.3} & 0.03 \\
\bottomrule
\end{tabular}
"""
UNSEEN["jira"] = """|| step || reward || kl ||
| 1 | 0.1 | 0.01 |
| 2 | 0.2 | 0.02 |
| 3 | 0.3 | 0.03 |
"""
UNSEEN["timestamps before each line"] = """2026-01-01 10:00:00 INFO | step | reward | kl |
2026-01-01 10:00:00 INFO |------|--------|----|
2026-01-01 10:00:01 INFO | 1 | 0.1 | 0.01 |
2026-01-01 10:00:02 INFO | 2 | 0.2 | 0.02 |
2026-01-01 10:00:03 INFO | 3 | 0.3 | 0.03 |
"""
UNSEEN["quoted in an issue"] = """> | step | reward | kl |
> |------|--------|----|
> | 1 | 0.1 | 0.01 |
> | 2 | 0.2 | 0.02 |
> | 3 | 0.3 | 0.03 |
"""
UNSEEN["single spaces"] = "step reward kl\n1 0.1 0.01\n2 0.2 0.02\n3 0.3 0.03\n"
UNSEEN["values with spaces"] = "step, reward, kl\n1, 0.1, 0.01\n2, 0.2, 0.02\n3, 0.3, 0.03\n"
UNSEEN[
    "html by hand"
] = """<html><body><h1>Run</h1><table><tr><td><b>Step</b></td><td>Reward</td><td>KL&nbsp;(nats)</td></tr>
<tr><td>1<td>0.1<td>0.01
<tr><td>2<td>0.2<td>0.02
<tr><td>3<td><font color=red>0.3</font><td>0.03
</table></body></html>"""
UNSEEN["csv with a title"] = "My run\nstep,reward,kl\n1,0.1,0.01\n2,0.2,0.02\n3,0.3,0.03\n"
UNSEEN["csv of excel"] = "sep=;\nStep;Reward;KL\n1;0,1;0,01\n2;0,2;0,02\n3;0,3;0,03\n"
UNSEEN["progress bars between rows"] = """Step | Reward | KL
1 | 0.1 | 0.01
 33%|███▎      | 1/3 [00:05<00:10,  5.00s/it]
2 | 0.2 | 0.02
 66%|██████▋   | 2/3 [00:10<00:05,  5.00s/it]
3 | 0.3 | 0.03
"""
UNSEEN["warnings between rows"] = """step  reward    kl
   1     0.1  0.01
UserWarning: the cache is full  (step  2)
   2     0.2  0.02
   3     0.3  0.03
"""
UNSEEN["colours"] = (
    "\x1b[1mstep\x1b[0m\treward\tkl\n1\t\x1b[32m0.1\x1b[0m\t0.01\n2\t0.2\t0.02\n3\t0.3\t0.03\n"
)

"""Tables of other tools, as text, that were written after the reader. All have the same three rows."""

ENDINGS = {
    "values with spaces": "csv",
    "html by hand": "html",
    "csv with a title": "csv",
    "csv of excel": "csv",
}
"""The ending of each file that is no text."""


@pytest.mark.parametrize("name", UNSEEN)
def test_tables_of_other_tools(name, tmp_path):
    log = read(UNSEEN[name], tmp_path, f"table.{ENDINGS.get(name, 'txt')}")
    assert [(row["step"], row["reward"]) for row in log.rows] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert log.unread_rows == 0
    assert not log.unread_values


def test_a_notebook_of_grpo_with_a_loss_alone_gets_no_verdict(tmp_path):
    rows = "".join(f"<tr><td>{step}</td><td>0.{step}</td></tr>" for step in range(10, 30))
    page = f"<table><tr><th>Step</th><th>Training Loss</th></tr>{rows}</table>"
    for code, message in (
        (
            "trainer = GRPOTrainer(model)",
            "gets no verdict: it is of a run of GRPO, of which only loss was printed",
        ),
        ("trainer = SFTTrainer(model)", "is thought to be of supervised training"),
    ):
        cells = [{"source": [code], "outputs": [{"data": {"text/html": page}}]}]
        with pytest.raises(InvalidValue, match=message):
            read(json.dumps({"cells": cells}), tmp_path, "train.ipynb")
