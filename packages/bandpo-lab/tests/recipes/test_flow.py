"""Each row of docs/paper.md, and each step of docs/install.md to a job, runs as far as a CPU without the network goes.

One whose command fails is a failure.
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from helpers.frameworks import needs

needs("verl")

from bandpo_lab.cli.app import app
from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.cluster.modes import ModeName, entry_point
from bandpo_lab.data.authors import STYLES
from bandpo_lab.data.prepare import prepare_data
from bandpo_lab.data.sets import HUB
from bandpo_lab.models.downloads import hub_model
from bandpo_lab.rehearsal.inputs import write_model
from helpers.hub import Hub, Repository, serving
from pages import ROOT, commands
from rlvet.errors import InvalidValue
from variants import names

# A rehearsal trains twice, and each of its trainings may take as long as its own limit allows.
pytestmark = pytest.mark.timeout(1800)

PAGE = ROOT / "docs/paper.md"
REPORT = ROOT / "research/reports/recipes.md"
ONE_CARD = ROOT / "research/reports/one-card.md"
VALUES = {"MODEL": names("model"), "METHOD": names("rule")}
ONE = {"MODEL": "qwen2.5-3b-instruct", "METHOD": "band-kl", "JOB": "raysubmit_1", "HOST": "localhost"}


class Expected(NamedTuple):
    """What a command prints, and the exit status with which it ends."""

    printed: list[str]
    status: int = 0


EXPECTED = {
    r"bandpo-lab setup .*--dry-run": Expected(["(the recipe's)", "(bandpo's)"]),
    r"bandpo-lab setup .*--settings authors": Expected(["export BANDPO_DATA="]),
    r"bandpo-lab setup": Expected(
        ["data/models/deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B/ad9f0ae0864d7fbcd1cd905e3c6c5b069cc8b562"]
    ),
    r"bandpo-lab preflight": Expected(["packages: Python", "CUDA compiler:"], status=1),
    r"bandpo-lab data prepare .*--authors": Expected(["for verl data/authors/verl"]),
    r"bandpo-lab data prepare": Expected(["for verl data/verl"]),
    r"bandpo-lab run verl .*--rehearse": Expected(["REHEARSAL PASSED"]),
    r"bandpo-lab run verl .*arm=filter-groups": Expected(["+paper/arm=filter-groups"]),
    r"bandpo-lab run verl .*arm=dapo": Expected(["+paper/arm=dapo"]),
    r"bandpo-lab run verl .*--task commonsenseqa": Expected(["+paper/task=commonsenseqa"]),
    r"bandpo-lab run verl .*--task apps": Expected(["+paper/task=apps"]),
    r"bandpo-lab run verl": Expected(["verl.trainer.main_ppo"]),
    r"recipes/cluster\.sh head": Expected(["ray start --head"]),
    r"recipes/launch\.sh submit": Expected(["ray job submit"]),
    r"recipes/job\.sh status": Expected(["ray job status"]),
    r"sbatch recipes/slurm\.sbatch": Expected(["ray start --block"]),
    r"bandpo-lab recipes summary": Expected(["GB of GPU memory allocated"]),
    r"rlvet report": Expected(["curves.html"]),
    r"bandpo bounds": Expected(["0.08"]),
    r"wandb sync": Expected(["wandb login"], status=1),
    r"python -m verl\.model_merger": Expected(["Saving tokenizer to models/step-20"]),
    r"bandpo-lab eval": Expected(["mean@32", "pass@32"]),
    r"hf upload": Expected(["Uploaded"]),
    r"hf download": Expected(["models/qwen"]),
}
"""What the commands of the table print, by the first expression that matches a command."""


class Row(NamedTuple):
    """A step: the command that the page gives, the one that is tested, and how it is to end."""

    step: str
    command: str
    tested: str
    status: int
    printed: list[str]


def cells(name: str, page: Path = PAGE) -> list[list[str]]:
    """The rows of a table of a page, between its marks."""
    (table,) = re.findall(
        rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", page.read_text(encoding="utf-8"), re.S
    )
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def shortened(command: str) -> str:
    """The command as far as a CPU without the network goes."""
    if command.startswith("bandpo-lab run verl") and "--rehearse" not in command:
        return f"{command} --dry-run"
    if command.startswith("bandpo-lab eval"):
        return f"{command} --limit 1 --max-new-tokens 4"
    return re.sub(r"^(recipes/\w+\.sh)", r"\1 --dry-run", command.removeprefix("sbatch "))


def expression_of(command: str) -> str:
    return next(expression for expression in EXPECTED if re.match(expression, command))


def read(row: list[str]) -> Row:
    step, here = (cell.strip("| ") for cell in row)
    command = re.findall("`([^`]+)`", here)[0]
    tested = shortened(command)
    if command.startswith("sbatch"):
        tested = f"bash {tested}"  # outside of Slurm the script prints what it would execute
    expected = EXPECTED[expression_of(command)]
    return Row(step, command, tested, expected.status, expected.printed)


ROWS = [read(row) for row in cells("flow")]


def once(rows: list[Row]) -> list[Row]:
    """The rows, those of the same command and end as one."""
    by_command: dict[tuple[str, int], Row] = {}
    for row in rows:
        same = by_command.setdefault((row.tested, row.status), row._replace(printed=[]))
        same.printed.extend(row.printed)
    return list(by_command.values())


def filled(text: str, **values: str) -> str:
    for name, value in (ONE | values).items():
        text = re.sub(rf"\b{name}\b", value, text)
    return text


def test_the_table_has_a_command_and_an_end_for_each_step():
    assert len(ROWS) >= 25
    assert {expression_of(row.command) for row in ROWS} == EXPECTED.keys()
    page = PAGE.read_text()
    listed = {
        name: re.findall("`([^`]+)`", re.search(rf"- {name} is any of (.*?)\.(?: |\n)The", page, re.S)[1])
        for name in VALUES
    }
    assert {name: sorted(of_name) for name, of_name in listed.items()} == {
        n: sorted(v) for n, v in VALUES.items()
    }


def repository(name: str, first: int) -> Repository:
    """A set of a few rows that no other set has, in the form of the hub's."""
    hub = HUB[name]
    words = ("apples", "pears", "plums", "nuts", "figs", "dates", "limes", "kiwis", "melons", "grapes")
    numbers = range(first, first + 3)
    problems = [f"{words[i % 10]} in {i} boxes of {i * i} {words[i * 7 % 10]} each?" for i in numbers]
    rows = [{"problem": problem, "answer": str(i**3)} for problem, i in zip(problems, numbers, strict=True)]
    if hub.ability == "commonsense":
        texts = [[f"{i * k} {words[(i + k) % 10]}" for k in range(5)] for i in numbers]
        choices = [{"label": list("ABCDE"), "text": text} for text in texts]
        rows = [
            {"question": row["problem"], "choices": choice, "answerKey": "B"}
            for row, choice in zip(rows, choices, strict=True)
        ]
    if hub.ability == "code":
        tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
        rows = [{"question": row["problem"], "input_output": tests} for row in rows]
    if hub.levels:
        rows = [row | {"level": hub.levels[0]} for row in rows]
    if hub.file is not None:
        return Repository(hub.revision, {hub.file: "".join(json.dumps(row) + "\n" for row in rows).encode()})
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    card = f"---\nlicense: mit\nconfigs:\n- config_name: {hub.config or 'default'}\n  data_files:\n"
    card += f"  - split: {hub.split}\n    path: {hub.split}.parquet\n---\n"
    return Repository(hub.revision, {"README.md": card.encode(), f"{hub.split}.parquet": file.getvalue()})


