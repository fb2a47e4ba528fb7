"""A whole rehearsal, and recipes broken one part at a time: each must fail, and name the part."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from helpers.frameworks import needs

needs("verl")

import psutil
from omegaconf import OmegaConf

from bandpo.integrations.verl.settings import in_bypass_mode
from bandpo_lab.cluster.modes import MODES, ModeName, entry_point, mode_of, mode_overrides
from bandpo_lab.errors import InvalidValue
from bandpo_lab.rehearsal import rehearse
from bandpo_lab.rehearsal.inputs import RIGHT_ANSWER, byte_tokenizer, choose_prompts, write_model
from bandpo_lab.rehearsal.preflight import asynchronous_problem, validate
from bandpo_lab.rehearsal.shrink import (
    RESPONSE_TOKENS,
    UNTESTED,
    _replacements,
    changes,
    compose,
    not_covered,
    refuse,
)
from bandpo_lab.rehearsal.stages import LONGEST_PATH
from rlvet.records.record import read_record

RECIPE = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=16",
    "data.train_batch_size=256",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.policy_loss._target_=bandpo.integrations.verl.BandPolicyLossConfig",
    "+actor_rollout_ref.actor.policy_loss.method='Band(KL(), 0.05)'",
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, in which Ray's sockets can be."""
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def test_a_path_too_long_for_ray_s_sockets_is_refused_at_once(tmp_path):
    long = tmp_path / ("x" * LONGEST_PATH)
    with pytest.raises(
        InvalidValue, match=r"Ray's sockets in it allow at most 39: give --output-dir a shorter path"
    ):
        rehearse(RECIPE, folder=long, stand_in=True)
    assert not long.exists()


@pytest.fixture(scope="module")
def composed():
    return compose(RECIPE, None, "ppo_trainer")


@pytest.fixture(autouse=True)
def _no_processes(request, monkeypatch):
    """What ends before Ray starts needs no fork server, which imports verl."""
    if not {"slow", "exhaustive"} & {mark.name for mark in request.node.iter_markers()}:
        monkeypatch.setattr("bandpo_lab.rehearsal.stages.Forks", lambda *_: nullcontext())


def failure(overrides: list[str], folder: Path) -> tuple[str, str]:
    found = rehearse([*RECIPE, *overrides], folder=folder, steps=2, stand_in=True)
    failed = [check for check in found.checks if not check.ok]
    assert len(failed) == 1, failed
    return failed[0].name, failed[0].detail


@pytest.mark.exhaustive
def test_a_sound_recipe_of_ones_own_passes_from_config_to_resume(folder):
    """A shipped recipe does so at each change, in packages/bandpo-lab/tests/recipes/test_flow.py."""
    found = rehearse(RECIPE, folder=folder, stand_in=True)
    assert found.ok, found.checks
    assert len(found.checks) == 12
    assert "made up" in found.prompts
    assert {change.key: change.original for change in found.changes}[
        "actor_rollout_ref.rollout.name"
    ] == "vllm"


@pytest.mark.exhaustive
def test_a_recipe_that_keeps_no_probabilities_of_the_sampler_passes(folder):
    found = rehearse(
        [*RECIPE, "actor_rollout_ref.rollout.calculate_log_probs=false"], folder=folder, stand_in=True
    )
    assert found.ok, found.checks


@pytest.mark.exhaustive
def test_the_samplers_probabilities_may_be_the_old_ones(folder):
    found = rehearse([*RECIPE, "algorithm.rollout_correction.bypass_mode=true"], folder=folder, stand_in=True)
    assert found.ok, found.checks


