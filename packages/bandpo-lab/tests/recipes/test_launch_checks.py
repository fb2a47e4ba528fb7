"""What the launchers refuse before Ray or a hub is asked: files and models that are not here, GPUs that are too few."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bandpo_lab.cli.app import app
from bandpo_lab.cluster.modes import mode_overrides
from bandpo_lab.rehearsal import preflight
from helpers.frameworks import needs

LACKS_ATTENTION = preflight.lacks_attention
ENGINE_PROBLEM = preflight.engine_problem
RECIPE = ["--model", "qwen2.5-3b-instruct", "--method", "band-kl"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the data of the recipes, 8 GPUs, no Ray, and the command that a launch would have become."""
    needs("verl")
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "no-ray"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr("bandpo_lab.rehearsal.preflight.lacks_attention", lambda _: False)
    monkeypatch.setattr("bandpo_lab.rehearsal.preflight.engine_problem", lambda _: None)
    for name in files_of_the_recipe():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    started = []
    monkeypatch.setattr("os.execv", lambda _, command: started.append(command))
    monkeypatch.setattr("bandpo_lab.cli.run.train_into", lambda _, command: started.append(command))
    return started


def files_of_the_recipe() -> list[str]:
    from bandpo_lab.cli.recipes import SHIPPED
    from bandpo_lab.rehearsal.preflight import data_files
    from bandpo_lab.rehearsal.shrink import compose

    words = ["+paper/model=qwen2.5-3b-instruct", "+paper/rule=band-kl", "+paper=recommended"]
    config = compose([*words, f"recipe.data={Path.cwd() / 'data'}"], SHIPPED, "ppo_trainer")
    return [*data_files(config, "train"), *data_files(config, "val")]


def launched(*words: str):
    return CliRunner().invoke(app, ["run", "verl", *words])


def refusal(*words: str) -> str:
    """Why a launch is refused; the error that `bandpo-lab` prints, with exit status 2."""
    found = launched(*words)
    assert isinstance(found.exception, ValueError), found.output
    return str(found.exception)


def test_a_run_whose_files_and_gpus_are_here_starts(here):
    assert launched(*RECIPE).exception is None
    assert len(here) == 1


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        (["tensor_model_parallel_size=3"], 3),
        (["tensor_model_parallel_size=2", "data_parallel_size=8"], 16),
        (["pipeline_model_parallel_size=5"], 5),
    ],
)
def test_replicas_of_the_engine_that_do_not_divide_the_gpus_are_refused(here, settings, size):
    words = [f"actor_rollout_ref.rollout.{setting}" for setting in settings]
    why = refusal(*RECIPE, *words)
    assert f"gives each replica of the engine {size} GPUs, which do not divide the 8 of the trainer" in why
    assert all(setting in why for setting in settings)
    assert here == []


def test_the_default_of_verl_does_not_fit_one_gpu(here):
    """A model that is no recipe has verl's tensor_model_parallel_size of 2, which one GPU cannot hold."""
    words = ("--model", "gpt2", "--method", "band-kl")
    assert "tensor_model_parallel_size=2" in refusal(*words, "trainer.n_gpus_per_node=1")
    fits = ("trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    assert launched(*words, *fits).exception is None


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_data_file_that_is_missing_is_named(here, split):
    name = f"data.{split}_files=[/nowhere/{split}.parquet]"
    assert f"data.{split}_files: /nowhere/{split}.parquet is not here" in refusal(*RECIPE, name)
    assert here == []


def test_the_folder_of_the_data_is_named_with_what_makes_it(here):
    why = refusal(*RECIPE, "--data", "elsewhere")
    assert f"{Path.cwd()}/elsewhere/" in why
    assert "bandpo-lab setup` with the same --model, --settings and --task" in why
    assert "--stand-in" not in why
    assert here == []


@pytest.mark.parametrize("name", ["./missing", "../missing", "/nowhere/missing", "~/missing", "missing/"])
def test_a_model_that_can_only_be_a_folder_and_is_none_is_refused(here, name):
    path = str(Path(name).expanduser()) if name[0] == "~" else name
    why = refusal("--model", name, "--method", "band-kl")
    assert f"actor_rollout_ref.model.path: {path} is not here" in why
    assert here == []


def test_a_model_folder_needs_its_config(here, tmp_path):
    (tmp_path / "mine").mkdir()
    why = refusal("--model", "./mine", "--method", "band-kl")
    assert "actor_rollout_ref.model.path: ./mine has no config.json" in why
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert launched("--model", "./mine", "--method", "band-kl").exception is None
    assert len(here) == 1


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "gpt2"])
def test_a_name_of_the_hub_is_not_looked_up(here, name):
    assert launched("--model", name, "--method", "GSPO(0.01)").exception is None
    assert len(here) == 1


