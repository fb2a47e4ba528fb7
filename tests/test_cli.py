"""The commands `bandpo` and `rlvet`."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("typer")
import torch
import typer
from typer.testing import CliRunner

import bandpo
import bandpo.cli
import bandpo.core.errors
import rlvet
import rlvet.cli
import rlvet.errors
from bandpo.cli.app import app
from bandpo.cli.method_names import published_methods
from bandpo.core.methods import METHODS
from command_names import UPDATE, listed_names, names_of
from pages import PAGES, ROOT, commands
from rlvet.cli.app import app as rlvet_app

APPS = {"bandpo": app, "rlvet": rlvet_app}
COMMANDS = {
    "bandpo": ["audit", "bounds", "env"],
    "rlvet": ["demo", "diagnose", "diff", "lint", "report", "skill"],
}


def test_bounds_are_those_of_the_rule(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    plain = CliRunner().invoke(app, ["bounds", "0.001", "0.01"])
    assert plain.exit_code == 0, plain.output
    rare, common = [line for line in plain.output.splitlines() if "│ 0.0" in line]
    assert "… 10 " in rare  # the rule's cap; the trust region alone would give 53.55
    assert "│ 0.01 " in rare.rpartition("0.8 … 1.28")[2]  # p after at most
    assert "… 7.81 " in common
    assert "10 is Band's cap, max_ratio" in plain.output
    as_json = json.loads(CliRunner().invoke(app, ["bounds", "0.001", "0.01", "--json"]).output)
    assert as_json["p"] == [0.001, 0.01]
    assert as_json["Band KL(), radius 0.05"][1] == pytest.approx([0.0024974, 7.80985], rel=1e-5)
    free = CliRunner().invoke(app, ["bounds", "0.001", "--max-ratio", "inf"])
    assert "53.55" in free.output
    assert "cap" not in free.output
    refused = CliRunner().invoke(app, ["bounds", "--max-ratio", "1"])
    assert "max_ratio must be above 1 (inf for no cap), got 1.0" in str(refused.exception)


BOUNDS_WITHOUT_TORCH = [
    "",
    "0.08",
    "1 1e-200",
    "--divergence KL() --max-ratio inf",
    "--radius 0.2 --max-ratio 3",
]


@pytest.mark.parametrize("words", BOUNDS_WITHOUT_TORCH)
def test_bounds_are_printed_without_torch_as_with_it(words, monkeypatch):
    arguments = ["bounds", *words.split()]
    printed = CliRunner().invoke(app, arguments)
    asked = []
    monkeypatch.setattr(
        sys.modules["bandpo.cli.bounds"], "_without_torch", lambda *values: asked.append(values)
    )
    assert CliRunner().invoke(app, arguments).output == printed.output
    assert len(asked) == 1
    assert "p after at most" in printed.output


@pytest.mark.parametrize("words", ["--radius -1", "--radius nan", "--max-ratio 1", "--max-ratio nan"])
def test_bounds_of_a_value_that_is_none_are_refused_by_the_core(words):
    option, value = words.split()
    result = CliRunner().invoke(app, ["bounds", option, value])
    assert result.exit_code == 1
    assert f"got {float(value)}" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "options", "rule"),
    [
        ("bandkl", [], "Band(KL(), 0.05)"),
        ("bandtv010", [], "Band(TotalVariation(), 0.1)"),
        ("bandchi2", ["--radius", "0.2"], "Band(PearsonChi2(), 0.2)"),
        ("Band(KL(), 0.2, 1.5)", [], "Band(KL(), 0.2, 1.5)"),
        ("BandPO(radius=0.1)", ["--max-ratio", "2"], "Band(KL(), 0.1, 2)"),
        ("band-tv", [], "Band(TotalVariation(), 0.15)"),
        ("band-chi2", ["--radius", "0.2"], "Band(PearsonChi2(), 0.2)"),
    ],
)
def test_bounds_reads_the_names_that_method_reads(text, options, rule):
    result = CliRunner().invoke(app, ["bounds", "0.01", "0.5", "--json", "--divergence", text, *options])
    assert result.exit_code == 0, result.exception
    band = bandpo.parse(rule, bandpo.ClipRule)
    printed = json.loads(result.output)[f"Band {band.divergence}, radius {band.radius:g}"]
    expected = band.bounds(torch.tensor([0.01, 0.5], dtype=torch.float64).log())
    pairs = torch.stack([expected.lower, expected.upper], -1).tolist()
    assert printed == [pytest.approx(pair) for pair in pairs]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("DAPO", "FixedClip(0.2, 0.28)"),
        ("DCPO", "DCPO()"),
        ("dcpodac", "DCPO()"),
        ("bandkl005_relax", "Loosest(Band(KL(), 0.05), FixedClip(0.2, 0.28))"),
        ("bandtv(0.2)", "Band(TotalVariation(), 0.2)"),
        ("BandAbove", "TwoSided(FixedClip(0.2), Band(KL(), 0.05))"),
        ("GMPO", "LogClip(0.4, 0.4)"),
    ],
)
def test_bounds_of_any_rule_by_the_probability_are_those_of_the_rule(text, rule):
    result = CliRunner().invoke(app, ["bounds", "0.01", "0.5", "--json", "--divergence", text])
    assert result.exit_code == 0, result.exception
    expected = bandpo.parse(rule, bandpo.ClipRule).bounds(
        torch.tensor([0.01, 0.5], dtype=torch.float64).log()
    )
    printed = next(value for key, value in json.loads(result.output).items() if key != "p")
    pairs = torch.stack([expected.lower, expected.upper], -1).tolist()
    assert printed == [pytest.approx(pair) for pair in pairs]
    assert CliRunner().invoke(app, ["bounds", "0.01", "--divergence", text]).exit_code == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("GSPO", "bounds the ratio of a whole answer"),
        ("BAPO", "computes its bounds from the tokens of a batch"),
        ("CPPO", "computes its bounds from the tokens of a batch"),
        ("SAPO", "has no bounds"),
        ("KLCov()", "has no bounds"),
    ],
)
def test_bounds_of_a_method_without_them_are_refused_with_what_works(text, reason):
    result = CliRunner().invoke(app, ["bounds", "--divergence", text])
    message = str(result.exception)
    assert message.startswith(f"{text!r} {reason}")
    for word in re.findall(r"KL|bandkl005|BandAbove\(\)|DCPO\(\)", message.partition("such as")[2]):
        assert CliRunner().invoke(app, ["bounds", "--divergence", word]).exit_code == 0


@pytest.mark.parametrize(("option", "value"), [("--radius", "0.1"), ("--max-ratio", "5")])
def test_a_number_of_band_beside_another_rule_is_refused(option, value):
    result = CliRunner().invoke(app, ["bounds", "--divergence", "DCPO", option, value])
    assert str(result.exception).startswith(f"{option} is of Band alone, and 'DCPO' is another rule")
    assert "as in 'DCPO(low=0.16, high=0.2, max_ratio=10.0)'" in str(result.exception)


def test_a_bound_that_is_infinite_is_null_in_json():
    result = CliRunner().invoke(app, ["bounds", "0.5", "--json", "--divergence", "FixedClip(0.2, inf)"])
    ((low, high),) = json.loads(result.output)["FixedClip(0.2, inf)"]
    assert (low, high) == (pytest.approx(0.8), None)


@pytest.mark.parametrize(
    ("words", "meant"),
    [("bounds --method GRPO", "--divergence"), ("audit runs/x --divergence KL", "--method")],
)
def test_an_option_that_another_command_has_is_named_as_here(words, meant):
    output = CliRunner().invoke(app, words.split(), env={"COLUMNS": "80"}).output
    assert re.search(rf"No such option: --\w+.*{meant}", output)


def test_bounds_knows_each_rule_of_the_recipes():
    rules = ROOT / "packages/bandpo-lab/src/bandpo_lab/recipes/paper/rule"
    of_bounds = sys.modules["bandpo.cli.bounds"].RECIPES
    assert {path.stem for path in rules.glob("*.yaml")} == of_bounds.keys()
    for name, text in of_bounds.items():
        recipe = (rules / f"{name}.yaml").read_text()
        radius = re.search(r"every_radius,([\d.]+)", recipe)
        method = re.search(r"method: (.*)", recipe)[1].replace(
            "${recipe.radius}", radius[1] if radius else ""
        )
        assert bandpo.parse(method) == bandpo.parse(text)
        assert CliRunner().invoke(app, ["bounds", "0.5", "--divergence", name]).exit_code == 0


def test_the_bounds_on_the_page_of_methods_are_those_of_the_rules():
    import torch

    page = (ROOT / "docs/which-method.md").read_text()
    rows = re.findall(r"^\| `(\w+)\(\)` \| ([\d.]+) \| (.+) \|$", page, re.M)
    assert len(rows) == 3
    p = torch.tensor([0.01, 0.08, 0.5, 0.9], dtype=torch.float64)
    for name, radius, printed in rows:
        divergence = bandpo.parse(name, bandpo.Divergence)
        assert divergence.default_radius == float(radius)
        bounds = bandpo.Band(divergence).bounds(p.log())
        for cell, lower, upper in zip(printed.split(" | "), bounds.lower, bounds.upper, strict=True):
            shown = [float(number) for number in cell.split(" … ")]
            assert shown == pytest.approx([lower.item(), upper.item()], rel=5e-3, abs=5e-5)


@pytest.mark.parametrize("package", [bandpo, rlvet])
def test_version(package):
    run = CliRunner().invoke(APPS[package.__name__], ["--version"])
    assert run.output.strip() == package.__version__


@pytest.mark.parametrize("program", APPS)
def test_help_lists_exactly_the_commands(program):
    assert set(typer.main.get_command(APPS[program]).commands) == set(COMMANDS[program])
    printed = CliRunner().invoke(APPS[program], ["--help"], env={"COLUMNS": "120"}).output
    listed = re.findall(r"^│ (\w[\w-]*) ", printed, re.M)
    assert listed == COMMANDS[program]


@pytest.mark.parametrize("program", APPS)
def test_names_of_commands_and_options_are_those_of_the_listing(program):
    assert names_of(program, APPS[program]) == listed_names(program), UPDATE


@pytest.mark.parametrize("program", APPS)
def test_an_unknown_command_is_refused_as_typer_does(program):
    result = CliRunner().invoke(APPS[program], ["train"])
    assert result.exit_code == 2
    assert "No such command 'train'" in result.output


FRAMEWORKS = "trl|transformers|datasets|accelerate|verl|ray|hydra"


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("bandpo.cli.app", f"{FRAMEWORKS}|matplotlib|pydantic|bandpo_lab|rlvet|torch|numpy"),
        ("rlvet.cli.app", f"{FRAMEWORKS}|matplotlib|pydantic|bandpo_lab|bandpo|torch|numpy"),
    ],
)
def test_the_command_line_loads_no_framework_and_no_other_package(module, others):
    code = f"import sys, {module}; print(*{{*{others.split('|')}}} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_the_methods_that_a_shell_completes_are_all_published_ones():
    assert sorted(published_methods()) == sorted(f"{name}()" for name in METHODS)


def printed_without_torch(words, variables=()):
    """Return what `bandpo` prints, after a check that it ends well and loads neither torch nor numpy."""
    code = """