ASYNCHRONOUS = ["settings", "training", "policy loss", "clip", "loss by hand", "metrics", "reward", "gradient",
    "weight sync", "anchor", "age", "validation", "checkpoint", "resume"]  # fmt: skip


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("colocate_async", marks=pytest.mark.exhaustive),
        pytest.param("separate_async", marks=pytest.mark.slow),
        pytest.param("fully_async", marks=pytest.mark.exhaustive),
        pytest.param("one_step_off", marks=pytest.mark.exhaustive),
    ],
)
def test_an_asynchronous_trainer_is_rehearsed_on_old_data(mode, folder):
    record = f"+actor_rollout_ref.actor.policy_loss.record={folder}/tokens"
    batch = ["data.train_batch_size=0"] if mode == "fully_async" else []
    found = rehearse([*RECIPE, record, *batch], mode=mode, folder=folder, stand_in=True, timeout=600)
    assert found.ok, found.checks
    checks = {check.name: check for check in found.checks}
    assert list(checks) == ASYNCHRONOUS
    assert re.search(r"step \d: [1-9]", checks["age"].detail)
    assert "the sampler's, bit for bit" in checks["anchor"].detail
    # bandpo's record has the ages that the rehearsal finds by the sampler's log-probabilities.
    oldest = [int(batch.lag.max()) for batch in read_record(folder / "tokens")]
    if mode == "fully_async":  # whose samples are one version old, or two, as the machine is fast or slow
        assert min(oldest) == 0 < max(oldest)
        return
    # The one-step-off trainer sends its first weights twice, so that its first batch counts as one version old.
    assert set(oldest) - {2} == ({1} if mode == "one_step_off" else {0, 1})


SHIFTED_ANCHOR = """
from bandpo.integrations.verl.probe import is_probing
from verl.workers.utils import losses
get_policy_loss_fn = losses.get_policy_loss_fn
def with_shift(name):
    loss = get_policy_loss_fn(name)
    def shifted(*, old_log_prob, **arguments):
        old = old_log_prob if is_probing() else old_log_prob.roll(1, dims=-1)
        return loss(old_log_prob=old, **arguments)
    return shifted
losses.get_policy_loss_fn = with_shift
"""


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # verl's, on importing its losses
def test_old_log_probabilities_of_the_next_token_are_named(folder, tmp_path, monkeypatch):
    from verl.workers.utils import losses

    monkeypatch.setattr(
        losses, "get_policy_loss_fn", losses.get_policy_loss_fn
    )  # the check of the settings imports it
    (tmp_path / "shifted_anchor.py").write_text(SHIFTED_ANCHOR)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = [*RECIPE, "actor_rollout_ref.model.external_lib=shifted_anchor"]
    found = rehearse(recipe, mode="colocate_async", folder=folder, stand_in=True)
    failed = {check.name: check.detail for check in found.checks if not check.ok}
    assert "are not the sampler's" in failed["anchor"], found.checks
    assert "resume" not in [check.name for check in found.checks]


@pytest.mark.exhaustive
def test_nothing_outlives_a_killed_rehearsal(folder):
    """Killed in the middle of training, it leaves no process, and none writes a checkpoint later."""
    command = [
        sys.executable,
        "-m",
        "bandpo_lab",
        "rehearse",
        "--stand-in",
        "--output-dir",
        str(folder),
        "--",
    ]
    with subprocess.Popen([*command, *RECIPE], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        metrics = folder / "metrics-first.jsonl"
        while not metrics.exists():
            assert run.poll() is None
            time.sleep(0.2)
        family = psutil.Process(run.pid).children(recursive=True)
        assert len(family) > 10
        run.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    commands = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(folder) in command]


