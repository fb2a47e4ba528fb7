"""What a rehearsal concludes from the metrics, the log and the recorded calls of the loss."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from helpers.frameworks import needs

needs("verl")

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from bandpo import KL, Band, FixedClip, Rows, TotalVariation, Unclipped, policy_loss
from bandpo.core.divergences import PearsonChi2
from bandpo.core.methods import METHODS, Method
from bandpo.core.objectives import DualClip
from bandpo_lab.rehearsal import by_hand, files
from bandpo_lab.rehearsal.checks import (
    STALENESS,
    Expectations,
    demanded_metrics,
    explain,
    first_run_checks,
)
from bandpo_lab.rehearsal.inputs import write_model
from bandpo_lab.rehearsal.samples import Sample, Versions
from bandpo_lab.rehearsal.shrink import compose

BAND = Method(Band(KL(), 0.05), DualClip(3.0))
LOSSES = files.LOSSES.format("first")


def expected(loss_mode: str = "band", method: Method | None = BAND) -> Expectations:
    return Expectations(loss_mode, method, answers={})


def record(
    folder: Path, method: Method = BAND, spread: float = 0.5, scale: float = 1.0, unit: float = 1.0
) -> None:
    """Two calls of the loss as a worker writes them down, the first of them before anything was learnt."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for call in range(2):
        old = -3 * torch.rand(4, 32)
        logp = (old + call * spread * torch.randn(4, 32)).clamp(max=-1e-3)
        write_call(folder / f"7-{call:04d}.pt", logp, old, method, scale, unit)


def write_call(
    path: Path,
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    method: Method = BAND,
    scale: float = 1.0,
    unit: float = 1.0,
) -> None:
    """One call of the loss, on four sequences of 32, 20, 9 and 1 tokens."""
    logp = log_prob.requires_grad_()
    mask = torch.arange(32) < torch.tensor([[32], [20], [9], [1]])
    advantages = unit * torch.tensor([[1.0], [-1.0], [0.5], [-2.0]]).expand(4, 32)
    loss = policy_loss(logp, old_log_prob, advantages, mask, method=method, layout=Rows()).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    written = {
        "log_prob": logp.detach(), "old_log_prob": old_log_prob, "advantages": advantages, "response_mask": mask,
        "gradient": scale * gradient, "loss_agg_mode": "token-mean", "rollout_is_weights": None,
        "average": {"dp_size": torch.tensor(1)}, "average_setting": None,
    }  # fmt: skip
    by_hand.save(written, path)


def write_run(folder: Path, **metrics: float | None) -> None:
    """What a good run of two steps leaves, with some metrics replaced or, for None, left out."""
    good = {"actor/pg_loss": 0.1, "actor/grad_norm": 0.4, "training/rollout_probs_diff_max": 5e-9}
    good |= {"actor/clip_high": 0.0, "val-core/math_dapo/acc/mean@1": 0.5}
    data = {name: value for name, value in (good | metrics).items() if value is not None}
    lines = [json.dumps({"step": step, "data": data}) for step in (1, 2)]
    (folder / "metrics-first.jsonl").write_text("\n".join(lines))
    (folder / "checkpoints" / "global_step_2").mkdir(parents=True, exist_ok=True)
    record(folder / LOSSES)


def failed(folder: Path, run: Expectations | None = None) -> list[str]:
    return [check.name for check in first_run_checks(folder, 2, run or expected()) if not check.ok]


@pytest.mark.parametrize(
    ("metrics", "written", "parts"),
    [
        ({}, {}, []),
        ({"actor/grad_norm": 0.0}, {}, ["gradient"]),
        ({"training/rollout_probs_diff_max": 1e-4}, {}, ["weight sync"]),
        ({"training/rollout_probs_diff_max": float("nan")}, {}, ["weight sync"]),
        ({"actor/pg_loss": float("nan")}, {}, ["policy loss"]),
        ({"actor/clip_high": None}, {}, ["policy loss"]),  # another loss under Band's name
        ({}, {"method": replace(BAND, clip=Band(KL(), 0.06))}, ["loss by hand"]),
        ({}, {"method": replace(BAND, clip=FixedClip(0.2, 0.2))}, ["loss by hand"]),
        ({}, {"method": replace(BAND, objective=DualClip(1.5))}, ["loss by hand"]),
        ({}, {"scale": 1.001}, ["loss by hand"]),
        ({}, {"spread": 0.0}, ["clip"]),
    ],
)
def test_metrics_and_recorded_losses_decide(metrics, written, parts, tmp_path):
    write_run(tmp_path, **metrics)
    record(tmp_path / LOSSES, **written)
    assert failed(tmp_path) == parts


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("ValueError: Unsupported loss mode: bnad. Supported modes are: []", "no policy loss named bnad"),
        (
            "(AgentLoopWorkerTQ pid=7) ERROR:Error in _run_prompt for uid=1\n(AgentLoopWorkerTQ pid=7) Traceback\n"
            "(AgentLoopWorkerTQ pid=7) KeyError: 'answer'\nValueError: Received an empty list as keys.",
            "A response or its reward failed with: KeyError: 'answer'",
        ),
        ("Traceback\nray.exceptions.RayTaskError(OSError): run()\nOSError: disk full", "OSError: disk full"),
        (
            "\x1b[36m(RewardLoopWorker pid=7)\x1b[0m FileNotFoundError: no \x1b[1mrewrad.py\x1b[0m\n",
            "It failed with: FileNotFoundError: no rewrad.py. See",
        ),
        ("all is well", "No exception"),
    ],
)
def test_the_cause_is_found_in_the_log(log, words, tmp_path):
    (tmp_path / "log-first.txt").write_text(log)
    assert words in explain(tmp_path, "first")


