"""Configurations are read with their lines; what cannot be known is unread; nothing is executed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvet.errors import RlvetError
from rlvet.lint.checks import lint_configurations
from rlvet.lint.readers import parse_configurations, read_configurations
from rlvet.lint.shell import read_commands
from rlvet.runs.configuration import Unresolved
from rlvet.runs.limits import LARGEST_LINTED


def read_one(text, name):
    (configuration,) = parse_configurations(text.encode(), name)
    return configuration


def values(configuration):
    return {name: setting.value for name, setting in configuration.settings.items()}


def words(script):
    return [[word.text for word in command] for command in read_commands(script)]


# Shell scripts


def test_variables_quotes_and_sums_are_filled_in():
    script = """
n=4; lr='1e-6'   # a comment
total=$((n * 2 + 1))
run a=$n "b=${lr}" c="$n and $lr" d=$total e=${missing:-7} f=${n:-9} 'g=$n' h=\\$n
"""
    assert words(script) == [
        ["run", "a=4", "b=1e-6", "c=4 and 1e-6", "d=9", "e=7", "f=4", "g=$n", "h=$n"],
    ]


def test_arrays_are_spliced_with_their_own_lines():
    script = "A=(\n  x=1  # first\n  # y=2\n  z=3\n)\nA+=(w=4)\nrun ${A[@]} last\n"
    (command,) = read_commands(script)
    assert [(word.text, word.line) for word in command] == [
        ("run", 7),
        ("x=1", 2),
        ("z=3", 4),
        ("w=4", 6),
        ("last", 7),
    ]


def test_a_text_with_spaces_is_several_words_and_only_the_unknown_ones_are_unread():
    (command,) = read_commands('X="a=1 b=$UNKNOWN c=3"\nrun $X')
    assert [(word.text, bool(word.unread)) for word in command[1:]] == [
        ("a=1", False),
        ("b=\0", True),
        ("c=3", False),
    ]


@pytest.mark.parametrize(
    "script",
    [
        "if [ -z $A ]; then\n  n=8\nfi",
        "n=8\nif true; then n=4; fi",
        "for n in 1 2; do echo; done",
        "f() {\n  n=8\n}\nn=2\nf() { n=3; }",
        "[ -z $A ] && n=8",
        "n=$(nproc)",
        "n=`nproc`",
        "n=$OTHER",
        "n=$1",
        "n=$((OTHER * 2))",
        "n=${OTHER//a/b}",
    ],
)
def test_a_value_that_only_the_run_knows_is_unread(script):
    configuration = read_one(f"{script}\nrun actor_rollout_ref.rollout.n=$n\n", "run.sh")
    setting = configuration.settings["actor_rollout_ref.rollout.n"]
    assert isinstance(setting.value, Unresolved)
    assert setting.value.reason


def test_rules_that_need_an_unread_value_are_listed_with_the_reason():
    script = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=$GROUP"
    report = lint_configurations([read_one(script, "run.sh")], "run.sh")
    reasons = {one.id: one.reason for one in report.unchecked}
    reason = "actor_rollout_ref.rollout.n is the environment variable GROUP"
    assert reasons["group-of-one"] == reasons["group-of-two"] == reason
    assert f"not checked, because {reason}: " in str(report)


def test_words_of_an_unknown_variable_may_set_anything():
    script = "python -m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode=gspo $EXTRA"
    configuration = read_one(script, "run.sh")
    assert configuration.incomplete == "the environment variable EXTRA"
    report = lint_configurations([configuration], "run.sh")
    assert "gspo-clip" in [one.id for one in report.unchecked]
    # The arguments of the script itself are left out: they are what this run does not have.
    assert read_one(script.replace("$EXTRA", '"$@"'), "run.sh").incomplete == ""


def test_words_that_a_branch_appends_are_unread():
    script = (
        "A=(actor_rollout_ref.rollout.n=8)\nif true; then A+=(actor_rollout_ref.rollout.n=2); fi\nrun ${A[@]}"
    )
    setting = read_one(script, "run.sh").settings["actor_rollout_ref.rollout.n"]
    assert isinstance(setting.value, Unresolved)


def test_several_commands_are_several_runs():
    script = (
        "run actor_rollout_ref.rollout.n=8\nrun actor_rollout_ref.rollout.n=4 \\\n  data.x=1\necho done\n"
    )
    configurations = parse_configurations(script.encode(), "run.sh")
    assert [(one.line, one.settings["actor_rollout_ref.rollout.n"].value) for one in configurations] == [
        (1, 8),
        (2, 4),
    ]


def test_a_comment_within_a_command_ends_it_as_in_a_shell():
    configuration = read_one("run actor_rollout_ref.rollout.n=8 \\\n # data.x=1 \\\n data.y=2\n", "run.sh")
    assert "data.y" not in configuration.settings


def test_texts_for_other_programs_are_left_out():
    script = "cat <<EOF\nrun actor_rollout_ref.rollout.n=1\nEOF\necho actor_rollout_ref.rollout.n=1\n"
    assert parse_configurations(script.encode(), "run.sh") == []


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --n-samples-per-prompt 1 --eps-clip 0.2 --kl-coef 0 --advantage-estimator grpo",
        "python train.py --learning_rate 1",
        "deepspeed --module openrlhf.cli.train_sft --train.batch_size 1 --actor.model_name_or_path x",
    ],
)
def test_commands_of_other_programs_hold_no_configuration(command):
    assert parse_configurations(command.encode(), "run.sh") == []


def test_flags_take_one_value_several_or_none():
    flags = "--algo.kl.use_loss --actor.eps_clip_low_high 0.2 0.28 --algo.kl.init_coef=1e-3"
    script = f"python -m openrlhf.cli.train_ppo_ray {flags}"
    read = values(read_one(script, "run.sh"))
    assert read["algo.kl.use_loss"] is True
    assert read["actor.eps_clip_low_high"] == [0.2, 0.28]
    assert read["algo.kl.init_coef"] == 1e-3


def test_another_configuration_of_verl_leaves_its_settings_open():
    command = "python -m verl.trainer.main_ppo --config-name=mine actor_rollout_ref.rollout.n=8"
    assert "mine" in read_one(command, "run.sh").incomplete
    assert read_one(command.replace("mine", "ppo_trainer.yaml"), "run.sh").incomplete == ""
    megatron = values(read_one(command.replace("mine", "ppo_megatron_trainer.yaml"), "run.sh"))
    assert megatron["actor_rollout_ref.actor.strategy"] == "megatron"


# Python


def test_literals_sums_and_names_that_are_assigned_once_are_read():
    script = """
