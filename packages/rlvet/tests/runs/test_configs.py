"""A run's own configuration files, written as frameworks write them, and by somebody who means ill."""

import json
import math
import os
import pickle
import zipfile
from argparse import Namespace

import pytest

from bandpo import DAPO, GSPO, KL, Band, FixedClip, Method, TwoSided, Unclipped
from bandpo.core.methods import IPO, PrimeRL
from bandpo.core.objectives import (
    ClippedWeight,
    DropOutside,
    DualClip,
    GammaWeight,
    GeometricMean,
    RatioCap,
    Surrogate,
)
from bandpo.core.text import as_method
from bandpo.replay.record import method_of
from helpers.simulated_runs import trl_log
from rlvet import diagnose
from rlvet.runs.configs import read_configuration, setup_of
from rlvet.runs.setup import Setup, Value

ACTOR = {"ppo_mini_batch_size": 256, "ppo_epochs": 1, "clip_ratio": 0.2, "clip_ratio_c": 3.0}
ACTOR |= {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "policy_loss": {"loss_mode": "vanilla"}}
TRL = {"importance_sampling_level": "token", "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}
TRL |= {"delta": None, "num_iterations": 1, "steps_per_generation": 8, "gradient_accumulation_steps": 8}
SKYRL = {"policy_mini_batch_size": 64, "train_batch_size": 256, "update_epochs_per_batch": 2}
SKYRL["algorithm"] = {
    "policy_loss_type": "gspo",
    "eps_clip_low": 3e-4,
    "eps_clip_high": 4e-4,
    "clip_ratio_c": 3,
}
SKYRL_SECTIONS = {
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "cispo": {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 4.0},
    "dppo": {"dppo_type": "binary_kl", "delta_low": 0.05, "delta_high": 0.05},
    "kl_cov": {"kl_cov_frac": 0.002, "ppo_kl_coef": 1.0},
}
NEMO = {"loss_fn": {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28, "ratio_clip_c": None}}
NEMO |= {"policy": {"train_global_batch_size": 512}}
NEMO |= {"grpo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 16}}
IPO_OF_JUNE = {"loss": {"type": "ipo", "ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3}}
IPO_OF_AUGUST = {"loss": {"type": "ipo", "eps": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3}}
IPO_OF_SEPTEMBER = {"loss": {"type": "ipo", "eps": 0.3, "adv_tau": 1.0, "kl_tau": 0.0}}
PRIME = {"loss": {"type": "default", "dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "kl_tau": 1e-3}}
CLIP = FixedClip(0.2, 0.28)


def archive(path, data):
    """As torch saves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("training_args/data.pkl", data)


def saved(path, settings):
    if path.suffix == ".bin":
        return archive(path, pickle.dumps(Namespace(**settings)))
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(settings)  # which YAML is too
    if path.suffix == ".toml":
        text = "\n".join(["[loss]", *(f"{name} = {json.dumps(x)}" for name, x in settings["loss"].items())])
    return path.write_text(text)


def verl(**loss):
    return {"actor_rollout_ref": {"actor": ACTOR | {"policy_loss": loss}}, "data": {"train_batch_size": 1024}}


@pytest.mark.parametrize(
    ("name", "settings", "framework", "method", "updates"),
    [
        ("checkpoint-5/training_args.bin", TRL, "trl", Method(CLIP), 1),
        (
            "training_args.bin",
            TRL | {"delta": 4.0, "num_iterations": 2},
            "trl",
            Method(CLIP, RatioCap(4.0)),
            2,
        ),
        ("training_args.bin", TRL | {"method": "DAPO()"}, "trl", DAPO(), 1),
        ("training_args.bin", TRL | {"epsilon": "wide"}, "trl", None, 1),
        ("wandb/files/config.yaml", {k: {"value": x} for k, x in TRL.items()}, "trl", Method(CLIP), 1),
        ("outputs/.hydra/config.yaml", verl(loss_mode="vanilla"), "verl", Method(CLIP, DualClip(3)), 4),
        ("config.yaml", verl(loss_mode="mine"), "verl", None, 4),
        ("config.yaml", verl(loss_mode="band", method="GSPO()"), "verl", GSPO(), 4),
        ("config.yaml", {"trainer": SKYRL}, "skyrl", GSPO(), 8),
        ("step_9/config.yaml", NEMO, "nemo-rl", Method(CLIP), 1),
        ("configs/trainer.json", PRIME, "prime-rl", PrimeRL(), None),
        ("configs/trainer.toml", PRIME, "prime-rl", PrimeRL(), None),
        ("configs/trainer.toml", IPO_OF_JUNE, "prime-rl", IPO(), None),
        ("configs/trainer.toml", IPO_OF_AUGUST, "prime-rl", IPO(), None),
        ("configs/trainer.json", IPO_OF_SEPTEMBER, "prime-rl", IPO(0.3, 0.0), None),
        ("configs/trainer.json", {"loss": {"type": "icepop", "kl_tau": 0.0}}, "prime-rl", None, None),
    ],
)
def test_a_framework_s_own_configuration(name, settings, framework, method, updates, tmp_path):
    saved(tmp_path / name, settings)
    level, stale = ("token", False) if framework == "trl" else (None, None)
    setup = read_configuration(tmp_path)
    assert setup == Setup(framework, setup.method, level, updates, stale)
    assert method_of(setup) == method
    if method is None:
        assert setup.method is None
        assert method_of(read_configuration(tmp_path, "GMPO()")) == as_method("GMPO()")
    else:
        assert read_configuration(tmp_path, "GMPO()") == setup  # which the configuration overrules


@pytest.mark.parametrize(
    ("loss_type", "method"),
    [
        ("regular", "FixedClip(0.5, 4.0)"),
        ("dual_clip", "Method(FixedClip(0.5, 4.0), DualClip(3))"),
        ("gspo", "GSPO(0.5, 4.0)"),
        ("sapo", "SAPO()"),
        ("cispo", "CISPO(1.0, 4.0)"),
        ("rollout_is", "IcePop(0.5, 4.0)"),
        ("dppo", "DPPO(KL(), 0.05, inf)"),
        ("kl_cov", "KLCov(0.002, 1.0)"),
        ("importance_sampling", "Unclipped()"),
        ("clip_cov", None),
        ("cross_entropy", None),
    ],
)
def test_skyrls_own_losses(loss_type, method, tmp_path):
    """All of SkyRL 0.3.0; packages/bandpo/tests/integrations/test_skyrl.py compares their gradients."""
    algorithm = {"policy_loss_type": loss_type, "eps_clip_low": 0.5, "eps_clip_high": 4.0, "clip_ratio_c": 3}
    saved(tmp_path / "config.yaml", {"trainer": {"algorithm": algorithm | SKYRL_SECTIONS}})
    text = read_configuration(tmp_path).method
    assert text is None if method is None else as_method(text) == as_method(method)


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({}, Method(CLIP, level="sequence")),
        ({"delta": 4.0}, Method(CLIP, RatioCap(4.0), level="sequence")),
        ({"loss_type": "cispo"}, Method(Unclipped(), ClippedWeight(0.28), level="sequence")),
        ({"loss_type": "vespo"}, Method(Unclipped(), GammaWeight(2.0, 3.0, 3.0, 2.0))),
        ({"loss_type": "other"}, Method(Unclipped(), Surrogate(), level="sequence")),
        ({"method": "FixedClip(0.1)"}, Method(FixedClip(0.1), level="sequence")),
        ({"method": "DAPO()"}, DAPO()),
        ({"epsilon_high": None}, Method(FixedClip(0.2), level="sequence")),
        ({"epsilon": 5.0}, Method(FixedClip(1.0, 0.28), level="sequence")),
    ],
)
def test_trl_s_level_is_that_of_its_ratio(settings, method, tmp_path):
    vespo = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    sequence = {"importance_sampling_level": "sequence"}
    saved(tmp_path / "training_args.bin", TRL | vespo | sequence | settings)
    setup = read_configuration(tmp_path)
    assert (setup.level, method_of(setup)) == ("sequence", method)


@pytest.mark.parametrize(
    ("loss_mode", "method"),
    [
        ("gspo", GSPO(0.2, 0.28)),
        (
            "dppo_kl",
            Method(TwoSided(Band(KL(), 0.2, math.inf), Band(KL(), 0.28, math.inf)), DropOutside(3.0)),
        ),
        ("geo_mean", Method(FixedClip(-math.expm1(-0.2), math.expm1(0.28)), GeometricMean())),
        ("cispo", as_method("CISPO(0.2, 0.28)")),
    ],
)
def test_verl_s_loss_modes(loss_mode, method, tmp_path):
    saved(tmp_path / "config.yaml", verl(loss_mode=loss_mode))
    assert method_of(read_configuration(tmp_path)) == method


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": [0.2]},
        {"epsilon_high": "0.2), __import__('os').system('touch ran'"},
        {"delta": "open('ran', 'w')"},
        {"loss_type": "sapo", "sapo_temperature_pos": "open('ran', 'w')", "sapo_temperature_neg": 1},
        {"loss_type": ["dapo"]},
    ],
)
def test_a_setting_that_is_of_another_kind_gives_no_method(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "training_args.bin", TRL | settings)
    assert read_configuration(tmp_path) == Setup("trl", None, "token", 1, stale=False)
    assert read_configuration(tmp_path, "GSPO()").method == "GSPO()"
    assert [file.name for file in tmp_path.iterdir()] == ["training_args.bin"]


@pytest.mark.parametrize(
    "settings",
    [
        {"importance_sampling_level": "token'), open('ran', 'w'"},
        {"method": "__import__('os').system('touch ran')"},
    ],
)
def test_a_text_within_a_setting_is_not_run(settings, tmp_path, monkeypatch):
    """It stands in the text of the method, which is shown as it is, and cannot be parsed."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "training_args.bin", TRL | settings)
    setup = read_configuration(tmp_path)
    with pytest.warns(UserWarning, match="the method that the run was trained with is not known"):
        assert method_of(setup) is None
    assert method_of(setup, GSPO()) == GSPO()
    assert [file.name for file in tmp_path.iterdir()] == ["training_args.bin"]


def test_the_newest_counts_and_what_cannot_be_read_does_not(tmp_path):
    for age, (name, settings) in enumerate(
        {"a/config.yaml": NEMO, "b/config.yaml": {"trainer": SKYRL}}.items()
    ):
        saved(tmp_path / name, settings)
        os.utime(tmp_path / name, (age, age))
    (tmp_path / "training_args.bin").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "config.yaml").write_text("&a [*a, *a]")
    (tmp_path / "trainer.json").write_text("[" * 100_000)
    archive(tmp_path / "c/training_args.bin", b"\x80\x04" + b"." * 9)
    assert read_configuration(tmp_path).framework == "skyrl"
    assert read_configuration(tmp_path / "a/log.jsonl").framework == "nemo-rl"  # of a log what lies beside it
    assert read_configuration(tmp_path / "none") == Setup()


class Hostile:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def test_a_pickle_that_would_run_a_command_runs_nothing(tmp_path):
    """Alone, as a setting, as a state, and under the name of something harmless."""
    ran = tmp_path / "ran"
    evil = Hostile(ran)
    of_posix = b"cposix\nsystem\n(S'touch " + str(ran).encode() + b"'\ntR."
    built = pickle.dumps(Namespace(**TRL | {"epsilon": evil, "loss_type": evil}))
    for number, data in enumerate(
        (pickle.dumps(evil), of_posix, built, pickle.dumps([evil, Namespace(**TRL)]))
    ):
        archive(tmp_path / str(number) / "training_args.bin", data)
        trl_log(tmp_path / str(number))
        diagnose(tmp_path / str(number))
        assert not ran.exists()
    assert read_configuration(tmp_path / "2") == Setup("trl", None, "token", 1, stale=False)
    pickle.loads(of_posix)  # noqa: S301
    assert ran.exists()  # it would have


@pytest.mark.parametrize(
    ("updates", "clipped", "code"),
    [(1, 0.0, "on-policy"), (1, None, "on-policy"), (2, 0.0, "clip-idle"), (2, None, ""), (1, 0.01, "")],
)
def test_with_its_updates_known_a_log_says_why_nothing_was_clipped(updates, clipped, code, tmp_path):
    trl_log(tmp_path, **{"clip_ratio/region_mean": lambda t: clipped} if clipped is not None else {})
    if clipped is None:
        state = json.loads((tmp_path / "trainer_state.json").read_text())
        for row in state["log_history"]:
            del row["clip_ratio/region_mean"]
        (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    saved(tmp_path / "checkpoint-3/training_args.bin", TRL | {"num_iterations": updates})
    diagnosis = diagnose(tmp_path)
    assert [(f.code, *f.or_else) for f in diagnosis.findings] == ([(code,)] if code else [])
    assert str(diagnosis.setup) == f"trl, FixedClip(0.2, 0.28) per token, updates on each batch: {updates}"


def test_a_configuration_of_another_framework_than_the_log_s_is_none_of_the_run(tmp_path):
    trl_log(tmp_path)
    saved(tmp_path / "config.yaml", NEMO)
    assert str(diagnose(tmp_path).setup) == "trl"


def test_a_boolean_is_no_number():
    setup = Setup("trl", values={"group size": Value("num_generations", True, "config.yaml")})
    assert setup.number("group size") is None
    config = {"num_iterations": True, "steps_per_generation": 4, "gradient_accumulation_steps": 2}
    assert setup_of("trl", config | {"num_iterations": 1}).updates == 2
    assert setup_of("trl", config).updates is None
