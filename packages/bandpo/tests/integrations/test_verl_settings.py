"""The settings around verl's loss: each does what it says, or is refused by its name, or what happens is announced.

Each row has overrides of verl's config, and what the driver prints (``> TEXT``) or refuses with (``TEXT``).
"""

import re
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest

from helpers.frameworks import needs

needs("verl")

import verl as package
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from integrations.test_verl import begin, whole_config
from omegaconf import OmegaConf, open_dict
from verl.utils import device
from verl.utils.tracking import Tracking
from verl.workers.config import ActorConfig

from bandpo.integrations._settings import REFUSED, get_setting
from bandpo.integrations.verl.announcement import FILE
from bandpo.integrations.verl.driver import Driver
from bandpo.integrations.verl.keys import leaves
from bandpo.integrations.verl.settings import REQUIRED, SECTIONS, check_required

A, L, C = "actor_rollout_ref.actor.", "actor_rollout_ref.actor.policy_loss.", "algorithm.rollout_correction."
R, M, V = "actor_rollout_ref.rollout.", "actor_rollout_ref.model.", "trainer.v1."
S = "ulysses_sequence_parallel_size"
SIZES = [
    "data.train_batch_size=256",
    f"{R}log_prob_micro_batch_size_per_gpu=8",
    "algorithm.adv_estimator=grpo",
]
SIZES += [f"{A}ppo_mini_batch_size=64", f"{A}ppo_micro_batch_size_per_gpu=8"]
SIZES += ["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8"]
TARGETS = {"band": "BandPolicyLossConfig", "audit": "AuditedPolicyLossConfig"}