@pytest.mark.parametrize(
    ("model", "method", "words"),
    [
        ("qwen2.5-3b-instuct", "band-kl", "is no model of the recipes.*did you mean qwen2.5-3b-instruct?"),
        ("Qwen2.5-7B", "band-kl", "did you mean qwen2.5-7b?"),
        ("qwen2.5-3b-instruct", "band-k", "'band-k' is no rule of the recipes.*did you mean band-kl?"),
        ("qwen2.5-3b-instruct", "cliphigher", "did you mean clip-higher?"),
        ("qwen2.5-3b-instruct", "vanila", "did you mean vanilla?"),
        ("qwen2.5-3b-instruct", "start_grpo_official", "the recipes have .*docs/which-method.md has the methods"),
        ("qwen2.5-3b-instruct", "band-x", "is no rule of the recipes.*band-chi2, band-kl, "),
        ("qwen2.5-3b-instruct", "GSPPO(0.01)", "did you mean GSPO?"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_misspelt_name_of_the_recipes_is_corrected(here, model, method, words, dry):
    first, _, last = words.rpartition(".*")
    why = refusal("--model", model, "--method", method, *dry)
    assert first in why
    assert last in why
    assert here == []


def test_a_folder_of_a_misspelt_name_is_a_model(here, tmp_path):
    folder = tmp_path / "qwen2.5-3b-instuct"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert launched("--model", folder.name, "--method", "band-kl").exception is None


def test_a_method_in_lower_case_is_the_rule_of_the_recipes_or_a_method(here):
    assert launched("--model", "gpt2", "--method", "grpo", "--dry-run").exit_code == 0
    assert launched("--model", "gpt2", "--method", "GSPO", "--dry-run").exit_code == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.n_gpus_per_node=16"], "trainer.nnodes is 16 × 1 = 16, and 8 GPUs are here"),
        (["trainer.nnodes=2"], "trainer.nnodes is 8 × 2 = 16, and 8 GPUs are here"),
    ],
)  # fmt: skip
def test_more_gpus_than_are_here_are_refused(here, overrides, words):
    why = refusal(*RECIPE, *overrides)
    assert words in why
    assert "RAY_ADDRESS" in why
    assert here == []


@pytest.mark.parametrize(
    "key",
    [
        "trainer.default_local_dir",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "data.train_files",
        "trainer.n_gpus_per_node",
        "actor_rollout_ref.model",
    ],
)
def test_a_setting_without_a_value_is_named(here, key):
    assert refusal(*RECIPE, f"{key}=null").startswith(f"{key} must be ")
    assert here == []


@pytest.mark.filterwarnings("ignore:Ray state API:DeprecationWarning")  # verl's
@pytest.mark.parametrize(
    "word",
    [
        "actor_rollout_ref.actor.profiler.tool_config.torch.contents=null",
        "~actor_rollout_ref.actor.optim._target_",
        "model_engine=null",
        "~recipe.rule",
        "recipe=null",
    ],
)
def test_a_setting_without_a_value_over_which_verl_or_hydra_fails_is_named_before_a_leg_is_made(here, word):
    assert f"(of the command line: {word})" in refusal(*RECIPE, word)
    assert here == []


def test_no_gpu_at_all_is_said(here, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "sees no GPU" in refusal(*RECIPE)
    assert here == []


def find_spec_without(missing, monkeypatch):
    """Let all modules be found, except some."""
    find = importlib.util.find_spec
    engines = {"vllm": sys, "sglang": sys}
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *a: None if name in missing else engines.get(name) or find(name, *a),
    )


@pytest.mark.parametrize(("name", "engine"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_an_engine_that_is_not_installed_is_named(here, monkeypatch, name, engine):
    monkeypatch.setattr("bandpo_lab.rehearsal.preflight.engine_problem", ENGINE_PROBLEM)
    find_spec_without({name}, monkeypatch)
    why = refusal(*RECIPE, f"actor_rollout_ref.rollout.name={name}")
    assert f"{engine} is not installed, which is to generate (actor_rollout_ref.rollout.name={name})" in why
    assert here == []
    # A cluster's nodes are not looked at from here.
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert launched(*RECIPE, f"actor_rollout_ref.rollout.name={name}").exception is None


@pytest.mark.parametrize(("free", "starts"), [(80.0, True), (56.0, True), (55.0, False), (3.0, False)])
def test_memory_that_the_engine_claims_and_is_not_free_is_named(here, monkeypatch, free, starts):
    monkeypatch.setattr("bandpo_lab.rehearsal.preflight.engine_problem", ENGINE_PROBLEM)
    find_spec_without(set(), monkeypatch)
    of_gpu = [(80 * 2**30, 80 * 2**30)] * 7 + [(int(free * 2**30), 80 * 2**30)]
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: of_gpu[index])
    if starts:
        assert launched(*RECIPE).exception is None
    else:
        why = refusal(*RECIPE)
        assert "vLLM claims 56.0 GiB of GPU 7 (actor_rollout_ref.rollout.gpu_memory_utilization=0.7)" in why
        assert f"{free:.1f} of 80.0 GiB are free" in why
        assert here == []


def test_a_plug_in_that_verl_does_not_see_is_said_at_the_start_and_in_a_rehearsal(here, monkeypatch):
    from bandpo_lab.cli.recipes import SHIPPED
    from bandpo_lab.rehearsal.shrink import compose

    monkeypatch.setattr("bandpo_lab.cluster.node.entry_points", lambda group: [])
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    assert "export VERL_USE_EXTERNAL_MODULES=bandpo.integrations.verl" in refusal(*RECIPE)
    assert here == []
    config = compose(
        ["+paper/model=qwen2.5-3b-instruct", "+paper/rule=grpo", "+paper=recommended"], SHIPPED, "ppo_trainer"
    )
    check = preflight.validate(config)
    assert not check.ok
    assert "verl does not see bandpo's plug-in" in check.detail


SDPA = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_flash_attention_is_named_where_it_is_missing(here, monkeypatch):
    monkeypatch.setattr("bandpo_lab.rehearsal.preflight.lacks_attention", LACKS_ATTENTION)
    why = refusal(*RECIPE)
    assert "flash-attn is not installed" in why
    assert SDPA in why
    assert here == []
    assert launched(*RECIPE, SDPA).exception is None
    # A cluster's nodes are not looked at from here.
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert launched(*RECIPE).exception is None


def test_every_lack_is_named_at_once(here, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    why = refusal("--model", "./missing", "--method", "band-kl", "--data", "elsewhere")
    assert why.startswith("not started: ")
    assert all(words in why for words in ("./missing is not here", "elsewhere", "sees no GPU"))


def test_the_gpus_of_a_cluster_are_rays_to_count(here, tmp_path, monkeypatch):
    many = [*RECIPE, "trainer.nnodes=4"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert launched(*many).exception is None
    monkeypatch.delenv("RAY_ADDRESS")
    assert launched(*many, "+ray_kwargs.ray_init.address=auto").exception is None
    # Ray joins the cluster that `ray start` has begun on this machine.
    (tmp_path / "no-ray").mkdir()
    (tmp_path / "no-ray" / "ray").mkdir()
    (tmp_path / "no-ray" / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert launched(*many).exception is None
    assert "8 GPUs are here" in refusal(*many, "+ray_kwargs.ray_init.address=local")
    assert len(here) == 3


def test_files_behind_a_ray_client_are_not_on_this_machine(here, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert launched(*RECIPE, "--data", "/shared/data").exception is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "/shared/data" in refusal(*RECIPE, "--data", "/shared/data")


def test_what_lies_in_other_storage_is_not_looked_up(here):
    files = [f"data.{split}_files=hdfs://cluster/{split}.parquet" for split in ("train", "val")]
    assert launched(*RECIPE, *files, "actor_rollout_ref.model.path=hdfs://cluster/qwen").exception is None


ASYNCHRONOUS = {
    "colocate_async": "verl.trainer.main_ppo",
    "separate_async": "verl.trainer.main_ppo",
    "fully_async": "verl.experimental.fully_async_policy.fully_async_main",
    "one_step_off": "verl.experimental.one_step_off_policy.main_ppo",
}


@pytest.mark.parametrize(("mode", "program"), ASYNCHRONOUS.items())
def test_a_mode_has_its_program_and_the_anchor_of_the_sampler(mode, program, here):
    own = "trainer.n_gpus_per_node=4"
    found = launched(*RECIPE, "--mode", mode, own)
    assert found.exit_code == 0, found.output
    [command] = here
    assert command[1:3] == ["-m", program]
    settings = [word.partition("=")[::2] for word in command]
    assert ("algorithm.rollout_correction.bypass_mode", "true") in settings
    assert ("actor_rollout_ref.rollout.calculate_log_probs", "true") in settings
    # What the user writes comes last, and takes precedence.
    assert command.index(own) > max(command.index(word) for word in mode_overrides(mode))


@pytest.mark.parametrize("mode", ["separate_async", "fully_async", "one_step_off"])
def test_the_gpus_of_the_sampler_are_counted(mode, here):
    words = refusal(*RECIPE, "--mode", mode)
    assert "trainer.nnodes is 8 × 1 = 8, and the sampler has 8 × 1 more, and 8 GPUs are here" in words
    assert not here
    assert launched(*RECIPE, "--mode", "colocate_async").exit_code == 0


def test_a_number_of_updates_that_separate_async_cannot_have_is_refused(here):
    words = refusal(
        *RECIPE, "--mode", "separate_async", "data.train_batch_size=128", "trainer.n_gpus_per_node=4"
    )
    assert "set trainer.v1.separate_async.parameter_sync_step=2" in words


def test_one_step_is_of_the_synchronous_trainer(here):
    assert "--one-step with --mode fully_async" in refusal(*RECIPE, "--mode", "fully_async", "--one-step")


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_rehearsal_keeps_the_mode(mode, here):
    assert launched(*RECIPE, "--mode", mode, "--rehearse").exit_code == 0
    [command] = here
    words = ["--mode", mode] if mode != "sync" else []
    assert command[3 : 5 + len(words)] == ["rehearse", "--stand-in", *words]
    assert (
        "algorithm.rollout_correction.bypass_mode=true" not in command
    )  # the rehearsal adds the mode's settings


def test_a_dry_run_looks_for_no_files_and_no_gpus(here, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = launched("--model", "./missing", "--method", "band-kl", "--data", "/nowhere", "--dry-run")
    assert found.exit_code == 0
    assert "verl.trainer.main_ppo" in found.output
    assert here == []


def test_a_rehearsal_needs_neither(here, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert launched(*RECIPE, "--data", "/nowhere", "--rehearse").exception is None
    assert len(here) == 1


def test_one_step_on_the_gpus_names_missing_files_too(here):
    found = CliRunner().invoke(app, ["run", "verl", "--one-step", *RECIPE, "--data", "/nowhere"])
    assert "not started: " in str(found.exception)
    assert "/nowhere" in str(found.exception)


FOLDERS = ["./missing", "../missing", "/nowhere/missing", "~/missing", "missing/"]


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize(
    ("option", "what"), [("model_name_or_path", "folder"), ("dataset_name", "file or folder")]
)
@pytest.mark.parametrize("form", ["--{} {}", "--{}={}"])
def test_train_names_a_missing_folder_before_trl_is_imported(tmp_path, monkeypatch, option, what, name, form):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "trl", None)  # importing it is an error
    for spelled in (option, option.replace("_", "-")):
        found = CliRunner().invoke(app, ["train", *form.format(spelled, name).split()])
        assert isinstance(found.exception, ValueError), found.output
        assert f"{option} {name}: there is no such {what}" in str(found.exception)


def test_train_takes_folders_that_are_there_and_names_of_the_hub(tmp_path, monkeypatch):
    from bandpo_lab.files.writing import check_path

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "rows.json").write_text(json.dumps({}))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("./mine", "mine/", "~/mine", str(tmp_path / "mine"), "Qwen/Qwen3-4B", "missing", "a/b"):
        check_path("model_name_or_path", name)
    check_path("dataset_name", "./rows.json", "file or folder")
    with pytest.raises(ValueError, match="there is no such folder"):
        check_path("model_name_or_path", "./rows.json")


def test_train_names_a_missing_folder_of_its_yaml_file(tmp_path, monkeypatch):
    needs("trl")
    from bandpo_lab.training.arguments import parse_arguments

    (tmp_path / "run.yaml").write_text("model_name_or_path: ./missing\ndataset_name: multiplication\n")
    with pytest.raises(ValueError, match=r"model_name_or_path ./missing: there is no such folder"):
        parse_arguments(["--config", str(tmp_path / "run.yaml")])
