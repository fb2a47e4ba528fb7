import errno
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import SafetensorError

from helpers.frameworks import needs

needs("trl")

from transformers import AutoModelForCausalLM

from bandpo.integrations.trl import BandGRPOTrainer
from bandpo_lab.errors import FileProblem, RunProblem
from bandpo_lab.files.writing import seal
from bandpo_lab.tasks.multiplication import base_model_path
from bandpo_lab.training.arguments import parse_arguments, reward_functions
from bandpo_lab.training.checkpoints import AtomicCheckpoints, saving
from bandpo_lab.training.run_folder import RunFolder, reason_against_more_steps
from bandpo_lab.training.train import RunTrainer, run_training
from rlvet.records.record import read_record
from rlvet.runs.logs import read_log

# Few of so short answers earn anything, and the live diagnosis says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:no-signal"),
    pytest.mark.filterwarnings("ignore:reward-flat"),
]
# The embedded task, made small: three batches of two updates.
SMALL = ["--per_device_train_batch_size=8", "--num_generations=4", "--steps_per_generation=2"]
SMALL += ["--num_iterations=1", "--max_steps=6", "--save_steps=2", "--logging_steps=1"]
SMALL += ["--max_completion_length=8", "--train_prompts=32", "--eval_prompts=2", "--eval_samples=4"]
CPU = ["--use_cpu", "--bf16=False"]
SEVERAL_UPDATES = "--num_iterations=2"
"""What lets a clip act: TRL's default is one update for each batch."""


def small(folder, *more):
    return parse_arguments([*SMALL, "--output_dir", str(folder), *more])