# ruff: noqa: E501  (a row is a line)
ROWS = r"""
band  | C.rollout_rs=token_k1 C.rollout_rs_threshold=0.5_2.0 | > correction +by verl's driver, once a batch: rollout_rs=token_k1
band  | C.rollout_is=token                   | > correction +by verl's driver, once a batch: rollout_is=token
audit | L.loss_mode=geo_mean C.rollout_is=token | > correction +.*geo_mean multiplies each sequence by the geometric mean
audit | C.rollout_is=token                   | > correction +by verl's driver, once a batch: rollout_is=token
band  |                                      | > correction +none
band  | +rllm.algorithm.loss_agg_mode=seq-mean-token-mean +rllm.algorithm.router_replay=disabled | > average +token-mean$
band  | model_engine=megatron                | > average +token-mean$
band  | model_engine=megatron A.strategy=fsdp2 | A.strategy=fsdp2 under model_engine=megatron: .*set A.strategy=megatron
band  | A.strategy=megatron                  | A.strategy=megatron under model_engine=dp: .*set A.strategy=fsdp
audit | model_engine=megatron A.strategy=fsdp | A.strategy=fsdp under model_engine=megatron
band  | R.name=sglang                        | > average +token-mean$
band  | C.bypass_mode=true C.rollout_rs=token_k1 C.rollout_rs_threshold=0.5_2.0 | rollout_rs=token_k1: .*bypass_mode=false
audit | C.bypass_mode=true C.rollout_rs=token_k1 C.rollout_rs_threshold=0.5_2.0 | rollout_rs=token_k1: .*bypass_mode=false
band  | C.bypass_mode=true C.rollout_is=token | rollout_is=token: .*bypass_mode=false
band  | +L.method='DPPO()' C.bypass_mode=true C.rollout_rs=token_k1 C.rollout_rs_threshold=0.5_2.0 | rollout_rs=token_k1: .*leave it out
band  | C.rollout_rs=token_k1 C.rollout_rs_threshold=0.5_2.0 R.calculate_log_probs=false | calculate_log_probs=false
audit | C.rollout_is=token R.calculate_log_probs=false | calculate_log_probs=false
band  | C.bypass_mode=true R.calculate_log_probs=false | calculate_log_probs=false
band  | C.rollout_rs=token_k1                | rollout_rs.*rollout_rs_threshold
band  | C.rollout_rs=token_k9 C.rollout_rs_threshold=2 | rollout_rs.*token_k9
band  | C.rollout_is=tokens                  | rollout_is.*tokens
band  | C.rollout_rs_threshold=0.5_2.0         | rollout_rs_threshold=0.5_2.0 has no effect without .*rollout_rs
band  | C.rollout_is_threshold=3             | rollout_is_threshold=3 has no effect without .*rollout_is
band  | C.rollout_is_batch_normalize=true    | rollout_is_batch_normalize=True has no effect without .*rollout_is
band  | C.rollout_is=token C.rollout_is_threshold=0.5_5 | rollout_is_threshold=0.5_5: hydra reads the number 0.55
band  | C.rollout_is=token C.rollout_is_threshold=null | rollout_is=token has no effect without .*rollout_is_threshold
band  | C.loss_type=reinforce                | loss_type=reinforce has no effect
audit | C.loss_type=reinforce                | loss_type=reinforce has no effect
band  | +L.rollout_correction.rollout_rs=token_k1 | L.rollout_correction.rollout_rs: .*algorithm.rollout_correction.rollout_rs
audit | +L.rollout_correction.rollout_rs=token_k1 | L.rollout_correction.rollout_rs: .*algorithm.rollout_correction.rollout_rs
audit | L.loss_mode=bypass_mode              | bypass_mode.*algorithm.rollout_correction.bypass_mode=true
audit | L.loss_mode=bypass_mode C.bypass_mode=true C.rollout_rs=token_k1 C.rollout_rs_threshold=0.5_2.0 | \+L.rollout_correction.rollout_rs=token_k1
audit | L.loss_mode=bypass_mode C.bypass_mode=true +L.rollout_correction.rollout_rs=token_k1 +L.rollout_correction.rollout_rs_threshold=0.5_2.0 | > correction +by verl's loss bypass_mode in each worker: .*rollout_rs=token_k1
audit | L.loss_mode=bypass_mode C.bypass_mode=true +L.rollout_correction.rollout_rs=token_k1 | rollout_rs_threshold
band  | +L.method='DAPO()' A.loss_agg_mode=seq-mean-token-mean | loss_agg_mode=seq-mean-token-mean contradicts DAPO.*average=framework
band  | +L.method='GRPO()' A.loss_agg_mode=token-mean | loss_agg_mode=token-mean contradicts GRPO.*average=framework
band  | +L.method='GRPO()' ++A.loss_agg_mode=token-mean | loss_agg_mode=token-mean contradicts GRPO.*average=framework
band  | +L.method='GRPO()'                   | > average +seq-mean-token-mean, the method's own; loss_agg_mode=token-mean
band  | +L.method='GRPO()' +L.average=framework | > average +token-mean, verl's loss_agg_mode, in place of the method's own seq-mean-token-mean
band  | +L.method='DAPO()' A.loss_agg_mode=seq-mean-token-mean +L.average=method | > average +token-mean, the method's own
band  | +L.method='DAPO()' +L.average=token-sum | > average +token-sum, by .*average
band  | +L.average=method                    | > average +token-mean$
band  | +L.average=tokens                    | average must be method, framework or one of token-mean
band  | A.loss_agg_mode=seq-mean-token-sum-norm | loss_agg_mode=seq-mean-token-sum-norm: .*loss_scale_factor
band  | +L.average=seq-mean-token-sum-norm   | average=seq-mean-token-sum-norm: .*loss_scale_factor
audit | A.loss_agg_mode=seq-mean-token-sum-norm | loss_agg_mode=seq-mean-token-sum-norm: .*loss_scale_factor
band  | A.loss_agg_mode=seq-mean-token-sum-norm A.loss_scale_factor=512 | > average +seq-mean-token-sum-norm
audit | L.loss_mode=sapo                     | > average +seq-mean-token-mean, whatever loss_agg_mode says
audit | L.loss_mode=geo_mean                 | > average +a mean over the sequences of each micro-batch
audit | L.loss_mode=vanilla                  | > average +token-mean$
audit | L.loss_mode=dppo_kl A.loss_agg_mode=seq-mean-token-sum | > average +seq-mean-token-sum$
band  | +L.method='GRPO()' A.clip_ratio_c=9  | clip_ratio_c=9.* has no effect beside GRPO
band  | +L.method='GRPO()' A.clip_ratio_c=3.0 | clip_ratio_c=3.0 has no effect beside GRPO
band  | +M.override_config={attn_implementation:sdpa} M.use_remove_padding=true A.S=2 | attn_implementation=sdpa .*A.S=2
band  | +M.override_config={attn_implementation:sdpa} M.use_remove_padding=true A.fsdp_config.S=2 | attn_implementation=sdpa .*fsdp_config.S=2
audit | +M.override_config={attn_implementation:sdpa} M.use_remove_padding=true actor_rollout_ref.ref.S=2 A.use_kl_loss=true | sdpa .*ref.S=2
band  | +M.override_config={attn_implementation:sdpa} M.use_remove_padding=true critic.enable=true critic.S=2 +critic.model.override_config={attn_implementation:sdpa} | sdpa .*critic.S=2
band  | M.use_remove_padding=true A.S=2      | > loss
audit | distillation.enabled=true distillation.distillation_loss.use_task_rewards=false | use_task_rewards=false leaves out
band  | R.top_p=0.9                          | > sampling +top_p=0.9: .*full vocabulary
band  | R.top_k=50 R.temperature=0.7         | > sampling +temperature=0.7, top_k=50: .*full vocabulary
band  |                                      | > sampling +from the full vocabulary
band  | R.top_p=0.9 C.bypass_mode=true       | top_p=0.9: .*bypass_mode
audit | R.top_p=0.9 C.bypass_mode=true       | > sampling +top_p=0.9
band  | R.temperature=0.7 C.bypass_mode=true | > sampling +temperature=0.7
band  | R.temperature=0.7 C.bypass_mode=true R.logprobs_mode=raw_logprobs | logprobs_mode=raw_logprobs: .*temperature=0.7
band  | C.bypass_mode=true                   | > anchor +the sampler's log-probabilities
band  |                                      | > anchor +the trainer's log-probabilities
band  | V.trainer_mode=colocate_async        | > anchor +the trainer's log-.* before the first .*Training is asynchronous.*bypass_mode=true and
band  | V.trainer_mode=separate_async        | > anchor +the log-.*trainer's weights at the last sync.*Training is asynchronous
band  | V.trainer_mode=separate_async C.bypass_mode=true | > anchor +the sampler's log-probabilities
band  | V.trainer_mode=colocate_async A.ppo_mini_batch_size=256 | every ratio is 1 .*training is asynchronous, so set C.bypass_mode=true
band  | V.trainer_mode=colocate_async R.top_p=0.9 C.bypass_mode=true | top_p=0.9: .*leave top_p out$
band  | +L.method='KLCov()' A.ppo_micro_batch_size_per_gpu=4 | has sums .*micro-batch.*use_dynamic_bsz=false
band  | +L.method='BAPO()' A.use_dynamic_bsz=true | has sums .*micro-batch.*use_dynamic_bsz=false
"""