import os
from trl import GRPOConfig as Config

RATE = 1e-6
GROUP = 4 * 2
twice = 1
twice = 2
common = dict(beta=0.04, top_p=0.9)
args = Config("out", learning_rate=RATE, num_generations=GROUP, epsilon=-twice, loss_type=f"{RATE}",
    top_k=int(os.environ["K"]), temperature=2 ** 3, **common)
args.num_iterations = 3
if os.environ:
    args.min_p = 0.1
"""
    configuration = read_one(script, "train.py")
    read = values(configuration)
    known = {name: value for name, value in read.items() if not isinstance(value, Unresolved)}
    assert known == {
        "learning_rate": 1e-6,
        "num_generations": 8,
        "temperature": 8,
        "beta": 0.04,
        "top_p": 0.9,
        "num_iterations": 3,
    }
    assert {name for name in read if name not in known} == {"epsilon", "loss_type", "top_k", "min_p"}
    assert configuration.settings["top_k"].line == 11
    assert configuration.incomplete == ""


@pytest.mark.parametrize(
    "arguments",
    [
        "**make()",
        "**settings",
        "**{**settings}",
        "**{name: 1}",
        "**dict(settings)",
        "**changed",
        "**{k: v for k, v in known.items() if v > 0}",
        "**given",
        "**itself",
    ],
)
def test_unknown_arguments_leave_the_other_settings_open(arguments):
    script = f"""