@pytest.fixture(scope="module")
def hub():
    """The models and sets of the recipes, tiny, at the commits that they name."""
    repositories = {}
    for k, name in enumerate(HUB):
        found = repository(name, 10 * k + 1)
        key = ("datasets", HUB[name].repo)
        files = repositories[key].files | found.files if key in repositories else found.files
        repositories[key] = Repository(found.sha, files)
    for name in VALUES["MODEL"]:
        model = hub_model(name, SHIPPED)
        repositories["models", model.repo] = Repository(
            model.revision, {"config.json": b"{}", "model.safetensors": b"w"}
        )
    with serving(Hub(repositories)) as served:
        yield served


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """What the rows start from: the recipes, prepared data, a model, a log, and a run of W&B."""
    folder = tmp_path_factory.mktemp("w")
    shutil.copytree(SHIPPED, folder / "recipes")
    (folder / "aime24.jsonl").write_text(json.dumps({"problem": "What is 20 + 3?", "answer": "23"}))
    prepare_data([str(folder / "aime24.jsonl")], folder / "data", golds="keep")
    write_model("Qwen/Qwen2.5-3B-Instruct", folder / "models/band-kl")
    (folder / "runs/qwen2.5-3b-instruct-band-kl").mkdir(parents=True)
    (folder / "runs/notes.txt").write_text("a run\n")
    metrics = "actor/entropy:{0} - actor/grad_norm:0.{1} - actor/kl_loss:0.001 - critic/score/mean:0.{1} - "
    metrics += "timing_s/step:109.{1} - timing_s/gen:36.0 - perf/max_memory_allocated_gb:122.8"
    lines = [f"(TaskRunner pid=7) step:{i} - {metrics.format(0.5 - i / 200, 10 + i)}\n" for i in range(1, 31)]
    (folder / "LOG").write_text("".join(lines))
    return folder