def written(text):
    """With the names of this file for what they stand for."""
    return re.sub(r"\b([ALCRMSV])\b(?=[.=])\.?", lambda name: globals()[name[1]], text)


CASES = [re.split(r" +\| ?", row, maxsplit=2) for row in ROWS.strip().splitlines()]


def words(text):
    return [
        word.replace("'", "") if "policy_loss.method" not in word else word for word in written(text).split()
    ]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    monkeypatch.setattr(Driver, "prepare", lambda *_: None)  # whose hooks would outlast the test


@pytest.mark.filterwarnings(
    "ignore:set sequence parallel to false:UserWarning"
)  # verl's, of Megatron on one GPU
@pytest.mark.filterwarnings("ignore:Disabled critic:UserWarning")  # verl's
@pytest.mark.parametrize(("target", "overrides", "outcome"), CASES, ids=lambda text: text[:70])
def test_a_setting_does_what_it_says_or_is_refused_or_announced(target, overrides, outcome, capsys):
    outcome = written(outcome)

    def examined():
        begin(whole_config(*SIZES, *words(overrides), target=TARGETS[target]))

    if outcome.startswith("> "):
        examined()
        assert re.search(outcome[2:], capsys.readouterr().out, re.MULTILINE)
    else:
        with pytest.raises(Exception, match=outcome) as refused:
            examined()
        assert re.search("bandpo|Invalid", f"{type(refused.value)} {refused.value}")


