"""The audit in stock verl: it changes no loss, and its rates are those over all tokens, however verl averages."""

import json
import os
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

pytest.importorskip("verl", reason="needs the extra bandpo[verl]")

from typer.testing import CliRunner
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, register_policy_loss
from verl.utils import metric
from verl.utils.py_functional import append_to_dict, rename_dict
from verl.utils.tracking import Tracking
from verl.workers.config import PolicyLossConfig

from bandpo.audit.logs import read_log, summarize
from bandpo.audit.metrics import LOGGED, Audit, logged
from bandpo.audit.watch import BandWarning
from bandpo.batch import Batch
from bandpo.cli.app import app
from bandpo.integrations._verl_audit import SUMS, Driver, Reporter, method_of
from bandpo.integrations.verl import AuditedPolicyLossConfig, BandPolicyLossConfig
from bandpo.text import as_method
from integrations.test_verl import SAME, actor_config, batch, batch_for, composed, evaluate, ranges

OWN = sorted(POLICY_LOSS_REGISTRY.keys() - {"band", "audited"})
RANGES = ranges(0.1, 0.3)
MORE = {"dro": {"dro_beta": 0.5}, "kl_cov": {"kl_cov_ratio": 0.1}}
MORE["clip_cov"] = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.1}


@pytest.fixture(autouse=True)
def a_later_loss(monkeypatch):
    """No loss of a test is its process's first, of which more is told: which test runs first would matter."""
    reporter = Reporter()
    reporter._moved = True
    monkeypatch.setattr("bandpo.integrations.verl._reporter", reporter)


def own_sums(metrics):
    return {name: value for name, value in metrics.items() if name.startswith(SUMS)}


def read(metrics, driver=None):
    """The audit of one loss, as the driver reads it."""
    return (driver or Driver()).take({name: [value] for name, value in own_sums(metrics).items()})


def the_audit(tensors, parts, **rest):
    """The same by the core."""
    names = ("log_prob", "old_log_prob", "advantages", "response_mask")
    return Audit.from_batch(*(tensors[name] for name in names), method=parts, **rest)


@pytest.mark.parametrize("name", OWN)
def test_the_audit_changes_nothing_of_verls_own_losses(name):
    settings = MORE.get(name, {})
    tensors = batch(5, spread=1.2)
    torch.manual_seed(0)
    theirs = evaluate(actor_config(PolicyLossConfig(loss_mode=name, **settings), **RANGES), tensors)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    ours = evaluate(actor_config(AuditedPolicyLossConfig(loss_mode=name, **settings), **RANGES), tensors)
    assert torch.equal(torch.rand(1), drawn)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert {k: v for k, v in ours[2].items() if not k.startswith(SUMS)} == theirs[2]
    assert own_sums(ours[2])
    assert read(ours[2])["audit/tokens"] == tensors["response_mask"].sum()


@pytest.mark.parametrize("method", ["BandPO()", "GSPO(0.01, 0.02)", "SAPO()"])
def test_the_audit_changes_nothing_of_band(method):
    tensors = batch(6)
    plain = evaluate(actor_config(BandPolicyLossConfig(method=method, audit=False)), tensors)
    audited = evaluate(actor_config(BandPolicyLossConfig(method=method)), tensors)
    assert torch.equal(audited[0], plain[0])
    assert torch.equal(audited[1], plain[1])
    assert not own_sums(plain[2])
    assert own_sums(audited[2])