def surroundings(home: Path, hub: Hub) -> dict[str, str]:
    """The environment of a command: this Python's programs, the hub of the tests, and nothing of the user's."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home / "home"),
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home / "cache"),
        "HF_TOKEN": "hf_of_the_tests",
        "HF_HUB_DISABLE_XET": "1",
        "COLUMNS": "200",
    }
    environment.pop("WANDB_API_KEY", None)
    return environment


def run(command: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1700,
    )


@pytest.fixture
def here(workspace, tmp_path, hub):
    """A copy of the workspace for one row, and the environment in it."""
    folder = tmp_path / "w"
    shutil.copytree(workspace, folder)
    return folder, surroundings(tmp_path, hub)


REHEARSAL = "bandpo-lab run verl --model qwen2.5-3b-instruct --method band-kl --rehearse"


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory, hub):
    """The rehearsal of the recommended recipe, made once, and its folder."""
    folder = tmp_path_factory.mktemp("r")
    found = run(REHEARSAL, folder, surroundings(folder, hub))
    named = re.search(r"logs and metrics are in (/\S+)", found.stdout)
    assert named, found.stdout[-3000:]
    yield found, Path(named[1])
    shutil.rmtree(named[1], ignore_errors=True)


@pytest.mark.slow
def test_the_rehearsal_passes_each_check_and_leaves_two_legs(rehearsed):
    found, folder = rehearsed
    assert found.returncode == 0, found.stdout[-3000:]
    passed = re.findall(r"^ok (.*?): ", found.stdout, re.M)
    assert passed == ["settings", "training", "policy loss", "clip", "loss by hand", "metrics", "reward", "gradient",
        "weight sync", "validation", "checkpoint", "resume"]  # fmt: skip
    # The gradients are those of training, and not of the synthetic batch of 72 tokens that verl's loss is checked with.
    [tokens] = re.findall(r"the rule changed the gradient of \d+ of (\d+) tokens", found.stdout)
    assert int(tokens) > 1000
    assert "made up" in found.stdout
    assert "  actor_rollout_ref.rollout.name: vllm → transformers" in found.stdout
    legs = folder / "checkpoints/legs"
    assert {"config.yaml", "run.json"} <= {file.name for file in (legs / "0002").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("row", once(ROWS), ids=lambda row: row.tested[:60].replace("/", " "))
def test_each_row_of_the_flow_runs(row, here, request):
    folder, environment = here
    run_folder = folder / "runs/qwen2.5-3b-instruct-band-kl"
    if row.tested == REHEARSAL:
        found, _ = request.getfixturevalue("rehearsed")
    else:
        if "verl.model_merger" in row.command:
            _, of_rehearsal = request.getfixturevalue("rehearsed")
            shutil.copytree(of_rehearsal / "checkpoints/global_step_3", run_folder / "global_step_20")
        if row.command.startswith("wandb"):
            leg = run_folder / "legs/0001"
            leg.mkdir(parents=True)
            code = "import sys, wandb; wandb.init(mode='offline', project='p', dir=sys.argv[1]).log({'a': 1})"
            run(f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {leg}", folder, environment)
        found = run(filled(row.tested), folder, environment)
    assert found.returncode == row.status, found.stdout[-3000:]
    for text in row.printed:
        assert filled(text) in found.stdout, found.stdout[-3000:]
    if "verl.model_merger" in row.command:
        merged = {file.name for file in (folder / "models/step-20").iterdir()}
        assert {"model.safetensors", "config.json", "tokenizer.json"} <= merged


STEP = re.compile(
    r"^\*\*(?P<number>\d)\. .*?```sh\n(?P<commands>.*?)```\n\nEnds with `(?P<end>[^`]+)`(?P<after>.*?)$",
    re.M | re.S,
)


def first_job() -> list[re.Match]:
    """The steps of docs/install.md from a bare machine to a job."""
    page = (ROOT / "docs/install.md").read_text()
    (section,) = re.findall(r"^## From a bare machine to a job\n(.*?)^## ", page, re.M | re.S)
    return list(STEP.finditer(section))


@pytest.mark.slow
def test_each_step_from_a_bare_machine_to_a_job_ends_as_the_page_says(rehearsed, tmp_path, hub):
    """All but the installation, which `make node-rehearsal` does each night by the same commands."""
    steps = first_job()
    assert [step["number"] for step in steps] == list("1234567")
    assert "pip install" in steps[0]["commands"]
    for step in steps[1:]:
        command = step["commands"].strip()
        found = rehearsed[0] if command == REHEARSAL else run(command, tmp_path, surroundings(tmp_path, hub))
        assert found.returncode == (1 if "exit status 1" in step["after"] else 0), found.stdout[-3000:]
        assert step["end"] in found.stdout.splitlines()[-1], (command, found.stdout[-3000:])


def told(words: list[str]) -> list[str]:
    """What `bandpo-lab run verl` would execute."""
    found = CliRunner().invoke(app, [*words, "--dry-run"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return shlex.split(found.output.splitlines()[-1])


def announced(words: list[str]):
    """The check of a run's settings at full size, and what the run says that it is."""
    from bandpo_lab.rehearsal.preflight import validate
    from bandpo_lab.rehearsal.shrink import compose

    overrides = told(words)
    mode: ModeName = words[words.index("--mode") + 1] if "--mode" in words else "sync"
    start = ["", *entry_point(mode).command(SHIPPED)]
    assert overrides[1 : len(start)] == start[1:]
    config = compose(overrides[len(start) :], SHIPPED, entry_point(mode).config_name)
    return validate(config), config


