"""Settings that a log holds beside its metrics are the configuration of the run."""

import json
import os
import re
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import pytest

from rlvet import diagnose, open_run
from rlvet.compare import diff
from rlvet.lint.checks import lint_run
from rlvet.runs import held_settings
from rlvet.runs.configs import newest_configuration
from rlvet.runs.formats.tensorboard import _masked_crc32c

WORDLE = Path(os.environ.get("BANDPO_TEST_DATA", "missing")) / "logs/wordle-tb"

TRL = {
    "learning_rate": 5e-4,
    "num_generations": 4,
    "max_completion_length": 16,
    "scale_rewards": "batch",
    "importance_sampling_level": "token",
    "beta": 0.05,
    "optim": "adamw_torch",
    "report_to": ["tensorboard"],
}


def varint(number):
    data = b""
    while number > 127:
        data += bytes([number & 127 | 128])
        number >>= 7
    return data + bytes([number])


def field(number, content):
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def text(tag, content):
    """Return a summary with a text, as ``add_text`` writes it."""
    plugin = field(1, field(1, b"text"))
    tensor = field(1, 7) + field(2, field(2, field(1, 1))) + field(8, content.encode())
    return field(1, field(1, tag.encode()) + field(9, plugin) + field(8, tensor))


def scalar(tag, value):
    return field(1, field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))


def event(summary, step=0, *, is_damaged=False):
    data = field(2, step) + field(5, summary)
    size = struct.pack("<Q", len(data))
    checksum = _masked_crc32c(data) ^ is_damaged
    return size + struct.pack("<I", _masked_crc32c(size)) + data + struct.pack("<I", checksum)


def scalars(first=1, last=40, **others):
    events = b""
    for step in range(first, last + 1):
        metrics = {"reward": 0.1 + 0.01 * (step % 7), "completions/clipped_ratio": 1.0, "grad_norm": 0.5}
        metrics |= {"completions/mean_length": 16.0, "frac_reward_zero_std": 0.0, **others}
        events += event(b"".join(scalar(f"train/{tag}", value) for tag, value in metrics.items()), step)
    return events


def write(folder, *events, name="events.out.tfevents.1.host.1.0"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"".join(events))
    return folder / name


def arguments(settings=TRL, tag="args/text_summary"):
    return event(text(tag, json.dumps(settings, indent=2)))


def test_the_arguments_that_transformers_writes_are_the_configuration_of_the_run(tmp_path):
    log = write(tmp_path, arguments(), scalars())
    for path in (log, tmp_path):
        run = open_run(path)
        assert run.setup.framework == "trl"
        assert run.configuration.settings["scale_rewards"].value == "batch"
        source = "events.out.tfevents.1.host.1.0, args/text_summary"
        assert str(run.setup.values["learning rate"]) == f"learning_rate=0.0005 ({source})"
        diagnosis = diagnose(path)
        cause = "100% of answers are cut off at the cap of 16 tokens, as from the start"
        assert diagnosis.headline == f"truncated: {cause}"
        assert f"{log}, args/text_summary: look: the learning rate is far above" in str(diagnosis)
        assert not run.unread
    assert [finding.path for finding in lint_run(log)] == [f"{log}, args/text_summary"]