from trl import GRPOConfig
known = dict(beta=1)
changed = dict(beta=1)
changed.clear()
given = dict(beta=1)
given.update(load())
itself = {{**itself}}
def train(settings, name):
    return GRPOConfig(num_generations=2, {arguments})
"""
    configuration = read_one(script, "train.py")
    assert "**" in configuration.incomplete
    report = lint_configurations([configuration], "train.py")
    assert [finding.id for finding in report.findings] == ["group-of-two"]
    assert "learning-rate" in [one.id for one in report.unchecked]


def test_dictionaries_of_literals_are_read_behind_two_stars():
    script = """
from copy import deepcopy
from trl import GRPOConfig
import os

base = dict(beta=0.04, epsilon=0.2, top_p=0.9)
more = {**base, "num_generations": 8, "epsilon": 0.3}
more["temperature"] = 0.7
more.update({"min_p": 0.1}, loss_type="grpo")
if os.environ:
    more["delta"] = 0.5
allowed = {k: v for k, v in more.items() if k in GRPOConfig.__dataclass_fields__ and v is not None}
base["beta"] = 0.9
args = GRPOConfig("out", learning_rate=1e-6, **(deepcopy(allowed) | {"top_k": 5}))
more["beta"] = 3
"""
    configuration = read_one(script, "train.py")
    assert configuration.incomplete == ""
    read = values(configuration)
    assert isinstance(read.pop("delta"), Unresolved)
    assert read == {
        "learning_rate": 1e-6,
        "beta": 0.04,
        "epsilon": 0.3,
        "top_p": 0.9,
        "num_generations": 8,
        "temperature": 0.7,
        "min_p": 0.1,
        "loss_type": "grpo",
        "top_k": 5,
    }
    assert configuration.settings["temperature"].line == 8


def test_an_item_that_a_branch_sets_is_unread():
    script = (
        "from trl import GRPOConfig\na = {'beta': 0.1}\nif b:\n    a['beta'] = 0.2\nGRPOConfig('o', **a)\n"
    )
    configuration = read_one(script, "train.py")
    assert isinstance(configuration.settings["beta"].value, Unresolved)
    assert configuration.incomplete == ""


def test_what_is_known_of_a_dictionary_is_checked_where_the_rest_is_not():
    script = "from trl import GRPOConfig\nGRPOConfig('o', **{**load(), 'num_generation': 1, 'num_generations': 1})\n"
    report = lint_configurations([read_one(script, "train.py")], "train.py")
    assert {finding.id for finding in report.findings} == {"group-of-one", "misspelt-setting"}
    assert report.unchecked


def test_a_parser_of_the_command_line_leaves_every_setting_open():
    script = (
        "from trl import GRPOConfig, TrlParser\nargs = TrlParser((GRPOConfig,)).parse_args_and_config()\n"
    )
    report = lint_configurations([read_one(script, "train.py")], "train.py")
    assert report.findings == []
    assert report.passed == 0
    assert "the command line, which TrlParser reads" in report.unchecked[0].reason


def test_the_config_of_the_adapter_is_read_as_that_of_trl():
    script = "from bandpo.integrations.trl import BandGRPOConfig\nBandGRPOConfig('out', num_generations=1)\n"
    report = lint_configurations([read_one(script, "train.py")], "train.py")
    assert [finding.id for finding in report.findings] == ["group-of-one"]


def test_a_script_without_a_config_of_grpo_holds_none():
    assert parse_configurations(b"print('hello')", "train.py") == []
    assert parse_configurations(b"from trl import GRPOConfig", "train.py") == []
    # Nor is one read that is no Python, where nothing names it.
    assert parse_configurations(b"print(", "train.py") == []


# YAML and TOML


def test_yaml_of_verl_with_interpolations_merges_and_wandbs_wrappers():
    text = """