def trainers_config(name, *overrides, target="BandPolicyLossConfig"):
    """All settings of a run of one of verl's experimental trainers: its own config with overrides."""
    folder = Path(package.__path__[0]) / "experimental" / f"{name}_policy" / "config"
    chosen = [*SIZES, f"{L}_target_=bandpo.integrations.verl.{target}", *overrides]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base=None):
        config = compose(
            f"{name}_ppo_trainer",
            [*chosen, "hydra.searchpath=[pkg://verl.trainer.config]"],
            return_hydra_config=True,
        )
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
        config.trainer.device = "cpu"
    return config


WINDOW = f"{C}rollout_rs=token_k1 {C}rollout_rs_threshold=0.5_2.0"
REFUSED_EVERYWHERE = [
    (f"+{L}method=null", "method is null"),
    (f"{A}clip_ratio_high=0.28", "clip_ratio_high=0.28: it would have no effect"),
    (WINDOW, "rollout_rs=token_k1: under .*bypass_mode=true"),
    (f"{A}loss_agg_mode=seq-mean-token-sum-norm", "loss_scale_factor"),
    ("+ppo_epochs=2", "ppo_epochs: verl does not look there"),
    ("algorithm.filter_groups.enable=true", "filter_groups.enable: the .* trainer ignores it"),
    (f"+{M}override_config={{attn_implementation:sdpa}} {M}use_remove_padding=true {A}{S}=2", "sdpa"),
    (f"{R}top_p=0.9", "top_p=0.9"),
    (f"{R}calculate_log_probs=false", "calculate_log_probs=false"),
]


@pytest.mark.parametrize("trainer", ["one_step_off", "fully_async"])
@pytest.mark.parametrize(("overrides", "message"), REFUSED_EVERYWHERE)
@pytest.mark.parametrize("begins", ["as its main does", "with its tracker"])
@pytest.mark.filterwarnings("ignore:Disabled critic:UserWarning")  # verl's
def test_the_asynchronous_trainers_refuse_the_same(trainer, overrides, message, begins):
    """They validate in a process of Ray's, or not at all."""
    config = trainers_config(trainer, *overrides.split())
    plain = OmegaConf.to_container(config, resolve=True)

    def start():
        if begins == "as its main does":
            device.auto_set_device(config)
        else:
            Tracking("project", "run", default_backend=["file"], config=plain)

    with pytest.raises(ValueError, match=message):
        start()


@pytest.mark.parametrize(
    ("trainer", "updates"), [("one_step_off", "4 for each batch of 256"), ("fully_async", "4 for")]
)
def test_the_asynchronous_trainers_announce_themselves_and_their_anchor(trainer, updates, capsys, tmp_path):
    config = trainers_config(trainer, f"trainer.default_local_dir={tmp_path}/x")
    if trainer == "fully_async":
        config.data.train_batch_size = 0  # as verl wants it
    device.auto_set_device(config)
    text = capsys.readouterr().out
    assert "bandpo: anchor      the sampler's log-probabilities" in text
    assert (
        f"bandpo: mode        {trainer}, on data that older weights may have sampled, on 1 × 8 GPUs" in text
    )
    assert f"bandpo: updates     {updates}" in text
    assert "not verl's" not in text
    # Its tracker, in a process of Ray's, keeps what was announced and says nothing more.
    plain = OmegaConf.to_container(config, resolve=True)
    Tracking("project", "run", default_backend=["file"], config=plain).finish()
    assert (tmp_path / "x/legs/0001" / FILE).exists()
    if trainer == "one_step_off":  # which validates there; the other never does
        begin(config)
    assert "bandpo:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "sync, on the data of the newest weights"),
        (["trainer.use_v1=false"], "sync, on the data of the newest weights"),
        (
            ["trainer.v1.trainer_mode=colocate_async"],
            "colocate_async, on data that older weights may have sampled",
        ),
        (
            ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=2"],
            "separate_async, on data that older weights may have sampled, on 2 × 8 GPUs of the sampler's own",
        ),
    ],
)
def test_the_mode_of_the_trainer_is_announced(overrides, line, capsys, tmp_path):
    device.auto_set_device(whole_config(*SIZES, f"trainer.default_local_dir={tmp_path}/x", *overrides))
    assert f"bandpo: mode        {line}\n" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["verl.workers.config.PolicyLossConfig", None])