def runs_of_recipes() -> list[list[str]]:
    """The words of each run of verl on the page, without the options that keep it from training, and of each mode."""
    words_of_runs = [*commands(PAGE, "bandpo-lab"), *commands(ONE_CARD, "bandpo-lab")]
    run = ["run", "verl", "--model", ONE["MODEL"], "--method", ONE["METHOD"]]
    words_of_runs += [[*run, "--mode", mode] for mode in get_args(ModeName)]
    found: dict[tuple[str, ...], None] = {}
    for words in words_of_runs:
        # The table's rows have their own test.
        if words[:2] == ["run", "verl"] and "--method" in words and not VALUES.keys() & {*words}:
            found[tuple(word for word in words if word not in ("--rehearse", "--one-step"))] = None
    return [list(words) for words in found]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:set sequence parallel to false")  # verl's, with Megatron
@pytest.mark.parametrize("words", runs_of_recipes(), ids=lambda words: " ".join(words[6:]) or "plain")
def test_verl_accepts_each_run_on_the_page_of_recipes(words):
    checked, _ = announced(words)
    assert checked.ok, checked.detail


def test_the_page_of_recipes_has_runs():
    assert len(runs_of_recipes()) > 10


def runs() -> list[object]:
    """Every run that the table names, for each model and, with the first model, each method; one of a row each day."""
    found = []
    for row in ROWS:
        if not row.command.startswith("bandpo-lab run verl") or "--rehearse" in row.command:
            continue
        pairs = [{"MODEL": model} for model in VALUES["MODEL"]]
        pairs += [{"METHOD": rule} for rule in VALUES["METHOD"]] if "METHOD" in row.command else []
        of_row = dict.fromkeys(filled(row.command, **pair) for pair in ({}, *pairs))
        for k, command in enumerate(of_row):
            marks = pytest.mark.exhaustive if k else pytest.mark.slow
            found.append(pytest.param(shlex.split(command)[1:], marks=marks, id=command))
    return found


@pytest.mark.parametrize("words", runs())
def test_verl_accepts_each_run_of_the_table_at_full_size(words):
    check, config = announced(words)
    assert check.ok, check.detail
    assert words[words.index("--model") + 1] in config.trainer.experiment_name


AVERAGES = cells("averages", REPORT)


@pytest.mark.slow
@pytest.mark.parametrize("row", AVERAGES, ids=lambda row: row[0])
def test_the_average_and_the_anchor_are_what_a_run_announces(row):
    words, average, anchor = (re.findall("`([^`]+)`", cell) for cell in (*row, "")[:3])
    # Each method with the recommended settings; under the others one.
    methods = VALUES["METHOD"] if words[0] == "METHOD" else [ONE["METHOD"]]
    for method in methods:
        chosen = shlex.split(words[0].replace("METHOD", method))
        command = ["run", "verl", "--model", ONE["MODEL"], "--method", *chosen]
        if row[1].startswith("refused"):
            with pytest.raises(InvalidValue, match=re.escape(average[0])):
                announced(command)
            continue
        check, config = announced(command)
        assert check.ok, check.detail
        said = config.bandpo.run
        whole = said.average if len(average[0].split()) == 1 else said.average[: len(average[0])]
        assert whole == average[0]
        assert said.anchor.startswith(anchor[0])


def test_the_authors_sets_are_on_the_hub_of_the_tests():
    assert STYLES.keys() <= HUB.keys()