@pytest.mark.parametrize("name", SAME)
def test_what_is_measured_of_a_loss_is_what_its_method_says(name):
    """The gradient that verl takes, against the method whose audit is logged."""
    settings, _, always = SAME[name]
    tensors = batch_for(name, 5)
    config = actor_config(AuditedPolicyLossConfig(loss_mode=name, audit_detail=True), **settings)
    by_method = read(evaluate(config, tensors, always or "token-mean")[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bandpo.integrations.verl.method_of", lambda name, config: None)
        seen = read(evaluate(config, tensors, always or "token-mean")[2])
    shares = ("clip_high", "clip_low", "softened", "amplified", "inert", "blocked_mass")
    # Their ratio is the sequence's, and what is measured goes by each token's own.
    if name in ("gspo", "geo_mean"):
        shares = ("clip_high", "clip_low")
    for share in shares:
        assert seen[f"audit/{share}"] == pytest.approx(by_method[f"audit/{share}"], abs=2e-6), share
    if name not in ("sapo", "gpg", "cispo"):
        assert by_method["audit/clip_high"] > 0.02
        assert by_method["audit/clip_low"] > 0.02


@pytest.mark.parametrize("name", SAME)
def test_sides_of_verls_that_differ_are_those_of_the_method(name):
    config = actor_config(AuditedPolicyLossConfig(loss_mode=name), **RANGES)
    tensors = batch_for(name, 9)
    _, gradient, metrics = evaluate(config, tensors)
    mask, positive = tensors["response_mask"], tensors["advantages"] > 0
    for side, of_sign in ("high", positive), ("low", ~positive):
        share = ((gradient == 0) & mask & of_sign).sum() / mask.sum()
        assert read(metrics)[f"audit/clip_{side}"] == pytest.approx(share.item())


def test_a_loss_without_a_name_here_is_told_by_its_gradient():
    """Tokens below p = 0.1 are dropped, those above 0.5 count twice: no rule of bandpo's does that."""

    @register_policy_loss("of_a_plugin")
    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
        p, ratio = old_log_prob.exp(), (log_prob - old_log_prob).exp()
        values = -advantages * ratio * (p >= 0.1) * (1 + (p > 0.5)) * rollout_is_weights
        mean = agg_loss(values, response_mask, loss_agg_mode, **config.global_batch_info)
        return mean, {"actor/mine": 1.0}

    try:
        tensors = batch(11)
        config = actor_config(AuditedPolicyLossConfig(loss_mode="of_a_plugin", audit_detail=True))
        _, _, metrics = evaluate(config, tensors, "seq-mean-token-sum")
    finally:
        del POLICY_LOSS_REGISTRY["of_a_plugin"]
    assert metrics["actor/mine"] == 1.0
    mask, p, positive = tensors["response_mask"], tensors["old_log_prob"].exp(), tensors["advantages"] > 0
    found, counted = read(metrics), mask.sum()
    assert found["audit/clip_high"] == pytest.approx(((p < 0.1) & mask & positive).sum().item() / counted)
    assert found["audit/clip_high/above_0.1"] == 0
    assert found["audit/clip_high/0.01_to_0.1"] == 1
    assert found["audit/amplified"] == pytest.approx(((p > 0.5) & mask).sum().item() / counted)
    assert found["audit/blocked_mass_below_0.1"] == 1
    assert "audit/if/Band/clip_high" in found


def test_clip_cov_is_audited_with_the_tokens_it_drops_at_random():
    tensors = batch(12, (8, 40))
    config = actor_config(AuditedPolicyLossConfig(loss_mode="clip_cov", **MORE["clip_cov"]), **RANGES)
    _, gradient, metrics = evaluate(config, tensors)
    found = read(metrics)
    dropped = (gradient[tensors["response_mask"]] == 0).double().mean().item()
    assert found["audit/clip_high"] + found["audit/clip_low"] == pytest.approx(dropped)
    plain = method_of("vanilla", config)
    by_clip_alone = the_audit(tensors, plain).metrics()
    assert dropped > by_clip_alone["clip_high"] + by_clip_alone["clip_low"]
    assert dropped > metrics["actor/pg_clipfrac"] > 0


def trained(config, cuts, ranks, lengths=60):
    """What verl logs of one step: batches by mini-batch, micro-batch and rank, reduced by verl's own functions.

    Args:
        cuts: For each mini-batch its number of micro-batches.
        ranks: Data-parallel ranks.

    Returns:
        What verl's driver logs, and all tensors.
    """
    everything, by_mini_batch = [], {}
    for k, micro_batches in enumerate(cuts):
        parts = [
            [batch(100 * k + 10 * m + r, (2 + (m + r) % 3, lengths)) for m in range(micro_batches)]
            for r in range(ranks)
        ]
        tokens = sum(int(tensors["response_mask"].sum()) for rank in parts for tensors in rank)
        rows = sum(len(tensors["response_mask"]) for rank in parts for tensors in rank)
        config.global_batch_info.update(dp_size=ranks, batch_num_tokens=tokens, global_batch_size=rows)
        per_rank = []
        for rank in parts:
            of_rank = {}
            for tensors in rank:
                found = evaluate(config, tensors)[2]
                append_to_dict(of_rank, metric.Metric.from_dict(found, aggregation="mean"))
            per_rank.append(of_rank)
            everything += rank
        gathered = {key: [of_rank[key] for of_rank in per_rank] for key in per_rank[0]}
        means = {key: metric.Metric.aggregate_dp(values) for key, values in gathered.items()}
        append_to_dict(by_mini_batch, means)
    reduced = metric.reduce_metrics(rename_dict(by_mini_batch, "actor/"))
    names = ("log_prob", "old_log_prob", "advantages", "response_mask")
    whole = {name: torch.cat([tensors[name] for tensors in everything]) for name in names}
    return reduced, whole, len(everything)


@pytest.mark.parametrize("cuts", [[1], [4, 4], [2, 5, 3]], ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "policy_loss",
    [
        AuditedPolicyLossConfig(audit_detail=True),
        AuditedPolicyLossConfig(loss_mode="gspo", audit_detail=True),
        BandPolicyLossConfig(method="DAPO(0.02, 0.03)", audit_detail=True),
        BandPolicyLossConfig(method="BandPO(radius=0.001)", audit_detail=True),
    ],
    ids=["vanilla", "gspo", "DAPO", "BandPO"],
)
def test_rates_are_those_over_all_tokens_of_the_step(cuts, ranks, policy_loss):
    """Micro-batches of unequal size, mini-batches of unequal number, several ranks: as if it had been one batch."""
    config = actor_config(policy_loss, clip_ratio_low=0.02, clip_ratio_high=0.03)
    found, tensors, losses = trained(config, cuts, ranks)
    audited = policy_loss.audited
    parts = as_method(policy_loss.method) if audited is None else method_of(audited, config)
    expected = logged(the_audit(tensors, parts).metrics(), detail=True)
    of_losses = {name for name in expected if name.rpartition("/")[2] in ("calls", "inert", "on_policy")}
    assert found["audit/calls"] == pytest.approx(losses)
    found = {name: value for name, value in found.items() if name.startswith("audit/")}
    assert found.keys() == expected.keys()
    for name in expected.keys() - of_losses:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name
    assert found["audit/clip_high"] + found["audit/clip_low"] > 0


def test_twelve_metrics_are_logged_unless_all_are_asked_for():
    config = actor_config(AuditedPolicyLossConfig(), **RANGES)
    found, *_ = trained(config, [2], 2)
    assert {name for name in found if "audit" in name} == {f"audit/{name}" for name in LOGGED}
    config = actor_config(AuditedPolicyLossConfig(audit_detail=True), **RANGES)
    found, *_ = trained(config, [2], 2)
    assert sum("audit" in name for name in found) > 80


def test_verl_tells_its_own_metrics_as_before():
    found, *_ = trained(actor_config(AuditedPolicyLossConfig(), **RANGES), [2, 3], 2)
    plain, *_ = trained(actor_config(PolicyLossConfig(), **RANGES), [2, 3], 2)
    assert {name: value for name, value in found.items() if not name.startswith("audit/")} == plain
    assert not any("audit" in name for name in plain)


def test_a_micro_batch_without_tokens_adds_nothing():
    config = actor_config(AuditedPolicyLossConfig(audit_detail=True))
    tensors = batch(3)
    full = own_sums(evaluate(config, tensors)[2])
    empty = tensors | {"response_mask": torch.zeros_like(tensors["response_mask"])}
    none = own_sums(evaluate(config, empty)[2])
    assert none.keys() == full.keys()
    assert {name for name, value in none.items() if value} <= {f"{SUMS}clips", f"{SUMS}detail"}
    both = {name: [full[name], none[name]] for name in full}
    assert Driver().take(both) == pytest.approx(read(full))
    assert read(none) == {}


@pytest.mark.parametrize("junk", [-torch.inf, torch.nan])
@pytest.mark.parametrize(
    "policy_loss", [BandPolicyLossConfig(), AuditedPolicyLossConfig()], ids=["band", "vanilla"]
)
def test_padding_may_hold_anything(junk, policy_loss):
    tensors, config = batch(7), actor_config(policy_loss)
    clean = own_sums(evaluate(config, tensors)[2])
    names = (
        ("log_prob", "old_log_prob", "advantages") if isinstance(policy_loss, BandPolicyLossConfig) else ()
    )
    for name in names or ("advantages",):
        tensors[name] = tensors[name].masked_fill(~tensors["response_mask"], junk)
    assert own_sums(evaluate(config, tensors)[2]) == pytest.approx(clean)


def test_nothing_is_audited_where_nothing_is_trained():
    for policy_loss in (BandPolicyLossConfig(), AuditedPolicyLossConfig()):
        config, tensors = actor_config(policy_loss), batch(2)
        with torch.no_grad():
            loss = POLICY_LOSS_REGISTRY[policy_loss.loss_mode]
            _, metrics = loss(**tensors, loss_agg_mode="token-mean", config=config)
        assert not own_sums(metrics)
        assert "actor/pg_clipfrac" in metrics


def test_the_config_class_audits_what_loss_mode_names():
    for name in ("vanilla", "gspo", "clip_cov"):
        found = composed(("", f"loss_mode={name}"), target="AuditedPolicyLossConfig")
        assert (found.loss_mode, found.audited) == ("audited", name)
    found = composed(("", "loss_mode=gspo"), ("+", "audit=false"), target="AuditedPolicyLossConfig")
    assert (found.loss_mode, found.audited) == ("gspo", None)
    with pytest.raises(Exception, match="write BandPolicyLossConfig, which audits band too"):
        composed(("", "loss_mode=band"), target="AuditedPolicyLossConfig")
    with pytest.raises(ValueError, match="set by AuditedPolicyLossConfig; name the loss itself"):
        evaluate(actor_config(PolicyLossConfig(loss_mode="audited")), batch(0))
    with pytest.raises(ValueError, match="Unsupported loss mode: gpso"):  # verl's own error
        evaluate(actor_config(AuditedPolicyLossConfig(loss_mode="gpso")), batch(0))


@pytest.mark.parametrize("target", [BandPolicyLossConfig, AuditedPolicyLossConfig])
def test_the_record_of_a_run_replays_to_its_audit(target, tmp_path):
    pytest.importorskip("pyarrow")
    replay_record = pytest.importorskip("bandpo.audit.replay").replay_record
    settings = {"method": "DAPO(0.1, 0.3)"} if target is BandPolicyLossConfig else {}
    config = actor_config(target(record=str(tmp_path), audit_detail=True, **settings), **RANGES)
    tensors = {name: x if x.dtype == torch.bool else x.float() for name, x in batch(4).items()}  # as recorded
    expected = read(evaluate(config, tensors)[2])
    (file,) = tmp_path.iterdir()
    again = logged(replay_record(tmp_path, {}).audits["the run"].metrics(), detail=True)
    assert again == pytest.approx({name: x for name, x in expected.items() if "/if/" not in name}, rel=1e-5)
    quiet = actor_config(target(record=str(tmp_path), audit=False, **settings), **RANGES)
    before = file.stat().st_size
    assert not own_sums(evaluate(quiet, tensors)[2])
    assert file.stat().st_size > before or len([*tmp_path.iterdir()]) > 1


def test_a_loss_that_is_told_by_its_gradient_is_recorded_without_a_method(tmp_path):
    pytest.importorskip("pyarrow")
    replay_record = pytest.importorskip("bandpo.audit.replay").replay_record
    config = actor_config(AuditedPolicyLossConfig(loss_mode="kl_cov", record=str(tmp_path)), **RANGES)
    evaluate(config, batch(4))
    assert "the run" not in replay_record(tmp_path).audits


def steps(driver, shift, count=3, **logged_besides):
    """Warnings of some steps of two losses each, all with this log ratio in each token."""
    reporter, config = Reporter(), actor_config(AuditedPolicyLossConfig())
    method = method_of("vanilla", config)
    old = torch.full((2, 30), -2.0)
    batch = Batch.read(old + shift, old, torch.ones(2, 30))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            losses = [reporter(method, batch, config) for _ in range(2)]
            driver.look(driver.take({name: [x[name] for x in losses] for name in losses[0]}) | logged_besides)
    return [str(w.message) for w in caught if issubclass(w.category, BandWarning)]


def test_the_driver_warns_once_of_what_wastes_a_run_and_judges_entropy_beside_the_reward():
    never_moved = steps(Driver(), 0.0)
    assert len(never_moved) == 1
    assert "no clip rule can act" in never_moved[0]
    assert "ppo_mini_batch_size" in never_moved[0]
    other_temperature = steps(Driver(), 0.15)
    assert len(other_temperature) == 1
    assert "before any update the mean ratio is 1.16" in other_temperature[0]
    assert steps(Driver(), 0.05) == []
    driver = Driver()
    assert steps(driver, 0.05, 1, **{"actor/entropy": 1.0, "critic/score/mean": 0.1}) == []
    (lost,) = steps(driver, 0.05, 1, **{"actor/entropy": 0.05, "critic/score/mean": 0.1})
    assert "stopped exploring" in lost
    driver = Driver()
    assert steps(driver, 0.05, 1, **{"actor/entropy": 1.0, "critic/score/mean": 0.1}) == []
    assert steps(driver, 0.05, 1, **{"actor/entropy": 0.05, "critic/score/mean": 0.9}) == []


def test_bandpo_audit_gives_its_verdict_on_a_log_of_verls(tmp_path, monkeypatch):
    log = tmp_path / "run.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    tracking = Tracking("project", "run", default_backend=["file"])
    config = actor_config(AuditedPolicyLossConfig(), **RANGES)
    for step in range(1, 4):
        found, *_ = trained(config, [2, 1], 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BandWarning)  # these batches have moved before any update
            tracking.log(data=found | {"actor/entropy": 1.0, "critic/score/mean": 0.1 * step}, step=step)
    tracking.finish()
    assert json.loads(log.read_text().splitlines()[0])["data"]["audit/tokens"] > 100
    summary = summarize(read_log(log))
    assert "tokens" in summary.metrics
    assert summary.metrics["clip_high"] == pytest.approx(found["audit/clip_high"])
    result = CliRunner().invoke(app, ["audit", str(log), "--output", str(tmp_path / "audit.png")])
    assert result.exit_code == 0, result.output
    assert "positive gradient blocked, p < 0.1" in result.output


FRESH = """
import verl
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.v1 import trainer_base
from verl.utils import metric
from verl.utils.tracking import Tracking
from verl.trainer.ppo.core_algos import get_policy_loss_fn
"""
WRAPPED = """
print([f.__wrapped__.__module__ for f in (
    ray_trainer.reduce_metrics, trainer_base.reduce_metrics, metric.reduce_metrics, Tracking.log
)], get_policy_loss_fn("band").__module__)
"""
BY_TARGET = """
from hydra.utils import instantiate
instantiate({"_target_": "bandpo.integrations.verl.BandPolicyLossConfig"})
get_policy_loss_fn("audited")
"""
HOOKED = f"{['verl.utils.metric.utils'] * 3 + ['verl.utils.tracking']} bandpo.integrations.verl"


def said(script, **environment):
    command, variables = [sys.executable, "-c", script], {**os.environ, **environment}
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    return found.stdout.splitlines()[-1]


@pytest.mark.slow
def test_import_verl_registers_the_loss_and_its_trainers_reduce_and_log_with_the_audit():
    """In a fresh process that never names bandpo, as verl's driver is."""
    try:
        version("bandpo")
    except PackageNotFoundError:
        pytest.skip("bandpo is on the path but not installed, so it has no entry points")
    assert said(FRESH + WRAPPED) == HOOKED


@pytest.mark.slow
def test_the_config_class_is_enough_where_verl_knows_no_plugins():
    """As for agent-lightning 1.0.2 and rLLM, which want verl 0.8: it loads no entry points, but what _target_ names."""
    assert said(FRESH + BY_TARGET + WRAPPED, VERL_USE_EXTERNAL_PLUGINS="none") == HOOKED