def test_a_run_without_bandpo_is_not_touched_by_its_tracker(target, capsys):
    config = whole_config(*SIZES, f"{A}clip_ratio_high=0.28", *WINDOW.split(), f"{C}bypass_mode=true")
    config.actor_rollout_ref.actor.policy_loss._target_ = target or "verl.workers.config.PolicyLossConfig"
    plain = OmegaConf.to_container(config, resolve=True)
    Tracking("project", "run", default_backend=["file"], config=plain).finish()
    begin(config)
    assert "bandpo:" not in capsys.readouterr().out


@pytest.fixture(autouse=True)
def command_line_of_one_test():
    """Reset hydra's command line after each test, as the checks read its deletions."""
    before = HydraConfig.instance().cfg
    yield
    HydraConfig.instance().cfg = before


@pytest.mark.parametrize("key", REQUIRED)
def test_a_setting_without_a_value_is_named_before_verl_fails_over_it(key):
    config = deepcopy(sized())
    OmegaConf.update(config, key, None)
    with pytest.raises(ValueError, match=re.escape(f"{key} must be ")):
        begin(config)


GROUPS = sorted({key.rpartition(".")[0] for key in REQUIRED} | {*SECTIONS, "actor_rollout_ref"})


@pytest.mark.parametrize("key", GROUPS)
@pytest.mark.parametrize("value", [None, 3])
def test_a_group_of_settings_without_settings_is_named(key, value):
    config = deepcopy(sized())
    with open_dict(config):
        OmegaConf.update(config, key, value, merge=False)
    with pytest.raises(ValueError, match=re.escape(f"{key} must be a group of settings, got ")):
        check_required(config)


@pytest.mark.parametrize(
    "key",
    ["trainer.nnodes", f"{A}entropy_coeff", A.rstrip("."), L.rstrip("."), "reward.custom_reward_function"],
)
def test_a_setting_that_the_command_line_deletes_is_named(key):
    config = whole_config(*SIZES, "actor_rollout_ref.model.path=x", f"~{key}")
    with pytest.raises(ValueError, match=re.escape(f"{key} must be ") + f".*~{re.escape(key)} deletes it"):
        check_required(config)


@cache
def sized():
    """Return settings that are accepted."""
    config = whole_config(*SIZES, "actor_rollout_ref.model.path=x")
    begin(deepcopy(config))
    return config


def test_each_needed_setting_is_one_of_verls():
    present = dict(leaves(OmegaConf.to_container(sized())))
    assert set(REQUIRED) <= set(present)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{A}ppo_mini_batch_size", True),
        (f"{A}optim.lr", "fast"),
        (f"{A}use_kl_loss", "yes"),
        ("trainer.default_local_dir", ""),
        ("trainer.nnodes", 0),
    ],
)
def test_a_value_of_another_kind_is_named(key, value):
    config = deepcopy(sized())
    OmegaConf.update(config, key, value)
    with pytest.raises(ValueError, match=re.escape(f"{key} must be ") + f".*got {value!r}"):
        begin(config)


def test_without_bandpo_verl_is_left_to_its_own_checks():
    config = whole_config(*SIZES, target="verl.workers.config.PolicyLossConfig")
    config.trainer.save_freq = None
    begin(config)


@pytest.mark.parametrize("entry", REFUSED["verl"].settings, ids=lambda entry: entry.name)
def test_the_allowed_value_of_a_refused_setting_is_verls_default(entry):
    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    assert get_setting(actor, entry.name) == entry.allowed[0]