def test_torchs_writer_writes_what_is_read(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    writer.add_text("args", json.dumps(TRL))
    writer.add_text("model_config", json.dumps({"_name_or_path": "Qwen/Qwen2.5-7B", "vocab_size": 9}))
    writer.add_scalar("train/reward", 0.5, 1)
    writer.close()
    configuration = newest_configuration(tmp_path).configuration
    assert configuration.framework == "trl"
    assert configuration.settings["beta"].value == 0.05
    assert configuration.settings["model_name_or_path"].value == "Qwen/Qwen2.5-7B"
    assert "vocab_size" not in configuration.settings


def test_hyperparameters_in_a_folder_beside_the_log_are_its_settings(tmp_path):
    """NeMo-RL gives ``add_hparams`` its settings under dotted names."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    settings = {
        "loss_fn.ratio_clip_min": 0.2,
        "loss_fn.ratio_clip_max": 0.28,
        "grpo.num_prompts_per_step": 32,
        "grpo.num_generations_per_prompt": 16,
        "policy.train_global_batch_size": 256,
        "policy.model_name": "Qwen/Qwen2.5-1.5B",
        "policy.dynamic_batching.enabled": True,
    }
    writer.add_hparams(settings, {})
    writer.add_scalar("train/reward", 0.5, 1)
    writer.close()
    (log,) = tmp_path.glob("events*")
    for path in (tmp_path, log):
        saved = newest_configuration(path)
        assert saved.setup.framework == "nemo-rl"
        assert saved.setup.number("group size") == 16
        assert saved.setup.updates == 2
        assert saved.setup.values["model"].value == "Qwen/Qwen2.5-1.5B"
        # torch writes a boolean as a number.
        assert saved.configuration.settings["policy.dynamic_batching.enabled"].value == 1
        assert not saved.unread


@pytest.mark.parametrize(
    "form", ["{}", "```json\n{}\n```", "<pre>{}</pre>", "    {}\n"], ids=["plain", "fence", "pre", "indented"]
)
@pytest.mark.parametrize("tag", ["args/text_summary", "config/text_summary", "args"])
def test_the_text_may_be_in_a_block(form, tag, tmp_path):
    content = form.replace("{}", json.dumps(TRL, indent=2))
    write(tmp_path, event(text(tag, content)), scalars())
    assert newest_configuration(tmp_path).setup.number("learning rate") == 5e-4


def test_settings_of_the_log_come_before_files_beside_it(tmp_path):
    """Another run may have written the files, but none the text."""
    log = write(tmp_path, arguments(), scalars())
    (tmp_path / "config.yaml").write_text(json.dumps({**TRL, "learning_rate": 1e-6}))
    for path in (log, tmp_path):
        assert open_run(path).log.files == (str(log),)
        assert open_run(path).setup.number("learning rate") == 5e-4


def test_files_come_before_a_log_that_was_not_read(tmp_path):
    """The event file is of another run, or of an earlier start: trainer_state.json is the log."""
    write(tmp_path / "runs", arguments(), scalars())
    (tmp_path / "config.yaml").write_text(json.dumps({**TRL, "learning_rate": 1e-6}))
    rows = [{"step": step, "reward": step / 40, "kl": 0.1} for step in range(1, 41)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    assert open_run(tmp_path).setup.number("learning rate") == 1e-6
    (tmp_path / "config.yaml").unlink()
    run = open_run(tmp_path)
    run.rows  # noqa: B018
    assert run.setup.number("learning rate") == 5e-4


def test_of_two_starts_the_settings_of_the_later_one_are_read(tmp_path):
    write(tmp_path, arguments(), scalars(1, 20), name="events.out.tfevents.1.host.1.0")
    later = arguments({**TRL, "learning_rate": 1e-5})
    write(tmp_path, later, scalars(21, 40), name="events.out.tfevents.2.host.1.0")
    run = open_run(tmp_path)
    assert len(run.rows) == 40
    assert [Path(file).name for file in run.log.files] == [
        "events.out.tfevents.1.host.1.0",
        "events.out.tfevents.2.host.1.0",
    ]
    assert run.setup.number("learning rate") == 1e-5


def test_a_run_of_a_folder_of_several_has_its_own_settings(tmp_path):
    write(tmp_path / "a", arguments(), scalars())
    write(tmp_path / "b", arguments({**TRL, "learning_rate": 1e-5}), scalars())
    for name, rate in (("a", 5e-4), ("b", 1e-5)):
        run = open_run(tmp_path, run_name=f"{name}/events.out.tfevents.1.host.1.0")
        assert len(run.rows) == 40
        assert run.setup.number("learning rate") == rate


def test_settings_of_another_run_in_a_folder_beside_the_log_are_not_its_own(tmp_path):
    log = write(tmp_path, scalars())
    write(tmp_path / "other", arguments(), scalars())
    assert newest_configuration(log).configuration is None


UNREAD = {
    "no JSON": (
        [event(text("args/text_summary", "lr=1"))],
        "args/text_summary of {} was not read: it is no object",
    ),
    "damaged JSON": (
        [event(text("args/text_summary", '{"learning_rate": 1,'))],
        "args/text_summary of {} was not read: ",
    ),
    "no object": ([event(text("args/text_summary", "[{}]"))], "args/text_summary of {} was not read: it is "),
    "deep": (
        [event(text("args/text_summary", '{"a":' * 100_000 + "1" + "}" * 100_000))],
        "args/text_summary of {} was not read: ",
    ),
    "a long number": (
        [event(text("args/text_summary", '{"num_generations": ' + "9" * 10_000 + "}"))],
        "args/text_summary of {} was not read: ",
    ),
    "another program": (
        [arguments({"lr": 1e-3})],
        "args/text_summary of {} was not read: it is of no known framework",
    ),
    "damaged event": (
        [event(text("args/text_summary", json.dumps(TRL)), is_damaged=True)],
        "args/text_summary of {} was not read: its event is damaged",
    ),
    "too large": (
        [event(text("args/text_summary", json.dumps({**TRL, "a": "x" * 1000})))],
        "args/text_summary of {} was not read: it has more than 500 characters",
    ),
}


@pytest.mark.parametrize("case", UNREAD)
@pytest.mark.filterwarnings("ignore:.*damaged")
def test_settings_that_cannot_be_read_are_named_and_the_log_is_diagnosed(case, tmp_path, monkeypatch):
    if case == "too large":
        monkeypatch.setattr(held_settings, "LARGEST_CONFIG", 500)
    events, sentence = UNREAD[case]
    log = write(tmp_path, *events, scalars())
    run = open_run(log)
    assert len(run.rows) == 40
    assert run.configuration is None
    (problem,) = run.unread
    assert problem.startswith(sentence.format(log.name))
    assert problem in str(diagnose(log))


@pytest.mark.parametrize("length", range(1, 60))
def test_a_text_that_is_cut_off_anywhere_stops_nothing(length, tmp_path):
    whole = text("args/text_summary", json.dumps(TRL))
    log = write(tmp_path, event(whole[: len(whole) - 7 * length]), scalars())
    with_problem = newest_configuration(log)
    assert with_problem.configuration is None or with_problem.setup.framework == "trl"


@pytest.mark.parametrize("content", ["", "no text", "{}"])
def test_a_log_without_settings_has_no_sentence_on_them(content, tmp_path):
    others = event(text("completions/text_summary", content))
    assert newest_configuration(write(tmp_path, others, scalars())).unread == ()


def test_an_argument_of_the_trainer_does_not_say_whether_an_adapter_is_trained(tmp_path):
    """peft_config is no argument, so that a rate that is usual with LoRA is not said to be too high."""
    log = write(tmp_path, arguments({**TRL, "learning_rate": 1e-4}), scalars())
    configuration = newest_configuration(log).configuration
    assert "use_peft" in configuration.unsaid
    assert "learning-rate" not in {finding.id for finding in lint_run(log)}
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "base_model_name_or_path": "Qwen/Qwen3-8B"}')
    configuration = newest_configuration(log).configuration
    assert configuration.settings["use_peft"].value is True
    assert not configuration.unsaid


@pytest.mark.skipif(not WORDLE.is_dir(), reason="BANDPO_TEST_DATA has no logs/wordle-tb")
def test_the_settings_of_other_peoples_logs(tmp_path):
    caps = {folder.name: open_run(folder).setup.number("length cap") for folder in WORDLE.iterdir()}
    assert caps.pop("1767883513") == 128
    assert set(caps.values()) == {16}
    difference = diff(WORDLE / "1767733342", WORDLE / "1767714698")
    assert difference.headline.endswith("2 differences in effect: learning rate, length of the run")
    diagnosis = diagnose(WORDLE / "1767733342")
    assert diagnosis.setup.values["reward scale"].value == "batch"
    (undecided,) = [finding for finding in diagnosis.tested if "scale_rewards='batch'" in finding.advice]
    assert undecided.ok is None


def test_the_settings_of_a_run_of_wandb(tmp_path):
    """Its folder `files` has them too, but only the file of the run may have been copied."""
    pytest.importorskip("wandb")
    import wandb

    settings = wandb.Settings(mode="offline", silent=True, x_disable_stats=True)
    with wandb.init(project="p", dir=tmp_path, settings=settings, config={"beta": 0.05}) as run:
        run.config.update(TRL)
        run.config["generation_kwargs"] = {"top_p": 0.9}
        for step in range(1, 31):
            run.log({"train/reward": 0.1 * (step % 7), "train/global_step": step})
    wandb.teardown()
    (log,) = tmp_path.rglob("*.wandb")
    copy = tmp_path / "copy"
    copy.mkdir()
    log = log.rename(copy / log.name)
    for path in (log, copy):
        run = open_run(path)
        assert len(run.rows) == 30
        assert str(run.setup.values["learning rate"]) == f"learning_rate=0.0005 ({log.name}, config)"
        assert run.configuration.settings["generation_kwargs.top_p"].value == 0.9
        assert not run.unread


def test_a_run_of_wandb_without_settings_has_no_sentence_on_them(tmp_path):
    pytest.importorskip("wandb")
    import wandb

    settings = wandb.Settings(mode="offline", silent=True, x_disable_stats=True)
    with wandb.init(project="p", dir=tmp_path, settings=settings) as run:
        run.log({"train/reward": 0.5, "train/global_step": 1})
    wandb.teardown()
    (log,) = tmp_path.rglob("*.wandb")
    assert newest_configuration(log).unread == ()


def test_the_settings_of_each_run_of_trackio(tmp_path):
    file = tmp_path / "project.db"
    with closing(sqlite3.connect(file)) as store, store:
        store.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        store.execute("CREATE TABLE configs (id INTEGER PRIMARY KEY, run_name TEXT, config TEXT)")
        for name, rate in (("first", 5e-4), ("second", 1e-5)):
            config = json.dumps({**TRL, "learning_rate": rate, "_Username": "me"}).encode()
            store.execute("INSERT INTO configs VALUES (NULL, ?, ?)", (name, config))
            for step in range(30):
                metrics = json.dumps({"train/reward": 0.1 * (step % 7), "train/global_step": step + 1})
                store.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?)", (name, step, metrics))
    for name, rate in (("first", 5e-4), ("second", 1e-5)):
        run = open_run(file, run_name=name)
        assert len(run.rows) == 30
        assert run.setup.number("learning rate") == rate
        assert run.setup.values["learning rate"].file == "project.db, configs"


def test_a_view_in_the_place_of_trackios_settings_is_not_computed(tmp_path):
    file = tmp_path / "project.db"
    with closing(sqlite3.connect(file)) as store, store:
        store.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        store.execute("INSERT INTO metrics VALUES (NULL, 'a', 1, '{\"reward\": 0.5}')")
        store.execute("CREATE VIEW configs AS SELECT 1 AS id, 'a' AS run_name, '{}' AS config")
    assert open_run(file).rows[0]["reward"] == 0.5
    assert newest_configuration(file).unread == ()


def test_of_a_store_of_several_runs_none_is_taken_without_a_name(tmp_path):
    test_the_settings_of_each_run_of_trackio(tmp_path)
    rows = [json.dumps({"step": step, "reward": step / 40, "kl": 0.1}) for step in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    run = open_run(tmp_path)
    assert len(run.rows) == 40
    assert run.configuration is None


def test_a_database_that_is_no_log_is_not_spoken_of(tmp_path):
    (tmp_path / "cache.db").write_bytes(b"no database at all")
    rows = [json.dumps({"step": step, "reward": step / 40, "kl": 0.1}) for step in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    run = open_run(tmp_path)
    assert len(run.rows) == 40
    assert not run.unread


# --- The shape of a model without a name ---

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "dtype": "float32",
}
LARGER = QWEN | {"hidden_size": 2048, "num_hidden_layers": 36}
IN_4_BITS = {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}


def models(folder, first, second):
    """Return the comparison of two runs of TRL that differ in the configuration of the model only."""
    logs = []
    for name, model in (("a", first), ("b", second)):
        held = event(text("model_config/text_summary", json.dumps(model)))
        logs.append(write(folder / name, arguments(), held, scalars()))
    return diff(*logs)


@pytest.mark.parametrize(
    ("first", "second", "values"),
    [
        (QWEN, LARGER, ("hidden size 896, layers 24", "hidden size 2048, layers 36")),
        (QWEN, QWEN | IN_4_BITS, ("not quantized", "4 bits by bitsandbytes")),
        (QWEN, QWEN | {"dtype": "float16"}, ("float32", "float16")),
        (QWEN | {"_name_or_path": ""}, LARGER | {"_name_or_path": ""}, ("hidden size 896, layers 24", None)),
        ({"n_embd": 768}, {"text_config": {"hidden_size": 1024}}, ("hidden size 768", "hidden size 1024")),
        (QWEN, {**LARGER, "torch_dtype": "float32"} | {"dtype": None}, ("hidden size 896, layers 24", None)),
        (
            QWEN | {"_name_or_path": "Qwen/Qwen2.5-0.5B"},
            QWEN | IN_4_BITS | {"_name_or_path": "Qwen/Qwen2.5-0.5B"},
            ("not quantized", "4 bits by bitsandbytes"),
        ),
    ],
)
def test_models_of_other_shapes_differ(tmp_path, first, second, values):
    difference = models(tmp_path, first, second)
    (model,) = [
        one for one in difference.as_json()["configurations"]["differences"] if one["name"] == "model"
    ]
    assert model["a"]["value"] == values[0]
    assert values[1] in (None, model["b"]["value"])
    assert f"   A  {values[0]}" in str(difference)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (QWEN, QWEN),
        (QWEN, {"vocab_size": 151936}),
        (QWEN, {}),
        (QWEN | {"transformers_version": "4.57.3"}, QWEN | {"transformers_version": "5.0.0"}),
        (QWEN | {"use_cache": True}, QWEN | {"use_cache": False}),
    ],
)
def test_models_of_one_shape_are_not_said_to_differ_or_to_be_equal(tmp_path, first, second):
    comparison = models(tmp_path, first, second).as_json()["configurations"]
    assert comparison["differences"] == comparison["unjudged"] == []
    assert "model" in comparison["in_neither"]


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        (QWEN, QWEN, True),
        (QWEN, {name: value for name, value in QWEN.items() if name != "vocab_size"}, True),
        (QWEN, {"vocab_size": 151936}, False),
        (QWEN, {}, False),
        (QWEN, LARGER, False),
        (QWEN | {"_name_or_path": "Qwen/A"}, QWEN | {"_name_or_path": "Qwen/A"}, False),
    ],
)
def test_models_of_one_shape_are_said_to_have_it(tmp_path, first, second, is_same):
    difference = str(models(tmp_path, first, second))
    line = "\nmodels of the same shape, whose weights may differ: qwen2, hidden size 896, layers 24"
    assert (line in difference) == is_same
    assert re.search(r"known of neither: .*\bmodel\b", difference) is None or not is_same


def epochs_of(steps, cut=1.0, first=1):
    """Return events of a run whose epoch has some steps."""
    events = b""
    for step in range(first, 61):
        values = {"reward": 0.1 + 0.01 * (step % 7), "completions/clipped_ratio": cut, "epoch": step / steps}
        events += event(b"".join(scalar(f"train/{tag}", value) for tag, value in values.items()), step)
    return events


def pair(folder, first, second, *, cut=0.2, begins=1):
    """Return the difference of two runs of 10 and 30 steps an epoch."""
    a = write(folder / "a", arguments(first), epochs_of(10))
    return diff(a, write(folder / "b", arguments(second), epochs_of(30, cut, begins)))


def test_epochs_are_told_in_steps_where_the_logs_have_the_epoch(tmp_path):
    difference = pair(tmp_path, TRL | {"num_train_epochs": 100}, TRL | {"num_train_epochs": 50})
    planned = "planned steps 1,000 | 1,500, as an epoch has 10 | 30 steps"
    assert re.search(rf"^   B  50 epochs .*\n   {re.escape(planned)}$", str(difference), re.M)
    assert planned in difference.as_json()["notes"]
    equal = pair(tmp_path / "equal", TRL, TRL)
    assert equal.planned == "planned steps 30 | 90, as an epoch has 10 | 30 steps"
    assert equal.planned in str(equal)
    assert pair(tmp_path / "steps", TRL | {"max_steps": 60}, TRL | {"max_steps": 60}).planned == ""


@pytest.mark.parametrize(
    ("settings", "others", "is_told"),
    [
        ({}, {}, True),
        ({"num_train_epochs": 50}, {}, True),
        ({"run_name": "other"}, {}, True),
        ({"beta": 0.1}, {}, False),
        ({"reward_of_mine": 2}, {}, False),
        ({}, {"cut": 1.0}, False),
        ({}, {"begins": 20}, False),
    ],
)
def test_of_equal_settings_what_is_left_as_the_cause_is_said(tmp_path, settings, others, is_told):
    difference = pair(tmp_path, TRL, TRL | settings, **others)
    assert (
        "cut parts at the first common step, and no setting that was compared" in str(difference)
    ) == is_told
    assert ("start weights" in difference.rest) == is_told
    assert ("but the length of the run" in difference.rest) == ("num_train_epochs" in settings)
    assert (difference.rest in difference.as_json()["notes"]) == is_told


def test_the_file_of_settings_without_lines_is_named_once(tmp_path):
    name = "events.out.tfevents.1767733342.a-host-with-a-long-name.21148.0"
    folders = []
    for run, rate in (("a", 1e-5), ("b", 1e-6)):
        folders.append(
            write(tmp_path / run, arguments(TRL | {"learning_rate": rate}), scalars(), name=name).parent
        )
    output = str(diff(*folders))
    assert output.count(name) == 2
    assert f"A: {folders[0]} (TRL, earlier than 1.16.0; settings in {name}, args/text_summary)" in output
    assert "   A  1e-05  learning_rate=1e-05\n" in output
    files = str(diff(*(folder / name for folder in folders)))
    assert files.count(name) == 2