import sys
import bandpo.cli
sys.argv[0] = "bandpo"
try:
    bandpo.cli.main()
except SystemExit as end:
    print(end.code, *{"torch", "numpy"} & sys.modules.keys(), file=sys.stderr)
"""
    command = [sys.executable, "-c", code, *words.split()]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **dict(variables)})
    assert run.stderr.splitlines()[-1] == "0", run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("words", ["--help", "--version", *(f"{name} --help" for name in COMMANDS["bandpo"])])
def test_the_help_loads_no_torch(words):
    assert printed_without_torch(words)


@pytest.mark.parametrize("words", BOUNDS_WITHOUT_TORCH)
def test_bounds_with_kl_load_no_torch(words):
    assert "p after at most" in printed_without_torch(f"bounds {words}")


def test_the_audit_of_a_log_without_its_metrics_loads_no_torch(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.6}\n')
    assert "has no metrics of the audit" in printed_without_torch(f"audit {log}")


def test_a_shell_completes_methods_without_torch():
    # As bash asks for what completes the last word.
    asks = {"_BANDPO_COMPLETE": "complete_bash", "COMP_WORDS": "bandpo audit --method GS", "COMP_CWORD": "3"}
    assert printed_without_torch("", asks) == "GSPO()\n"


@pytest.mark.parametrize("program", APPS)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_the_library_on_pages_parse(page, program):
    group = typer.main.get_command(APPS[program])
    for name, *arguments in commands(page, program):
        if name.startswith("-"):
            continue
        assert name in group.commands, f"{page.name} prints `{program} {name}`, which is no command"
        # A command without arguments is named only.
        if arguments and arguments[0] not in ("--help", "-h"):
            group.commands[name].make_context(name, arguments)


def raised(error):
    raise error


KINDS = ("FileProblem", "InvalidType", "InvalidValue", "MissingPackage", "RunProblem")
MISSING = {
    "bandpo": ("trl", r"'\./packages/bandpo\[trl\]'"),
    "rlvet": ("pyarrow", r"'\./packages/rlvet\[records\]'"),
}
"""For each program a package that it may lack, and what installs it."""


def ended(program, error):
    """Return the end of a program whose app raises an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{program}.cli.app.app", lambda: raised(error))
        with pytest.raises(SystemExit) as caught:
            sys.modules[f"{program}.cli"].main()
    return caught.value


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("bandpo", OSError("no radius")),
        ("rlvet", OSError("no radius")),
        *(("bandpo", getattr(bandpo.core.errors, kind)("no radius")) for kind in KINDS),
        *(("rlvet", getattr(rlvet.errors, kind)("no radius")) for kind in KINDS),
        *(("bandpo", getattr(rlvet.errors, kind)("no radius")) for kind in KINDS),
    ],
)
def test_what_is_refused_is_one_line(program, error):
    end = ended(program, error)
    assert str(end) == "error: no radius"
    assert end.code == 2