@pytest.mark.parametrize(
    "method",
    [
        BAND,
        Method(Band(TotalVariation(), 0.05)),
        Method(Band(PearsonChi2(), 0.05), DualClip(1.5)),
        Method(FixedClip(0.2, 0.28), DualClip(3.0)),
    ],
    ids=repr,
)
def test_the_loss_agrees_with_its_formula(method, tmp_path):
    record(tmp_path, method)
    found = by_hand.compare(by_hand.load(tmp_path), method)
    assert found.independent
    assert found.difference < 5e-7
    assert 10 < found.clipped < found.tokens == 124


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_reference_and_clips_if_it_has_a_rule(name, tmp_path):
    method = METHODS[name].method()
    record(tmp_path, method, spread=2.0)
    found = by_hand.compare(by_hand.load(tmp_path), method)
    assert found.independent == by_hand.has_formula(method)
    assert found.difference < 1e-6
    assert bool(found.clipped) == (method.clip != Unclipped())


@pytest.mark.parametrize("method", [BAND, None])
def test_a_rule_without_effect_is_a_warning_if_the_recipe_makes_one_update_for_each_batch(method, tmp_path):
    write_run(tmp_path, **{"actor/pg_clipfrac": 0.0})
    record(tmp_path / LOSSES, spread=0.0)
    run = expected(method=method)
    assert failed(tmp_path, run) == ["clip"]
    checks = first_run_checks(tmp_path, 2, replace(run, makes_one_update=True))
    (clip,) = [check for check in checks if check.name == "clip"]
    assert (clip.ok, clip.warning) == (True, True)
    assert "one update for each batch" in clip.detail


def test_without_advantages_the_rule_is_not_judged(tmp_path):
    write_run(tmp_path)
    record(tmp_path / LOSSES, unit=0.0)
    checks = first_run_checks(tmp_path, 2, expected())
    assert all(check.ok for check in checks)
    assert [check.name for check in checks if check.warning] == ["clip"]


def test_a_rule_that_clips_nothing_is_not_asked_to(tmp_path):
    write_run(tmp_path)
    method = Method(Unclipped())
    record(tmp_path / LOSSES, method)
    assert failed(tmp_path, expected(method=method)) == []


@pytest.mark.parametrize(("share", "parts"), [(0.1, []), (0.0, ["clip"])])
def test_a_loss_of_verls_own_is_judged_by_its_metric(share, parts, tmp_path):
    write_run(tmp_path, **{"actor/pg_clipfrac": share})
    run = expected("gspo", None)
    assert failed(tmp_path, run) == parts
    checks = first_run_checks(tmp_path, 2, run)
    assert "gradient of the loss" in [check.name for check in checks if check.warning]


ASKED = {
    "algorithm.rollout_correction.rollout_rs=token_k1": "rollout_corr/rollout_rs_masked_fraction",
    "actor_rollout_ref.actor.use_kl_loss=true": "actor/kl_loss",
    "actor_rollout_ref.actor.entropy_coeff=0.01": "actor/entropy_loss",
    "algorithm.use_kl_in_reward=true": "actor/reward_kl_penalty",
    "actor_rollout_ref.rollout.calculate_log_probs=true": "training/rollout_probs_diff_max",
}


@pytest.mark.parametrize(("setting", "metric"), ASKED.items())
@pytest.mark.parametrize("logged", [True, False])
def test_the_metric_of_what_the_recipe_asks_for_is_demanded(setting, metric, logged, tmp_path):
    """verl leaves out a rejection in silence where no code of it applies the setting."""
    off = ["actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.rollout.calculate_log_probs=false"]
    assert demanded_metrics(compose(off, None, "ppo_trainer")) == {}
    config = compose([*off, setting], None, "ppo_trainer")
    (demand,) = demanded_metrics(config).items()
    assert demand == (metric, "algorithm.rollout_correction" if "rollout_corr" in metric else setting)
    write_run(tmp_path, **{metric: 1e-9 if logged else None})
    checks = first_run_checks(tmp_path, 2, replace(expected(), metrics=dict([demand])))
    (check,) = [check for check in checks if check.name == "metrics"]
    assert check.ok == logged
    assert metric in check.detail
    assert "metrics" not in [check.name for check in first_run_checks(tmp_path, 2, expected())]