base: &base {n: 8, top_p: 1}
data: {train_batch_size: 64}
algorithm:
  adv_estimator: grpo
actor_rollout_ref:
  rollout:
    <<: *base
    n: 4
  actor:
    ppo_mini_batch_size: ${data.train_batch_size}
    clip_ratio: ${oc.select:missing.name,0.3}
    shuffle: ${oc.env:SHUFFLE}
    optim:
      lr: 1e-6
"""
    configuration = read_one(text, "config.yaml")
    read = values(configuration)
    actor = "actor_rollout_ref.actor"
    assert read["actor_rollout_ref.rollout.n"] == 4
    assert read["actor_rollout_ref.rollout.top_p"] == 1
    assert read[f"{actor}.ppo_mini_batch_size"] == 64
    assert read[f"{actor}.clip_ratio"] == 0.3
    assert isinstance(read[f"{actor}.shuffle"], Unresolved)
    assert read[f"{actor}.optim.lr"] == 1e-6
    assert configuration.settings[f"{actor}.optim.lr"].line == 15

    wrapped = "num_generations:\n  desc: null\n  value: 8\nbeta:\n  value: 0.1\n"
    assert values(read_one(wrapped, "config.yaml"))["num_generations"] == 8


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("trainer: {algorithm: {eps_clip_low: 0.2}}", "skyrl"),
        ("algo: {kl: {init_coef: 0.1}}", "openrlhf"),
        ("rollout.n_samples_per_prompt: 8", "openrlhf"),
        ("num_generations: 8", "trl"),
        ("actor_rollout_ref: {rollout: {n: 8}}", "verl"),
    ],
)
def test_the_names_in_a_yaml_tell_the_framework(text, framework):
    assert read_one(text, "config.yml").framework == framework


@pytest.mark.parametrize(
    "text",
    ["learning_rate: 1.0\nlora_rank: 8", "- a\n- b", "text", "", "top_p: 0.9", "trainer: {max_epochs: 3}"],
)
def test_a_yaml_of_another_program_holds_no_configuration(text):
    assert parse_configurations(text.encode(), "config.yaml") == []


def test_toml_of_prime_rl_has_lines_and_the_smallest_group_of_its_sources():
    text = """[orchestrator]
batch_size = 64
group_size = 8

[[orchestrator.train.source]]
name = "first"