@pytest.mark.parametrize("program", MISSING)
def test_a_package_that_is_missing_is_one_line(program):
    package, installation = MISSING[program]
    end = ended(program, ModuleNotFoundError(f"No module named '{package}'", name=package))
    assert re.search(rf"^error: .*needs the package {package}; .* pip install {installation}", str(end))
    assert end.code == 2


@pytest.mark.parametrize("program", APPS)
@pytest.mark.parametrize(
    "error",
    [
        ValueError("a slip of ours"),
        RuntimeError("no such luck"),
        ModuleNotFoundError("No module named 'no_such_package'", name="no_such_package"),
    ],
)
def test_any_other_error_keeps_its_traceback(error, program, monkeypatch, capsys):
    monkeypatch.setattr(f"{program}.cli.app.app", lambda: raised(error))
    with pytest.raises(SystemExit) as caught:
        sys.modules[f"{program}.cli"].main()
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert printed.endswith(f"{type(error).__name__}: {error}\n")


@contextmanager
def full_disk(monkeypatch):
    """Files cannot grow beyond 1 kB: only while it lasts, since the limit holds for pytest's own output too."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a cut one would outlast the test
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_spoils_no_page(tmp_path, monkeypatch):
    log, page = tmp_path / "log.jsonl", tmp_path / "page.html"
    log.write_text('{"step": 1, "reward": 0.5}\n')
    page.write_text("a page")
    with full_disk(monkeypatch):
        written = CliRunner().invoke(rlvet_app, ["report", str(log), "--output", str(page)])
    assert isinstance(written.exception, OSError)
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "page.html"}
    assert page.read_text() == "a page"


@pytest.mark.slow
def test_a_module_in_the_current_folder_is_found_and_shadows_nothing(tmp_path):
    (tmp_path / "mine.py").write_text("from bandpo import KL\n\n\nclass Mine(KL):\n    pass\n")
    (tmp_path / "torch.py").write_text("raise RuntimeError('not this one')\n")
    command = Path(sys.executable).with_name("bandpo")
    if not command.exists():
        pytest.skip("bandpo is on the path but not installed")
    words = [command, "bounds", "0.1", "--divergence", "mine.Mine"]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert "0.05" in run.stdout, run.stderr


@pytest.mark.slow
def test_a_misspelt_rule_is_one_line_and_loads_no_framework():
    code = """