def test_the_audit_of_bandpos_loss_is_demanded():
    target = "actor_rollout_ref.actor.policy_loss._target_=bandpo.integrations.verl.BandPolicyLossConfig"
    assert "audit/tokens" in demanded_metrics(compose([target], None, "ppo_trainer"))
    off = "+actor_rollout_ref.actor.policy_loss.audit=false"
    assert "audit/tokens" not in demanded_metrics(compose([target, off], None, "ppo_trainer"))


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> Path:
    """A folder with a tiny model and its weights of version 0, and of version 1, which are other ones."""
    folder = tmp_path_factory.mktemp("versions")
    write_model("Qwen/Qwen2.5-3B-Instruct", folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.save(model.state_dict(), folder / files.WEIGHTS.format(0))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    torch.save(model.state_dict(), folder / files.WEIGHTS.format(1))
    return folder


def write_old_data(folder: Path, versions: Path, sampled: int = 0, shifted: int = 0) -> None:
    """What a run of two steps leaves whose second step trains on the data of a version; some of it is shifted."""
    shutil.copytree(versions, folder, dirs_exist_ok=True)
    write_run(folder, **{"training/rollout_probs_diff_max": None})
    torch.manual_seed(1)
    lengths = (32, 20, 9, 1)
    sampler = Versions(folder)
    lines = []
    for call, version in enumerate((0, sampled)):
        tokens = [torch.randint(200, (6 + length,)).tolist() for length in lengths]
        samples = [Sample(version, ids[:6], ids[6:], 1.0, ()) for ids in tokens]
        old = sampler.score(version, samples)
        samples = [replace(sample, log_probs=row) for sample, row in zip(samples, old, strict=True)]
        new = sampler.score(call, samples)
        lines += [json.dumps(asdict(sample)) for sample in samples]
        rows = {
            name: pad_sequence([torch.tensor(row) for row in values], batch_first=True, padding_value=-1.0)
            for name, values in {"old_log_prob": old, "log_prob": new}.items()
        }
        if call == 1 and shifted:
            rows["old_log_prob"][0] = rows["old_log_prob"][0].roll(shifted)
        write_call(folder / LOSSES / f"7-{call:04d}.pt", **rows)
    (folder / files.SAMPLES.format("first")).write_text("\n".join(lines))


OLD_DATA = Expectations("band", BAND, {}, mode="colocate_async", has_samplers_anchor=True)


def test_old_data_passes_with_its_age(versions, tmp_path):
    write_old_data(tmp_path, versions)
    checks = {check.name: check for check in first_run_checks(tmp_path, 2, OLD_DATA)}
    assert all(check.ok for check in checks.values()), checks
    assert checks["anchor"].detail == (
        "the old log-probabilities of all 8 sequences are the sampler's, bit for bit"
    )
    assert "step 1: 0, step 2: 1" in checks["age"].detail
    assert failed(tmp_path, replace(OLD_DATA, mode="sync")) == []


def test_log_probabilities_shifted_by_one_token_are_not_the_samplers(versions, tmp_path):
    write_old_data(tmp_path, versions, shifted=1)
    assert failed(tmp_path, OLD_DATA) == ["anchor"]
    assert failed(tmp_path, replace(OLD_DATA, has_samplers_anchor=False)) == ["age"]  # nothing says how old


def test_an_asynchronous_run_on_new_data_has_not_tested_old_data(versions, tmp_path):
    write_old_data(tmp_path, versions, sampled=1)
    assert failed(tmp_path, OLD_DATA) == ["clip", "age"]


def test_the_age_is_the_one_that_verl_logs(versions, tmp_path):
    write_old_data(tmp_path, versions)
    path = tmp_path / "metrics-first.jsonl"
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    for ages, names in {(0, 1): [], (0, 2): ["age"]}.items():
        for row, age in zip(runs, ages, strict=True):
            row["data"][STALENESS] = age
        path.write_text("\n".join(map(json.dumps, runs)))
        assert failed(tmp_path, OLD_DATA) == names


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
@pytest.mark.parametrize("fault", ["the version before", "missing"])
def test_weights_that_the_sampler_did_not_receive_are_found_by_version(fault, mode, versions, tmp_path):
    write_old_data(tmp_path, versions)
    newest = tmp_path / files.WEIGHTS.format(1)
    newest.unlink()
    if fault != "missing":
        shutil.copy(versions / files.WEIGHTS.format(0), newest)
    assert failed(tmp_path, replace(OLD_DATA, mode=mode)) == ["weight sync"]


def test_without_any_of_the_samplers_probabilities_the_weight_sync_is_not_passed(versions, tmp_path):
    shutil.copytree(versions, tmp_path, dirs_exist_ok=True)
    write_run(tmp_path, **{"training/rollout_probs_diff_max": None})
    assert "weight sync" in failed(tmp_path)