def settings(arguments):
    """All of them but those of the place and the moment."""
    run, training, model, mixture = arguments
    every = vars(run) | training.to_dict() | vars(model) | vars(mixture)
    return {k: v for k, v in every.items() if k not in ("output_dir", "logging_dir", "run_name")}


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run."""
    return run_training(small(tmp_path_factory.mktemp("whole") / "run")).path


@pytest.fixture
def copied(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def assert_same_weights(folder, whole):
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(folder).items())


def assert_same(folder, whole):
    """Weights bit for bit, every row logged but for times, scores, and a report."""
    assert_same_weights(folder, whole)
    run, other = RunFolder(folder), RunFolder(whole)
    rows, others = ([row | {"step_time": 0} for row in one.history()] for one in (run, other))
    assert (rows, run.evaluations) == (others, other.evaluations)
    assert (folder / "report.html").is_file()
    assert yaml.safe_load((folder / "config.yaml").read_text())
    assert not list(folder.glob(".unfinished*"))


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def test_a_run_leaves_everything_behind(copied):
    folder = RunFolder(copied)
    config = yaml.safe_load((folder.path / "config.yaml").read_text())
    assert config["arguments"]["method"] == "Band(divergence=KL(), radius=0.05, max_ratio=10.0)"
    assert config["versions"]["trl"]
    assert [row["step"] for row in folder.history()] == [1, 2, 3, 4, 5, 6]
    assert {"reward", "entropy", "clip_ratio/high_mean"} <= folder.history()[0].keys()
    scores = json.loads(folder.evaluation.read_text())
    assert scores.keys() == {"before", "after"}
    assert scores["before"].keys() == {"mean@4", "pass@4", "reward"}
    assert 0 <= scores["before"]["mean@4"] <= scores["before"]["pass@4"] <= 1
    assert "<title>rlvet report" in folder.report.read_text()
    before = AutoModelForCausalLM.from_pretrained(base_model_path()).state_dict()
    after = weights(folder.path)
    assert after.keys() == before.keys()
    assert not any(torch.equal(after[name], before[name]) for name in before)
    # A second call with --resume finds it finished and touches nothing.
    stamp = folder.metrics.stat().st_mtime_ns
    run_training(small(copied, "--resume"))
    assert folder.metrics.stat().st_mtime_ns == stamp


@pytest.mark.slow
def test_scores_in_between_are_logged_and_change_nothing(whole, tmp_path):
    scored = run_training(small(tmp_path / "scored", "--eval_every=4"))
    rows = [row for row in scored.history() if "mean@4" in row]
    assert [row["step"] for row in rows] == [4]
    assert rows[0].keys() == {"step", "mean@4", "pass@4"}
    assert_same_weights(scored.path, whole)


def test_other_methods_by_name(tmp_path):
    """DPPO and GSPO from the command line, and what the audit logs of them."""
    dppo = ["--method", "Method(Band(TotalVariation, 0.15, inf), DropOutside(20))", "--max_steps=2"]
    folder = run_training(small(tmp_path / "dppo", *dppo, "--eval_prompts=0"))
    config = yaml.safe_load((folder.path / "config.yaml").read_text())["arguments"]
    rule = "Band(divergence=TotalVariation(), radius=0.15, max_ratio=inf)"
    objective = "DropOutside(max_weight=20, both_sides=False)"
    assert config["method"] == f"Method(clip={rule}, objective={objective})"
    assert {"audit/clip_high", "audit/radius_used"} <= folder.history()[-1].keys()
    assert "audit/if/Band/clip_high" in read_log(folder.path).rows[-1]
    gspo = small(tmp_path / "gspo", "--method=FixedClip(3e-4, 4e-4)", "--importance_sampling_level=sequence")
    assert gspo.training.importance_sampling_level == "sequence"
    named = small(tmp_path / "named", "--method=GSPO()")
    assert named.training.effective_method.clip == gspo.training.effective_method.clip
    file = tmp_path / "named.yaml"
    file.write_text("method: GSPO()\n")
    assert parse_arguments([*CPU, "--config", str(file)]).training.method.startswith("GSPO(")
    flagged = parse_arguments([*CPU, "--config", str(file), "--method=FixedClip(0.3)"])
    assert flagged.training.method == "FixedClip(low=0.3, high=0.3)"
    with pytest.raises(ValueError, match="did you mean DropOutside"):
        small(tmp_path / "typo", "--method=Method(FixedClip(), DropOutsid())")


@pytest.mark.slow
def test_resumes_to_the_same_trajectory(tmp_path, server):
    """Killed outright in the middle, then resumed: the same weights, bit for bit, and no log row twice.

    With a controller, whose state is in the checkpoint too, and scores taken in between.
    """
    steered = "--method=Band(KL(), ClipRateController(0.2, 0.05, gain=0.5))"
    whole = run_training(small(tmp_path / "whole", steered, "--eval_every=2"))
    radii = [row["radius"] for row in whole.history() if "radius" in row]
    assert len(set(radii)) == 3
    assert radii[::2] == radii[1::2]  # one for each batch
    argv = [*SMALL, steered, "--eval_every=2", "--output_dir", str(tmp_path / "cut")]
    job = server.start(Path.cwd(), ["bandpo-lab", "train", *argv])
    deadline = time.monotonic() + 300
    while not (tmp_path / "cut" / "checkpoint-2" / "trainer_state.json").exists():
        assert time.monotonic() < deadline, job.text
        time.sleep(0.02)
    job.kill()
    cut = run_training(parse_arguments([*argv, "--resume"]))
    assert [row["step"] for row in cut.history() if "mean@4" in row] == [2, 4, 6]
    assert_same(cut.path, whole.path)


AT_THE_END = ("manifest.json", "report.html", "model")
"""What a run leaves only then."""
CHECKPOINT = r"checkpoint-6 is damaged \(\S+ (has changed|is missing|cannot).*going on from step 4"
"""A bit of a manifest may be one of another file's hash, or name."""


def damaged(*names, folder="", gone=(), said="was finished, but {0} has changed"):
    """Cases: a file of which half is left, what is gone besides, what is said; all but the first are slow."""
    cases = [(folder + name, gone, said.format(name)) for name in names]
    return [cases[0], *slow(*cases[1:])]