[[orchestrator.train.source]]
name = "second"
group_size = 1
"""
    configuration = read_one(text, "rl.toml")
    smallest = configuration.settings["orchestrator.train.source.group_size"]
    assert (smallest.value, smallest.line) == (1, 10)
    report = lint_configurations([configuration], "rl.toml")
    assert [(finding.id, finding.line) for finding in report.findings] == [("group-of-one", 10)]
    # The older name, and the file of the orchestrator alone.
    older = "[orchestrator]\nrollouts_per_example = 1\n[[orchestrator.env]]\nid = 'x'\n"
    report = lint_configurations([read_one(older, "rl.toml")], "rl.toml")
    assert [(finding.id, finding.line) for finding in report.findings] == [("group-of-one", 2)]
    assert read_one("group_size = 8\nbatch_size = 20\n", "orch.toml").framework == "prime-rl"
    trainer = read_one("[optim]\nlr = 1e-3\n[loss]\ntype = 'default'\n", "train.toml")
    report = lint_configurations([trainer], "train.toml")
    assert [(finding.id, finding.line) for finding in report.findings] == [("learning-rate", 2)]
    assert "group-of-one" in [one.id for one in report.unchecked]


# Robustness


@pytest.mark.parametrize("name", ["a.py", "a.yaml", "a.toml", "a.sh"])
@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe\x00\x00",
        b"\x80GRPOConfig",
        b"\0num_generations: 8",
        "GRPOConfig = 'größe'".encode("utf-16"),
        b"num_generations: 8" + b"x" * LARGEST_LINTED,
        b"GRPOConfig(" * 5000,
        b"GRPOConfig;x=" + b"-" * 50_000 + b"1",
        b"GRPOConfig;x=" + b"1+" * 20_000 + b"1",
        b"num_generations: " + b"[" * 20_000,
        b"num_generations: {a: " * 2000,
        b"".join(b" " * level + b"a:\n" for level in range(300)),
        b"num_generations = " + b"[" * 5000,
        b"a: &a [x]\n" + b"".join(b"b%d: &b%d [*a, *a]\n" % (i, i) for i in range(100)),
        b"a0: &a0 {num_generations: 8}\n"
        + b"".join(b"a%d: &a%d {x: *a%d, y: *a%d}\n" % (i, i, i - 1, i - 1) for i in range(1, 60)),
        b"a: &a\n  num_generations: *a\n",
        b"num_generations: !!python/object/apply:os.system ['touch ran']",
        b"num_generations: 9" + b"9" * 5000,
        b"num_generations: 1e99999\nlearning_rate: nan",
        b"${" * 5000 + b"--num_generations 8",
        b"A=x\n" + b"A=$A$A\n" * 60 + b"run --num_generations $A",
        b"A=(x x)\n" + b"A=(${A[@]} ${A[@]})\n" * 60 + b"run --num_generations 8 ${A[@]}",
        b"run --num_generations $((9**9**9**9)) --beta $((1/0))",
        b'"' * 1001 + b"--num_generations",
        b"`" * 1001,
        b"$(" * 5000,
        b"<<E\n" * 1000,
    ],
    ids=range(26),
)
def test_hostile_bytes_are_read_or_refused_in_a_moment(name, data):
    try:
        configurations = parse_configurations(data, name)
    except RlvetError:
        return
    str(lint_configurations(configurations, name))


def repeated(text, name, first=b""):
    """Return a file of the largest size that is read, with a line again and again."""
    count = LARGEST_LINTED // (len(text) + 6 * text.count("N"))
    return first + "".join(text.replace("N", str(number)) for number in range(count)).encode(), name


LARGE_FILES = [
    ("aN = GRPOConfig(num_generations=N)\naN.beta = N\n", "a.py"),
    ("[[orchestrator.aN]]\ngroup_size = 1\n", "a.toml"),
    ("${A[@]}", "a.sh", b"A=(x)\nrun "),
    ("aN: {num_generations: 8}\n", "a.yaml"),
]
MORE_LARGE_FILES = [
    ("GRPOConfig(**a)\n", "a.py"),
    ("$A", "a.sh"),
    ("A+=(--num_generations 8)\n", "a.sh"),
    ("A=1 ", "a.sh"),
    ("run --num_generations N\n", "a.sh"),
    ("$A", "a.sh", b"A=x\nrun "),
    ('"', "a.sh"),
    ("$((1+1))", "a.sh"),
]
"""The arguments of `repeated`."""


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "file",
    [*LARGE_FILES, *(pytest.param(file, marks=pytest.mark.exhaustive) for file in MORE_LARGE_FILES)],
    ids=range(12),
)
def test_a_large_file_takes_seconds(file):
    data, name = repeated(*file)
    try:
        configurations = parse_configurations(data, name)
    except RlvetError:
        return
    str(lint_configurations(configurations, name))


ALPHABET = st.sampled_from(
    [
        *"\n\n \t$(){}[]<>&|;#'\"`\\=:,.-+*@0189",
        "GRPOConfig",
        "num_generations",
        "actor_rollout_ref.rollout.n",
        "trainer.algorithm.",
        "--",
        "${A:-",
        "$((",
        "A=(",
        "if ",
        "fi\n",
        "[[orchestrator.train.source]]\n",
        "group_size",
        "é",
        "1e-6",
        "**",
        "def f():",
        "defaults",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.lists(ALPHABET, max_size=60).map("".join).map(str.encode), st.binary(max_size=200)))
def test_any_bytes_are_read_or_refused(data):
    for name in ("a.py", "a.yaml", "a.toml", "a.sh"):
        try:
            configurations = parse_configurations(data, name)
        except RlvetError:
            continue
        report = lint_configurations(configurations, name)
        str(report), report.as_markdown(), report.as_annotations(), json.dumps(report.as_json())


AUDITED = """
import sys
from pathlib import Path
from rlvet.lint.checks import lint_file