BROKEN_SYNC = """
from bandpo_lab.rehearsal.rollout import TransformersRollout as Rollout
whole, calls = Rollout.update_weights, []
async def update_weights(self, weights, **options):
    calls.append(1)
    if len(calls) <= {working}:
        return await whole(self, weights, **options)
    for _ in weights: pass
Rollout.update_weights = update_weights
"""


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Ray state API:DeprecationWarning")  # verl's, on importing its rollout
@pytest.mark.parametrize("log_probs", ["true", "false"])
@pytest.mark.parametrize("working", [0, 1], ids=["from the start", "after the first"])
def test_a_cut_weight_sync_is_named(working, log_probs, folder, tmp_path, monkeypatch):
    (tmp_path / f"cut_sync_{working}.py").write_text(BROKEN_SYNC.format(working=working))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = f"actor_rollout_ref.rollout.calculate_log_probs={log_probs}"
    name, detail = failure([f"actor_rollout_ref.model.external_lib=cut_sync_{working}", asked], folder)
    assert name == "weight sync", detail
    assert "does not have the trainer's weights" in detail


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("body", "part", "words"),
    [
        ("return 0.0", "reward", "zero advantage"),
        ("return float(solution_str)", "training", "could not convert string to float"),
    ],
)
def test_a_broken_reward_is_named(body, part, words, folder, tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(f"def compute_score(data_source, solution_str, *_, **__):\n    {body}\n")
    name, detail = failure([f"reward.custom_reward_function.path={path}"], folder)
    assert name == part
    assert words in detail


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("data.train_files", "[{here}, {folder}/dapo-math-71k.parquet]"),
        ("data.val_files", "{folder}/amc32.parquet"),
        ("actor_rollout_ref.model.path", "./qwen"),
        ("actor_rollout_ref.model.path", "hdfs://cluster/qwen"),
    ],
)
def test_a_path_that_is_not_there_is_a_failure(key, path, folder, tmp_path):
    here = tmp_path / "here.jsonl"
    here.write_text("{}")
    path = path.format(here=here, folder=folder)
    files = [f"data.{split}_files={here}" for split in ("train", "val")]
    found = rehearse([*RECIPE, *files, f"{key}={path}"], folder=folder)
    (_, check) = found.checks
    assert (found.ok, check.name) == (False, "files")
    assert check.detail.startswith(f"{key}: {path.split(', ')[-1].strip(']')} is not here")
    assert "--stand-in" in check.detail
    assert not (folder / "model").exists()


def test_stand_ins_are_made_where_they_are_meant(folder, monkeypatch):
    monkeypatch.setattr("bandpo_lab.rehearsal.stages.train", lambda *_: None)
    missing = [f"data.train_files={folder}/nowhere.parquet", f"actor_rollout_ref.model.path={folder}/nothing"]
    found = rehearse([*RECIPE, *missing], folder=folder, stand_in=True)
    assert f"made up, since {folder}/nowhere.parquet is not here" in found.prompts
    assert "files" not in [check.name for check in found.checks]
    assert (folder / "model/config.json").exists()