import sys
import bandpo.cli, rlvet.cli
commands = {
    "rlvet report . --method Bnad()": rlvet.cli,
    "rlvet diagnose . --run-method Bnad()": rlvet.cli,
    "bandpo bounds --divergence TotalVariatoin": bandpo.cli,
}
for words, program in commands.items():
    sys.argv = words.split()
    try:
        program.main()
    except SystemExit as end:
        print(end.code, *[m for m in ("trl", "transformers", "verl") if m in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "2\n2\n2\n", run.stderr
    lines = run.stderr.splitlines()
    assert len(lines) == 3
    assert all("did you mean" in line for line in lines)


@pytest.mark.slow
def test_a_terminal_without_greek_letters_and_of_forty_columns():
    run = subprocess.run(
        [sys.executable, "-m", "bandpo", "bounds", "0.08"],
        capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "40"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "0.261" in run.stdout
    assert "2.411" in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "status", "last_line"),
    [
        # As the console script, whose name is the first argument, and as an import.
        ("/usr/bin/bandpo", 2, "error: the current folder was deleted; change to one that is there"),
        ("", 1, "FileNotFoundError: the current folder was deleted; change to one that is there"),
    ],
)
def test_a_deleted_folder_is_named_before_torch_is_loaded(argument, status, last_line, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"import os, sys; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); "
    script += f"sys.argv[0] = {argument!r}; import bandpo"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == status
    assert run.stderr.splitlines()[-1] == last_line


@pytest.mark.parametrize("words", [[], ["audit"]], ids=" ".join)
def test_the_help_names_no_type_of_a_flag(words):
    """A flag takes no value, so `<bool>` beside it would mislead."""
    assert "bool" not in CliRunner().invoke(app, [*words, "--help"]).output
    assert "bool" not in CliRunner().invoke(rlvet_app, ["lint", "--help"] if words else ["--help"]).output