folder = Path(sys.argv[1])
harmless, hostile = folder / "harmless", folder / "hostile"
files = sorted(hostile.iterdir())
# The first pass loads every module that the readers use.
for file in sorted(harmless.iterdir()):
    str(lint_file(file))
events = []
names = {"import", "exec", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class",
         "socket.connect", "socket.__new__", "ctypes.dlopen", "os.remove", "os.rename", "os.mkdir", "shutil.rmtree"}


def hook(event, arguments):
    if event in names:
        events.append((event, str(arguments[:1])))
    elif event == "open" and (str(arguments[1]) not in ("r", "rb") or Path(str(arguments[0])) not in files):
        events.append((event, str(arguments[:2])))


sys.addaudithook(hook)
for file in files:
    str(lint_file(file))
print("EVENTS", events)
"""

HARMLESS = {
    "a.py": "from trl import GRPOConfig\nargs = GRPOConfig(num_generations=2, beta=1 + 1)\n",
    "b.yaml": "num_generations: 2\nx: [1, 2]\n",
    "c.toml": "[orchestrator]\ngroup_size = 1\n",
    "d.sh": "run actor_rollout_ref.rollout.n=1 algorithm.adv_estimator=grpo\n",
}
HOSTILE = {
    "a.py": """
import os, planted
os.system("touch ran")
__import__("planted")
open("ran", "w").close()
from trl import GRPOConfig
eval("__import__('planted')")
args = GRPOConfig(num_generations=__import__("planted").N, beta=exec("import planted"), top_p=(lambda: planted)())
""",
    "b.yaml": """
num_generations: !!python/object/apply:os.system ["touch ran"]
beta: !!python/name:planted.N ''
top_p: !!python/object/new:planted.C {}
""",
    "c.toml": "[orchestrator]\ngroup_size = 1\nimport_path = 'planted.loss'\n",
    "d.sh": """
touch ran; python -c 'import planted'
n=$(touch ran)
`touch ran`
python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=$(touch ran) \\
    actor_rollout_ref.actor.policy_loss._target_=planted.C