@pytest.mark.filterwarnings("ignore:Ray state API:DeprecationWarning")  # verl's, on importing its reward loop
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size=512", "one update for each batch"),
        ("trainer.n_gpus_per_node=7", "7 GPUs"),
        ("actor_rollout_ref.actor.policy_loss.method=null", "method is null: leave it out"),
        ("data.train_files=null", "data.train_files must be set, got null"),
        ("trainer.logger=[console,wandbb]", "trainer.logger: verl knows no logger 'wandbb' of wandb, mlflow"),
        ("data.train_files=[]", "data.train_files names no file"),
        ("actor_rollout_ref.model.path=null", "actor_rollout_ref.model.path must be a text, got null"),
        ("trainer.default_local_dir=null", "trainer.default_local_dir must be a text, got null"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=null", "ppo_mini_batch_size must be a whole number"),
        ("actor_rollout_ref.model.lora_rank=null", "model.lora_rank must be a number, got null"),
        ("actor_rollout_ref.actor=null", "actor_rollout_ref.actor must be a group of settings, got null"),
        ("critic=null", "critic must be a group of settings, got null"),
        ("actor_rollout_ref.rollout.n=0", "rollout.n must be a whole number of at least 1, got 0"),
        ("trainer.nnodes=two", "trainer.nnodes must be a whole number of at least 1, got 'two'"),
        (
            "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
            "engine 3 GPUs, which do not divide the 8 of",
        ),
        ("actor_rollout_ref.rollout.n=1", "grpo compares the answers to one prompt with each other"),
        ("actor_rollout_ref.actor.policy_loss.method='Band(KL(), -1)'", "verl refuses the settings: actor_"),
    ],
)
def test_settings_that_no_run_can_have_are_named(composed, override, words):
    check = validate(OmegaConf.merge(composed, OmegaConf.from_dotlist([override])))
    assert not check.ok
    assert words in check.detail
    assert "\n" not in check.detail


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("no_message.jsonl", b'{"prompt": [null]}', "has rows without a prompt: data.prompt_key is 'prompt'"),
        ("questions.jsonl", b'{"question": "1 + 1?"}', "which has to hold messages; a row has question"),
        ("corrupt.parquet", b"PAR1 and no more", "cannot be read"),
        ("cut.jsonl", b'{"prompt": [', "line 1: not a JSON object"),
    ],
)
def test_data_that_cannot_be_used_is_named(name, content, words, folder, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.* ?{words}"):
        choose_prompts([str(path)], "prompt", byte_tokenizer(), max_tokens=512, count=1)
    if name == "cut.jsonl":  # and before Ray starts
        files = [f"data.{split}_files={path}" for split in ("train", "val")]
        check = rehearse([*RECIPE, *files], folder=folder).checks[-1]
        assert (check.name, check.ok) == ("files", False)
        assert check.detail.startswith(f"data.train_files: {path}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("reward.custom_reward_function.path={folder}/rewrad.py", "rewrad.py"),
        ("reward.custom_reward_function.name=compute_socre", "compute_socre of "),
        ("reward.custom_reward_function.name=null", "reward.custom_reward_function.name is null: set it"),
        ("reward.reward_manager.name=dpao", "dpao"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_named_before_ray_starts(override, words, folder, tmp_path):
    (tmp_path / "my_reward.py").write_text("def compute_score(*_, **__):\n    return 0.0\n")
    path = f"reward.custom_reward_function.path={tmp_path}/my_reward.py"
    found = rehearse([*RECIPE, path, override.format(folder=tmp_path)], folder=folder, stand_in=True)
    check = found.checks[-1]
    assert (found.ok, check.name) == (False, "reward")
    assert words in check.detail


def test_a_folder_of_an_earlier_rehearsal_is_cleared_and_another_refused(folder, monkeypatch):
    monkeypatch.setattr("bandpo_lab.rehearsal.stages.train", lambda *_: None)
    rehearse(RECIPE, folder=folder, stand_in=True)
    (folder / "checkpoints/global_step_2").mkdir(parents=True)
    (folder / "metrics-first.jsonl").write_text("{}")
    rehearse(RECIPE, folder=folder, stand_in=True)
    assert not (folder / "checkpoints").exists()
    assert not (folder / "metrics-first.jsonl").exists()
    other = folder / "other"
    (other / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"not the folder of a rehearsal, and not empty \(checkpoints\)"):
        rehearse(RECIPE, folder=other, stand_in=True)
    assert (other / "checkpoints").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.adv_estimator=gae", "cannot be rehearsed on a CPU: .*a critic"),
        ("actor_rollout_ref.model.lora_rank=8", "LoRA"),
        ("model_engine=megatron", "megatron"),
        ("actor_rollout_ref.actor.ppo_mini_batch_sise=64", "ppo_mini_batch_sise"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        rehearse([*RECIPE, override], stand_in=True)


@pytest.mark.parametrize("setting", ["top_p=0.9", "top_k=50"])
def test_old_log_probabilities_of_fewer_tokens_are_refused(setting):
    """The planted answers have tokens that the sampler would not have drawn."""
    recipe = [*RECIPE[:-2], f"actor_rollout_ref.rollout.{setting}"]
    refuse(compose(recipe, None, "ppo_trainer"))
    with pytest.raises(InvalidValue, match=r"top_p or top_k under .*bypass_mode=true"):
        refuse(compose([*recipe, "algorithm.rollout_correction.bypass_mode=true"], None, "ppo_trainer"))


def test_a_rehearsal_of_a_null_setting_is_a_failure_that_names_it(folder):
    rollout = "actor_rollout_ref.rollout"
    for key in ("actor_rollout_ref.model.lora_rank", f"{rollout}.val_kwargs.n", rollout):
        found = rehearse([*RECIPE, f"{key}=null"], folder=folder, stand_in=True)
        assert not found.ok
        assert found.checks[-1].detail.startswith(f"{key} must be ")


def test_what_verl_says_without_a_name_comes_with_the_settings_that_were_nulled(composed):
    key = "actor_rollout_ref.actor.profiler.tool_config.torch.contents"
    config = OmegaConf.merge(composed, OmegaConf.from_dotlist([f"{key}=null"]))
    check = validate(config, [f"{key}=null"])
    assert not check.ok
    assert check.detail.endswith(f" (of the command line: {key}=null)")


def test_what_verl_says_without_a_name_comes_with_the_settings_that_were_deleted():
    word = "~actor_rollout_ref.actor.optim._target_"
    check = validate(compose([*RECIPE, word], None, "ppo_trainer"), [*RECIPE, word])
    assert not check.ok
    assert check.detail.endswith(f" (of the command line: {word})")


def test_changes_keep_what_the_recipe_is_about(composed, folder):
    made = changes(composed, folder, steps=3)
    shrunk = compose([*RECIPE, *[change.override for change in made]], None, "ppo_trainer")
    assert shrunk.actor_rollout_ref.actor.policy_loss == composed.actor_rollout_ref.actor.policy_loss
    assert shrunk.algorithm == composed.algorithm
    assert shrunk.trainer.v1 == composed.trainer.v1
    for name in ("calculate_log_probs", "logprobs_mode", "temperature", "top_p", "top_k"):
        assert shrunk.actor_rollout_ref.rollout[name] == composed.actor_rollout_ref.rollout[name]
    assert shrunk.reward.custom_reward_function == composed.reward.custom_reward_function
    assert shrunk.data.train_batch_size > shrunk.actor_rollout_ref.actor.ppo_mini_batch_size
    assert shrunk.trainer.n_gpus_per_node == shrunk.ray_kwargs.ray_init.num_gpus == 1


def composed_for(mode: ModeName, overrides: Sequence[str] = ()):
    no_batch = ["data.train_batch_size=0"] if mode == "fully_async" else []
    recipe = [*mode_overrides(mode), *RECIPE, *no_batch, *overrides]
    return compose(recipe, None, entry_point(mode).config_name)


@pytest.mark.parametrize("mode", MODES)
def test_each_setting_that_is_changed_is_named_among_what_is_not_covered(mode, folder):
    """A recipe with the rehearsal's own values changes nothing; then one setting at a time has another value."""
    overlong = "reward.reward_kwargs.overlong_buffer_cfg.len"
    sizes = ("actor.ppo", "ref.log_prob", "rollout.log_prob")
    micro = [f"actor_rollout_ref.{size}_micro_batch_size_per_gpu=4" for size in sizes]
    config = composed_for(mode, [*micro, f"+{overlong}=1024"])
    # The value of one setting depends on those of others, which the recipe has in common with the rehearsal.
    for key, value in {"rollout.n": 2, "rollout.val_kwargs.n": 1}.items():
        OmegaConf.update(config, f"actor_rollout_ref.{key}", value)
    OmegaConf.update(config, "data.max_response_length", RESPONSE_TOKENS)
    OmegaConf.update(config, overlong, 8)
    replacements = {
        key: value
        for group in _replacements(config, folder, steps=3)
        for key, value in group.settings.items()
    }
    for key, value in replacements.items():
        same = str(value) if isinstance(value, Path) else value
        OmegaConf.update(config, key, None if value == "null" else same, force_add=True)
    assert changes(config, folder, steps=3) == []
    assert not_covered([]) == [*UNTESTED]

    others = {key: 3 * value for key, value in replacements.items() if type(value) is int and value > 0}
    assert len(replacements) > 60
    for key in replacements:
        # The buffer is the same share of the longest response, so it changes with that.
        other = "data.max_response_length" if key == overlong else key
        same = OmegaConf.select(config, other)
        OmegaConf.update(config, other, others.get(other, "another"))
        made = changes(config, folder, steps=3)
        assert key in [change.key for change in made]
        assert not_covered(made) == [*dict.fromkeys(change.not_covered for change in made), *UNTESTED]
        OmegaConf.update(config, other, same)


@pytest.mark.parametrize("mode", MODES)
def test_a_rehearsal_keeps_the_mode_and_what_the_ratio_refers_to(mode, folder):
    config = composed_for(mode)
    made = [change.override for change in changes(config, folder, steps=3)]
    shrunk = composed_for(mode, made)
    assert mode_of(shrunk) == mode_of(config) == mode
    assert shrunk.algorithm == config.algorithm
    assert in_bypass_mode(shrunk) == (mode != "sync")
    assert validate(shrunk).ok
    assert asynchronous_problem(config) is asynchronous_problem(shrunk) is None


@pytest.mark.parametrize(
    ("mode", "override", "words"),
    [
        ("separate_async", "trainer.v1.separate_async.parameter_sync_step=3", "parameter_sync_step=4"),
        ("separate_async", "data.train_batch_size=250", "make data.train_batch_size a multiple of"),
        ("separate_async", "actor_rollout_ref.rollout.nnodes=0", "rollout.nnodes=1"),
        ("separate_async", "actor_rollout_ref.rollout.checkpoint_engine.backend=naive", "backend=nccl"),
        ("fully_async", "data.train_batch_size=256", "set data.train_batch_size=0"),
        ("fully_async", "data.gen_batch_size=2", "set data.gen_batch_size=1"),
        ("fully_async", "actor_rollout_ref.hybrid_engine=true", "set actor_rollout_ref.hybrid_engine=false"),
        ("one_step_off", "actor_rollout_ref.hybrid_engine=true", "set actor_rollout_ref.hybrid_engine=false"),
    ],
)
def test_what_an_asynchronous_trainer_cannot_have_is_named_before_ray_starts(mode, override, words):
    check = validate(composed_for(mode, [override]))
    assert not check.ok
    assert words in check.detail


@pytest.mark.parametrize(
    ("mini_batch", "epochs", "updates"), [(64, 1, 2), (256, 1, 1), (512, 1, 1), (256, 2, 4)]
)
def test_one_update_for_each_batch_stays_one(mini_batch, epochs, updates, folder):
    """With more, the ratio would refer to an earlier policy, and with one to the same."""
    actor = "actor_rollout_ref.actor"
    recipe = [*RECIPE, f"{actor}.ppo_mini_batch_size={mini_batch}", f"{actor}.ppo_epochs={epochs}"]
    made = changes(compose(recipe, None, "ppo_trainer"), folder, steps=3)
    shrunk = compose([*recipe, *[change.override for change in made]], None, "ppo_trainer")
    per_epoch = shrunk.data.train_batch_size // shrunk.actor_rollout_ref.actor.ppo_mini_batch_size
    assert per_epoch * shrunk.actor_rollout_ref.actor.ppo_epochs == updates


def test_sequence_parallelism_of_actor_and_reference_is_left_out_and_said(folder):
    parallel = [
        f"actor_rollout_ref.{part}.{engine}ulysses_sequence_parallel_size=2"
        for part in ("actor", "ref")
        for engine in ("", "fsdp_config.")
    ]
    recipe = [*RECIPE, "actor_rollout_ref.model.use_remove_padding=true", *parallel]
    made = changes(compose(recipe, None, "ppo_trainer"), folder, steps=3)
    said = {change.key: (change.original, change.value) for change in made}
    assert {setting.partition("=")[0]: ("2", "1") for setting in parallel}.items() <= said.items()
    (why,) = {change.reason for change in made if "ulysses" in change.key}
    assert "FlashAttention" in why


def test_the_recipe_keeps_its_own_setting_of_the_samplers_log_probabilities(folder):
    key = "actor_rollout_ref.rollout.calculate_log_probs"
    for value in ("true", "false"):
        config = compose([*RECIPE, f"{key}={value}"], None, "ppo_trainer")
        assert key not in {change.key for change in changes(config, folder, steps=3)}


@pytest.mark.parametrize("setting", ["bypass_mode=true", "rollout_is=token"])
def test_what_needs_the_samplers_log_probabilities_is_refused_without_them(setting):
    off = "actor_rollout_ref.rollout.calculate_log_probs=false"
    check = validate(compose([*RECIPE, off, f"algorithm.rollout_correction.{setting}"], None, "ppo_trainer"))
    assert not check.ok
    assert "calculate_log_probs=false" in check.detail


@pytest.mark.exhaustive
def test_a_recipe_without_the_samplers_log_probabilities_is_rehearsed_without_them(folder):
    off = "actor_rollout_ref.rollout.calculate_log_probs=false"
    found = rehearse([*RECIPE, off], folder=folder, stand_in=True)
    assert found.ok, found.checks
    assert "rollout_probs_diff_max" not in (folder / "metrics-first.jsonl").read_text()
    (sync,) = [check for check in found.checks if check.name == "weight sync"]
    assert "agree on probabilities" in sync.detail


@pytest.mark.parametrize("source", ["deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "Qwen/Qwen2.5-7B"])
def test_the_stand_in_is_of_the_models_family(source, tmp_path):
    write_model(source, tmp_path)
    family = json.loads((tmp_path / "config.json").read_text())["model_type"]
    assert family in source.lower().replace("qwen2.5", "qwen2")


def test_a_local_model_keeps_its_architecture_and_tokenizer(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>"])
    model = Qwen3Config(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=4)
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "own")
    kept = write_model(str(tmp_path / "own"), tmp_path / "tiny")
    assert "<think>" in kept.get_vocab()
    config = AutoConfig.from_pretrained(tmp_path / "tiny")
    assert (config.model_type, config.num_hidden_layers) == ("qwen3", 2)
    AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")


def test_prompts_come_from_the_recipes_files_and_know_their_answers(tmp_path):
    def row(i):
        text = f"{'x' * (2000 * (i % 2))} {i}?"
        return {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": i}}

    rows = [row(i) for i in range(12)]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    chosen = choose_prompts([str(path)], "prompt", byte_tokenizer(), max_tokens=512, count=4)
    assert [row["reward_model"]["ground_truth"] for row in chosen.rows] == [0, 2, 4, 6]
    assert chosen.answers("prompt", RIGHT_ANSWER)[" 4?"] == "Answer: 4\n#### 4\n\\boxed{4}"
    other = type(chosen)([rows[0] | {"reward_model": "2"}], "")  # a ground truth in another form is not known
    assert other.answers("prompt", RIGHT_ANSWER) == {}
    with pytest.raises(ValueError, match="only 6"):
        choose_prompts([str(path)], "prompt", byte_tokenizer(), max_tokens=512, count=8)


def test_the_command_reports_and_exits_by_what_it_found(folder):
    from typer.testing import CliRunner

    from bandpo_lab.cli.app import app

    misspelt = "actor_rollout_ref.actor.policy_loss.loss_mode=bnad"
    words = ["rehearse", "--output-dir", str(folder), "--", *RECIPE[:-2], misspelt]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 1
    assert (
        "FAIL settings: actor_rollout_ref.actor.policy_loss.loss_mode: no policy loss is named 'bnad'"
        in found.output
    )
    lines = found.output.strip().splitlines()
    assert lines[0] == lines[-1] == "REHEARSAL FAILED: settings"
    assert "Not covered" not in found.output  # nothing ran