@pytest.mark.parametrize(
    "case",
    [
        *damaged("metrics.jsonl", "evaluation.json", "config.yaml", "model/model.safetensors"),
        *damaged(
            *("model.safetensors", "manifest.json", "optimizer.pt", "trainer_state.json", "config.json"),
            folder="checkpoint-6/",
            gone=AT_THE_END,
            said=CHECKPOINT,
        ),
        (None, AT_THE_END, ""),  # killed after the last step
    ],
    ids=str,
)
def test_goes_on_from_what_is_whole(case, whole, copied, capsys):
    """To the same run, after which there is nothing to do."""
    name, gone, said = case
    for path in [path for pattern in gone for path in copied.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if name is not None:  # one bit, in the middle
        content = bytearray((copied / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copied / name).write_bytes(content)
    run_training(small(copied, "--resume"))
    assert re.search(said, capsys.readouterr().err, re.DOTALL)
    assert_same(copied, whole)
    assert not said.startswith("checkpoint") or (copied / "damaged" / name).exists()
    run_training(small(copied, "--resume"))
    assert "made again" not in capsys.readouterr().err


def test_a_finished_run_that_is_damaged_and_has_no_checkpoint_stays(copied):
    """Its other files are not overwritten by a run from step 0."""
    for checkpoint in copied.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    (copied / "model" / "model.safetensors").unlink()
    with pytest.raises(
        RunProblem, match=r"was finished and is damaged, and it has no checkpoint.*begin anew"
    ):
        run_training(small(copied, "--resume"))
    assert (copied / "metrics.jsonl").exists()


def unfinish(run):
    """Remove what a run leaves only at its end."""
    for name in AT_THE_END:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()


def make_unloadable(checkpoint, name):
    """Put something else into a file of a checkpoint, under a seal that agrees with it."""
    (checkpoint / name).write_bytes(b"of another version")
    seal(checkpoint, [file for file in checkpoint.iterdir() if file.name != "manifest.json"])


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "rng_state.pth", *slow("model.safetensors", "scheduler.pt")]
)
def test_a_whole_checkpoint_that_cannot_be_loaded_stops_the_run(name, copied):
    """With that error, and it stays where it is: an older one is not taken in its place."""
    unfinish(copied)
    # With steps left to make: transformers 5.0 loads no random numbers for a run that has made all.
    shutil.rmtree(copied / "checkpoint-6")
    make_unloadable(copied / "checkpoint-4", name)
    before = {path: path.stat().st_mtime_ns for path in copied.glob("checkpoint-*/*")}
    for _ in range(2):
        with pytest.raises(
            RunProblem, match=r"checkpoint-4 is whole, but loading it raised \S+: .*"
        ) as caught:
            run_training(small(copied, "--resume"))
        assert "\n" not in str(caught.value)
        assert {path: path.stat().st_mtime_ns for path in copied.glob("checkpoint-*/*")} == before
    assert not (copied / "damaged").exists()
    assert "checkpoint-4 is whole, but" in (copied / "error.log").read_text()


def test_the_command_says_in_one_line_which_checkpoint_cannot_be_loaded(copied, server):
    unfinish(copied)
    make_unloadable(copied / "checkpoint-6", "optimizer.pt")
    job = server.start(Path.cwd(), ["bandpo-lab", "train", *SMALL, "--output_dir", str(copied), "--resume"])
    assert job.wait() == 2
    assert "Traceback" not in job.text
    assert "checkpoint-6 is whole, but loading it raised " in job.text.splitlines()[-1]


def test_a_damaged_and_an_unloadable_checkpoint(copied, capsys):
    """The damaged one is moved, and the next, which is whole, stops the run."""
    unfinish(copied)
    with (copied / "checkpoint-6" / "optimizer.pt").open("ab") as file:
        file.write(b"more")
    make_unloadable(copied / "checkpoint-4", "optimizer.pt")
    with pytest.raises(RunProblem, match="checkpoint-4 is whole, but loading it raised"):
        run_training(small(copied, "--resume"))
    said = capsys.readouterr().err
    assert "checkpoint-6 is damaged (optimizer.pt has changed)" in said
    assert [path.name for path in copied.glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.slow
def test_a_full_disk_leaves_no_half_checkpoint(whole, tmp_path, monkeypatch):
    """The second checkpoint cannot be written; the error is in the folder, and resuming needs nothing else."""

    def full(self, folder):
        if self.state.global_step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, folder)

    save = RunTrainer._save_optimizer_and_scheduler
    with monkeypatch.context() as patched:
        patched.setattr(RunTrainer, "_save_optimizer_and_scheduler", full)
        with pytest.raises(OSError, match="No space left"):
            run_training(small(tmp_path))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    logged = (tmp_path / "error.log").read_text()
    assert "Traceback" in logged
    assert "No space left on device" in logged
    run_training(small(tmp_path, "--resume"))
    assert_same(tmp_path, whole)


def test_without_a_lag_nothing_changes(whole, tmp_path, monkeypatch):
    class Plain(AtomicCheckpoints, BandGRPOTrainer):
        create_model_card = RunTrainer.create_model_card

    monkeypatch.setattr("bandpo_lab.training.train.RunTrainer", Plain)
    assert_same_weights(run_training(small(tmp_path / "plain")).path, whole)