""",
}


def test_nothing_of_a_hostile_configuration_is_executed_or_imported(tmp_path):
    for name, files in (("harmless", HARMLESS), ("hostile", HOSTILE)):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    (tmp_path / "planted.py").write_text("open('ran', 'w').close()\n")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", AUDITED, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "EVENTS []"
    assert not (tmp_path / "ran").exists()


def test_without_pyyaml_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(RlvetError, match="pip install PyYAML"):
        parse_configurations(b"num_generations: 8", "a.yaml")


def test_a_missing_file_or_a_folder_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing.sh"):
        with pytest.raises(RlvetError, match="is no file"):
            read_configurations(Path(path))


def test_a_boolean_is_no_group_size():
    """Without a number for each source, the smallest is not known, and that of the orchestrator counts."""
    text = "[orchestrator]\ngroup_size = 8\n\n[[orchestrator.train.source]]\ngroup_size = {}\n"
    sizes = {}
    for value in ("1", "true"):
        (configuration,) = parse_configurations(text.format(value).encode(), "rl.toml")
        sizes[value] = configuration.settings["orchestrator.train.source.group_size"].value
    assert sizes == {"1": 1, "true": 8}


# JSON, and texts whose name tells no format


TRL_SETTINGS = {"learning_rate": 5e-4, "num_generations": 1, "max_completion_length": 64, "beta": 1e-3}


@pytest.mark.parametrize(
    "name", ["settings.json", "settings.JSON", "settings.txt", "settings", "-", "args.conf"]
)
@pytest.mark.parametrize("indent", [None, 2, "\t"], ids=["one line", "spaces", "tabs"])
def test_settings_in_json_are_read_whatever_the_name(name, indent):
    configuration = read_one(json.dumps(TRL_SETTINGS, indent=indent), name)
    assert configuration.framework == "trl"
    assert values(configuration) == TRL_SETTINGS
    assert configuration.settings["num_generations"].line == (1 if indent is None else 3)


@pytest.mark.parametrize("name", ["settings.txt", "settings", "-"])
@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("num_generations: 8\nlearning_rate: 1e-6\nmax_completion_length: 64\n", "trl"),
        ("actor_rollout_ref:\n  rollout:\n    n: 8\nalgorithm:\n  adv_estimator: grpo\n", "verl"),
        ('[loss]\ntype = "default"\n[optim]\nlr = 1e-6\n[orchestrator]\ngroup_size = 8\n', "prime-rl"),
        ("from trl import GRPOConfig\nargs = GRPOConfig('out', num_generations=8)\n", "trl"),
        (
            "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8 algorithm.adv_estimator=grpo\n",
            "verl",
        ),
    ],
    ids=["TRL", "verl", "prime-rl", "a script", "a command"],
)
def test_a_name_without_a_known_suffix_says_nothing_of_the_format(name, text, framework):
    assert read_one(text, name).framework == framework


@pytest.mark.parametrize(
    "text", ["{ ls; }", "group_size: [", "the rollout: of\n\tgrpo", '{"rollout": ', "[grpo"]
)
@pytest.mark.parametrize("name", ["notes.txt", "-"])
def test_another_text_holds_no_configuration(text, name):
    assert parse_configurations(text.encode(), name) == []


def test_damaged_json_is_refused_with_its_line():
    with pytest.raises(RlvetError, match=r"a\.json, line 3: not JSON"):
        parse_configurations(b'{"num_generations": 8,\n"beta": 0\n"epsilon": 0.2}', "a.json")


@pytest.mark.parametrize("text", ['{"log_history": [{"reward": 1.0}]}', "[]", '{"model_type": "qwen2"}', "1"])
def test_json_of_another_kind_holds_no_configuration(text):
    assert parse_configurations(text.encode(), "a.json") == []


def test_arguments_that_a_run_wrote_are_those_of_a_run_that_started():
    """transformers fills in what the user left out, so that settings that exclude each other stand together."""
    written = {**TRL_SETTINGS, "num_generations": 8, "generation_batch_size": 8, "steps_per_generation": 2}
    twice = read_one(json.dumps(written), "a.json")
    assert not twice.is_saved
    dumped = read_one(json.dumps({**written, "hub_token": "<HUB_TOKEN>"}), "a.json")
    assert dumped.is_saved
    found = {True: set(), False: set()}
    for configuration in (twice, dumped):
        report = lint_configurations([configuration], "a.json")
        found[configuration.is_saved] = {finding.id for finding in report.findings}
    assert "batch-set-twice" in found[False]
    assert "batch-set-twice" not in found[True]
    assert "learning-rate" in found[True]


def test_the_output_of_a_run_is_refused_with_the_command_that_reads_it(tmp_path):
    file = tmp_path / "run.log"
    row = "{'loss': 0.1, 'reward': 0.5, 'kl': 0.01}"
    file.write_text(f"Error executing job with overrides: ['data.train_batch_size=64']\n{row}\n" * 3)
    with pytest.raises(ValueError, match=r"is the output of a run: `rlvet diagnose .*run\.log` reads it"):
        read_configurations(file)