@pytest.mark.parametrize("updates", [2, 1])
def test_a_lag_trains_on_older_batches_and_survives_a_kill(updates, tmp_path, monkeypatch):
    """Batches wait for two others. Of five, three are trained on, two with ratios off 1; rules are told their age."""
    ages, original = [], RunTrainer._training_state

    def training_state(trainer, inputs):
        state = original(trainer, inputs)
        if not trainer._probing:
            ages.append(state.age)
        return state

    monkeypatch.setattr(RunTrainer, "_training_state", training_state)
    sizes = ["--per_device_train_batch_size=16", "--steps_per_generation=1"] if updates == 1 else []
    options = [*sizes, "--lag=2", f"--save_steps={updates}", f"--max_steps={5 * updates}", "--eval_prompts=0"]
    options += [f"--record={tmp_path / 'record'}", "--learning_rate=1e-3"]
    whole = run_training(small(tmp_path / "run", *options)).path
    looks = {loss.step: loss for loss in read_record(tmp_path / "record")}
    assert min(looks) == 2 * updates
    firsts = [looks[batch * updates] for batch in (2, 3, 4)]
    assert [loss.lag.max() for loss in firsts] == [2 * updates] * 3
    assert {*torch.cat(ages).tolist()} == {2 * updates + look for look in range(updates)}
    assert [abs(loss.log_ratio).max() > 1e-4 for loss in firsts] == [False, True, True]
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    for name in (*AT_THE_END, f"checkpoint-{5 * updates}"):
        shutil.rmtree(cut / name) if (cut / name).is_dir() else (cut / name).unlink()
    assert_same(run_training(small(cut, *options, "--resume")).path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("rubbish", [b'{"step": 5, "rew', b"\x00\xff\n\x00", b"not json\n"])
def test_resumes_whatever_is_left_of_the_metrics(rubbish, whole, copied):
    (copied / "manifest.json").unlink()
    shutil.rmtree(copied / "checkpoint-6")
    with (copied / "metrics.jsonl").open("ab") as file:
        file.write(rubbish)
    run_training(small(copied, "--resume"))
    assert_same(copied, whole)


@pytest.mark.slow
def test_one_process_at_a_time_works_in_a_folder(tmp_path):
    code = "import sys, time; from pathlib import Path; from bandpo_lab.files.writing import locked\n"
    code += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(FileProblem, match=rf"{tmp_path} \(process {other.pid} on .*, since 20"):
                run_training(small(tmp_path, "--resume"))
        finally:
            other.kill()
    with RunFolder(tmp_path).lock():  # a dead holder holds nothing
        RunFolder(tmp_path).check(small(tmp_path))  # and has not used the folder


def test_refuses_a_checkpoint_in_the_middle_of_a_batch_and_a_folder_it_cannot_use(tmp_path, copied):
    with pytest.raises(ValueError, match="save_steps=3 would save between the 2 updates"):
        run_training(small(tmp_path / "new", "--save_steps=3"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        run_training(small(tmp_path / "file" / "run"))
    with pytest.raises(ValueError, match="already used; add --resume"):
        run_training(small(copied))
    with pytest.raises(ValueError, match=r"other settings.*learning_rate: 0.0001 → 0.001"):
        run_training(small(copied, "--resume", "--learning_rate=1e-3"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--learning_rate=nan", "learning_rate must be at least 0, got nan"),
        ("--max_steps=0", r"max_steps must be at least 1, or -1 to go by num_train_epochs, got 0"),
        ("--temperature=0", "temperature must be above 0, got 0.0"),
        ("--seed=-1", "seed must be at least 0, got -1"),
        ("--adam_beta2=2", "the optimizer refuses its settings: .*beta"),
        ("--report_to=wandb", "report_to: WandbCallback (cannot begin: No API key|requires wandb)"),
        ("--report_to=dvclive", "report_to: DVCLiveCallback requires dvclive to be installed"),
        ("--report_to=nowhere", "report_to: nowhere is not supported"),
        ("--eval_every=2", "eval_every needs"),
    ],
)
def test_refuses_settings_before_it_uses_the_folder(option, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # and no ~/.netrc
    with pytest.raises(ValueError, match=message):
        run_training(small(tmp_path / "run", "--eval_prompts=0", option))
    assert "evaluating" not in capsys.readouterr().err
    with RunFolder(tmp_path / "run").lock():
        RunFolder(tmp_path / "run").check(small(tmp_path / "run"))


def test_yaml_and_flags(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "dataset_name: multiplication\nmodel_name_or_path: multiplication\n"
        "reward_funcs: [accuracy_reward, bandpo_lab.tasks.multiplication.reward]\n"
        "method: FixedClip(0.2, 0.28)\nnum_iterations: 2\nlearning_rate: 3.0e-5\nuse_cpu: true\nbf16: false\n"
    )
    arguments = parse_arguments(["--config", str(tmp_path / "run.yaml"), "--learning_rate", "2e-5"])
    assert arguments.training.method == "FixedClip(low=0.2, high=0.28)"
    assert arguments.training.learning_rate == 2e-5
    assert arguments.training.num_generations == 8  # TRL's default, not the embedded task's
    assert arguments.training.trust_remote_code is False
    assert [f.__name__ for f in reward_functions(arguments.run)] == ["accuracy_reward", "reward"]
    nowhere = parse_arguments(["--reward_funcs", "no_such.module.reward"])
    with pytest.raises(ValueError, match=r"reward_funcs: 'no_such.module.reward' is neither one of TRL's"):
        reward_functions(nowhere.run)


def test_a_file_that_names_neither_model_nor_data_stands_on_the_embedded_task(tmp_path):
    (tmp_path / "run.yaml").write_text("method: FixedClip(0.2)\n")
    ours = parse_arguments([f"--config={tmp_path / 'run.yaml'}", "--max_steps=8"])
    plain = parse_arguments(["--method=FixedClip(0.2)", "--max_steps=8"])
    assert settings(ours) == settings(plain)
    assert ours.training.num_generations == 16  # the embedded task's, not TRL's default


def test_flags_may_be_written_with_hyphens():
    with pytest.raises(ValueError, match="no data: give --dataset_name"):  # not trained on the embedded task
        parse_arguments(["--model-name-or-path=x", SEVERAL_UPDATES, *CPU])
    one = parse_arguments(["--num-iterations", "3", "--learning-rate=2e-5", "--method=Band(KL(), 0.04)"])
    other = parse_arguments(["--num_iterations", "3", "--learning_rate=2e-5", "--method=Band(KL(), 0.04)"])
    assert settings(one) == settings(other)
    assert one.training.num_iterations == 3


@pytest.mark.parametrize("earlier", [False, True])
def test_the_config_of_a_run_makes_the_run_again(earlier, tmp_path):
    first = small(tmp_path / "run", "--method=FixedClip(0.2, 0.28)", "--seed=7")
    folder = RunFolder(tmp_path / "run")
    with folder.lock():
        folder.check(first)
        folder.begin()
    config = str(tmp_path / "run" / "config.yaml")
    if earlier:  # as earlier versions wrote it, with an option that no longer exists
        text = Path(config).read_text(encoding="utf-8")
        Path(config).write_text(
            text.replace("arguments:\n", "arguments:\n  fused_logits: false\n"), encoding="utf-8"
        )
    again = parse_arguments(["--config", config, "--output_dir", str(tmp_path / "again")])
    assert settings(again) == settings(first)
    assert again.training.output_dir == str(tmp_path / "again")
    changed = parse_arguments(["--config", config, "--output_dir", str(tmp_path / "again"), "--seed=8"])
    assert (changed.training.seed, changed.training.method) == (8, first.training.method)


@pytest.mark.parametrize(
    ("content", "argv", "message"),
    [
        (None, ["--metod=Band"], "unknown option --metod; did you mean method?"),
        (None, ["--clip=Band()"], "unknown option --clip"),
        (None, ["--fused-logits=true"], "fused_logits is no longer a setting; leave it out"),
        ("fused_logits: true", [], "run.yaml: fused_logits is no longer a setting"),
        (None, ["--method=Bnd"], "unknown name 'Bnd'; did you mean Band?"),
        (None, ["--config", "missing.yaml"], "there is no such file"),
        (None, ["--config"], "needs the path"),
        (None, ["--eval_samples=0"], "eval_samples must be at least 1, got 0"),
        (None, ["--model_name_or_path=x", SEVERAL_UPDATES, *CPU], "no data: give --dataset_name"),
        (None, ["--dataset_name=x", SEVERAL_UPDATES, *CPU], "no model: give --model_name_or_path"),
        (
            None,
            ["--dataset_name=x", "--model_name_or_path=y", SEVERAL_UPDATES, *CPU],
            "no reward: give --reward_funcs",
        ),
        ("method: [", [], "is no valid YAML"),
        ("- clip", [], "must hold `key: value` lines"),
        ("env: x", [], "env must hold `NAME: value` lines, got 'x'"),
        ("methods: Band", [], "run.yaml: unknown option methods; did you mean method?"),
        ("model-name-or-path: x", [], "unknown option model-name-or-path; did you mean model_name_or_path?"),
    ],
)
def test_refuses_bad_arguments(content, argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "run.yaml").write_text(content)
        argv = ["--config", "run.yaml", *CPU]
    with pytest.raises(ValueError, match=message.replace("?", r"\?").replace("[", r"\[")):
        parse_arguments(argv)


@pytest.mark.parametrize("missing", ["model_name_or_path", "dataset_name"])
def test_what_is_missing_is_named(missing, tmp_path):
    names = {"model_name_or_path": "multiplication", "dataset_name": "multiplication"}
    names |= {missing: f"{tmp_path}/nothing", "reward_funcs": "bandpo_lab.tasks.multiplication.reward"}
    arguments = small(tmp_path / "run", *(f"--{name}={value}" for name, value in names.items()), *CPU)
    with pytest.raises(ValueError, match=f"{missing} {tmp_path}/nothing: "):
        run_training(arguments)


@pytest.mark.slow
def test_a_finished_run_goes_on_to_more_steps(copied, tmp_path):
    """Its end is that of a run that had them from the beginning."""
    longer = run_training(small(tmp_path / "longer", "--max_steps=8")).path
    run_training(small(copied, "--max_steps=8", "--resume"))
    assert_same(copied, longer)
    with pytest.raises(ValueError, match=r"other settings \(max_steps: 8 → 6\)"):
        run_training(small(copied, "--resume"))


@pytest.mark.parametrize(
    ("options", "steps", "reason"),
    [
        ([], 6, None),
        (["--lr_scheduler_type=constant_with_warmup", "--warmup_steps=2"], 6, None),
        (["--lr_scheduler_type=cosine"], 6, "lr_scheduler_type cosine goes by max_steps"),
        (
            ["--lr_scheduler_type=constant_with_warmup", "--warmup_steps=0.1"],
            6,
            "warmup_steps=0.1 is a share",
        ),
        (["--logging_steps=0.5"], 6, "logging_steps=0.5 is a share of max_steps"),
        (["--method=Band(KL(), Linear(0.04, 0.02))"], 6, "of the method goes by the share of max_steps"),
        ([], 5, "step 5 is in the middle of a batch's 2 updates"),
    ],
)
def test_what_forbids_more_steps(options, steps, reason, tmp_path):
    said = reason_against_more_steps(small(tmp_path, *options), steps)
    assert said == reason or reason in said


def test_more_steps_are_refused_with_the_reason(copied):
    """The whole run's schedule is constant; here the configuration says otherwise, under a seal that agrees."""
    config = yaml.safe_load((copied / "config.yaml").read_text())
    config["arguments"]["lr_scheduler_type"] = "linear"
    (copied / "config.yaml").write_text(yaml.safe_dump(config))
    seal(copied, [copied / "config.yaml"])
    with pytest.raises(ValueError, match=r"cannot be raised from 6 to 8: lr_scheduler_type linear goes by"):
        run_training(small(copied, "--resume", "--max_steps=8", "--lr_scheduler_type=linear"))


@pytest.mark.slow
def test_a_run_with_its_record_inside_can_be_moved(tmp_path):
    def options(folder):
        return ["--max_steps=2", "--eval_prompts=0", f"--record={folder / 'record'}"]

    old, new = tmp_path / "old", tmp_path / "new"
    run_training(small(old, *options(old)))
    old.rename(new)
    assert run_training(small(new, *options(new), "--resume")).path == new
    again = parse_arguments(["--config", str(new / "config.yaml"), "--output_dir", str(tmp_path / "again")])
    assert again.training.record == str(tmp_path / "again" / "record")


def test_a_disk_that_fails_while_a_checkpoint_is_written_is_said_with_its_name(tmp_path, monkeypatch):
    """torch.save raises no OSError; /dev/full is a disk without room."""

    def onto_a_full_disk(self, folder):
        torch.save({"state": torch.zeros(1000)}, "/dev/full")

    monkeypatch.setattr(RunTrainer, "_save_optimizer_and_scheduler", onto_a_full_disk)
    with pytest.raises(FileProblem, match=r"checkpoint-2 cannot be written: .*add --resume") as caught:
        run_training(small(tmp_path, "--max_steps=2", "--eval_prompts=0"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OSError(errno.EIO, "Input/output error"),
    ],
)
def test_each_way_in_which_a_disk_fails_names_the_checkpoint(error):
    with pytest.raises(OSError, match=r"checkpoint-2"), saving(Path("run/checkpoint-2")):
        raise error
