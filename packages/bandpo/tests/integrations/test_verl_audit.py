"""The audit in stock verl: it changes no loss, and its rates are those over all tokens, however verl averages."""

import json
import os
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest
import torch

from helpers.frameworks import needs

needs("verl")

from integrations.test_verl import SAME, actor_config, batch, batch_for, evaluate, ranges
from typer.testing import CliRunner
from verl import DataProto
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import metric
from verl.utils.py_functional import append_to_dict, rename_dict
from verl.utils.tracking import Tracking
from verl.workers.config import PolicyLossConfig

from bandpo.audit.closing_lines import describe_rare_winners
from bandpo.audit.metrics import LOGGED, Audit, logged
from bandpo.cli.app import app
from bandpo.core.batch import Batch
from bandpo.core.errors import BandWarning
from bandpo.core.text import as_method
from bandpo.integrations.verl import AuditedPolicyLossConfig, BandPolicyLossConfig
from bandpo.integrations.verl.audit import SUMS, pop_audit
from bandpo.integrations.verl.driver import Driver
from bandpo.testing import check_record
from rlvet.runs.configs import verl_method
from rlvet.runs.logs import read_log
from rlvet.runs.summary import summarize

OWN = sorted(POLICY_LOSS_REGISTRY.keys() - {"band", "audited"})
RANGES = ranges(0.1, 0.3)
MORE = {"dro": {"dro_beta": 0.5}, "kl_cov": {"kl_cov_ratio": 0.1}}
MORE["clip_cov"] = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.1}


def own_sums(metrics):
    return {name: value for name, value in metrics.items() if name.startswith(SUMS)}


def read(metrics):
    """Return the audit of one loss, as the driver computes it."""
    return pop_audit({name: [value] for name, value in own_sums(metrics).items()})[0]


NAMES = ("log_prob", "old_log_prob", "advantages", "response_mask")


def the_audit(tensors, method):
    """Return the same audit, computed without verl."""
    seen = Batch.read(*(tensors[name] for name in NAMES), weights=tensors["rollout_is_weights"])
    return Audit.of(seen, method, method.tokens(seen))


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
    known = verl_method(name, actor_config(PolicyLossConfig(), **RANGES)) is not None
    assert read(ours[2]).get("audit/tokens") == (tensors["response_mask"].sum() if known else None)


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
def test_sides_of_verls_that_differ_are_those_of_the_method(name):
    config = actor_config(AuditedPolicyLossConfig(loss_mode=name), **RANGES)
    tensors = batch_for(name, 9)
    _, gradient, metrics = evaluate(config, tensors)
    mask, positive = tensors["response_mask"], tensors["advantages"] > 0
    for side, of_sign in ("high", positive), ("low", ~positive):
        share = ((gradient == 0) & mask & of_sign).sum() / mask.sum()
        assert read(metrics)[f"audit/clip_{side}"] == pytest.approx(share.item())


def trained(config, cuts, ranks, lengths=60):
    """Return verl's log of one step: batches by mini-batch, micro-batch and rank, reduced by verl's own functions.

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
    names = (*NAMES, "rollout_is_weights")
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
    parts = as_method(policy_loss.method if audited is None else verl_method(audited, config))
    expected = logged(the_audit(tensors, parts).metrics(), detail=True)
    of_losses = {name for name in expected if name.rpartition("/")[2] in ("calls", "inert", "on_policy")}
    assert found["audit/calls"] == pytest.approx(losses)
    assert found.pop("audit/poisoned_tokens") == 0
    found = {name: value for name, value in found.items() if name.startswith("audit/")}
    assert found.keys() == expected.keys()
    for name in expected.keys() - of_losses:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name
    assert found["audit/clip_high"] + found["audit/clip_low"] > 0


def test_twelve_metrics_are_logged_unless_all_are_asked_for():
    config = actor_config(AuditedPolicyLossConfig(), **RANGES)
    found, *_ = trained(config, [2], 2)
    assert {name for name in found if "audit" in name} == {
        f"audit/{name}" for name in (*LOGGED, "poisoned_tokens")
    }
    config = actor_config(AuditedPolicyLossConfig(audit_detail=True), **RANGES)
    found, *_ = trained(config, [2], 2)
    assert sum("audit" in name for name in found) > 60


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
    assert pop_audit(both)[0] == pytest.approx(read(full))
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
        found = AuditedPolicyLossConfig(loss_mode=name)
        assert (found.loss_mode, found.audited) == ("audited", name)
    found = AuditedPolicyLossConfig(loss_mode="gspo", audit=False)
    assert (found.loss_mode, found.audited) == ("gspo", None)
    with pytest.raises(ValueError, match="AuditedPolicyLossConfig sets audited; name the loss"):
        evaluate(actor_config(PolicyLossConfig(loss_mode="audited")), batch(0))
    with pytest.raises(ValueError, match="Unsupported loss mode: gpso"):  # verl's own error
        evaluate(actor_config(AuditedPolicyLossConfig(loss_mode="gpso")), batch(0))


def driven(data, **settings):
    """Return a driver after verl's Tracking and compute_advantage called it with a batch."""
    policy_loss = {"_target_": "bandpo.integrations.verl.AuditedPolicyLossConfig", **settings}
    actor, rollout = {"policy_loss": policy_loss}, {"temperature": 0.7, "top_p": 1.0, "name": "vllm"}
    driver = Driver()
    driver._wrap_advantages = lambda: None  # which would outlast the test
    driver.prepare({"actor_rollout_ref": {"actor": actor, "rollout": rollout}})
    for _ in range(2):
        driver.add_batch(data)
    return driver


def advantages_known(shift=0.0):
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(16, 12, generator=g)
    mask = torch.arange(12) < torch.randint(3, 13, (16, 1), generator=g)
    scores = torch.zeros(16, 12).index_fill(1, torch.tensor(2), 1.0) * torch.randint(
        0, 2, (16, 1), generator=g
    )
    reward = scores.sum(1).view(4, 4)
    advantages = (reward - reward.mean(1, keepdim=True)).view(16, 1) * mask
    tensors = {"old_log_probs": old, "rollout_log_probs": old - shift, "response_mask": mask.long()}
    tensors |= {"advantages": advantages, "token_level_scores": scores}
    tensors["responses"] = torch.randint(2, 50, (16, 12), generator=g)
    return DataProto.from_dict(tensors, non_tensors={"uid": np.repeat(np.array(list("abcd"), object), 4)})


def test_the_driver_records_each_batch_with_the_engine_s_log_probabilities(tmp_path):
    pytest.importorskip("pyarrow")
    from rlvet.records.record import read_record

    data = advantages_known(0.001)
    tensors = data.batch
    driven(data, record=str(tmp_path))
    loss = {
        "logp_old": tensors["old_log_probs"],
        "logp_rollout": tensors["rollout_log_probs"],
        "advantages": tensors["advantages"],
        "mask": tensors["response_mask"],
        "tokens": tensors["responses"],
        "reward": tensors["token_level_scores"].sum(1),
        "truncated": tensors["response_mask"][:, -1] > 0,
        "group": [row // 4 for row in range(16)],
        "update": 0,
    }
    losses = [loss | {"step": number + 1, "generation": number} for number in range(2)]
    check_record(tmp_path, losses, sampling={"temperature": 0.7, "top_p": 1.0})
    first, _ = read_record(tmp_path)
    assert (first.framework[:4], first.has_logp) == ("verl", False)


@pytest.mark.parametrize("versions", [[3] * 8 + [4] * 8, [None, *[4] * 15], [4] * 15])
def test_the_driver_records_the_age_of_each_response_where_verl_knows_it(versions, tmp_path):
    pytest.importorskip("pyarrow")
    from rlvet.records.record import read_record

    data = advantages_known(0.001)
    driver = driven(data, record=str(tmp_path))
    with driver.knowing(9, versions, current_version=5):
        driver.add_batch(data)
    batches = list(read_record(tmp_path))
    # The step is the trainer's, if it is known, and else the number of the batch.
    assert [batch.step for batch in batches] == [1, 2, 9]
    *unknown, ages = [batch.lag for batch in batches]
    assert unknown == [None, None]
    if None in versions or len(versions) < 16:
        assert ages is None
    else:
        mask = data.batch["response_mask"]
        assert ages.tolist() == ((5 - torch.tensor(versions)).view(16, 1) * mask).tolist()


def settled(config, **trainer):
    """A driver of a run with these settings of the trainer."""
    driver = Driver()
    driver._wrap_advantages = lambda: None  # which would outlast the test
    actor = {"policy_loss": {"_target_": "bandpo.X", "watched": "off"}, "optim": config.pop("optim", {})}
    driver.prepare({"actor_rollout_ref": {"actor": actor, "rollout": {}}, "trainer": trainer, **config})
    return driver


def test_the_last_lines_of_a_run_say_what_the_rule_did_over_all_steps(capsys, caplog):
    """They are those of TRL, from the sums that verl averaged."""
    tensors = [batch(seed, spread=1.2) for seed in range(6)]
    method = as_method("BandAbove()")
    driver = settled({"bandpo": {"method": "BandAbove()"}}, default_local_dir="runs/mine one")
    for one in tensors:
        _, _, metrics = evaluate(actor_config(BandPolicyLossConfig(method="BandAbove()")), one)
        _, audit = pop_audit({name: [value] for name, value in own_sums(metrics).items()})
        driver.add_audit(audit)
    driver.add_audit(None)
    first, *rest = [the_audit(one, method) for one in tensors]
    whole = sum(rest, first)
    expected = [*describe_rare_winners(whole, method, "BandAbove"), "more: bandpo audit 'runs/mine one'"]
    assert "clip 0.2 would have dropped" in expected[0]
    capsys.readouterr()
    driver.announce_effect(has_log=True)
    driver.announce_effect(has_log=True)  # once a run
    assert capsys.readouterr().out.splitlines() == [f"bandpo: {line}" for line in expected]


def test_the_last_lines_obey_the_level_of_the_logger_and_need_an_audit(capsys, caplog):
    driver = settled({})
    driver.announce_effect(has_log=True)
    driver.add_audit(the_audit(batch(5), as_method("BandAbove()")))
    with caplog.at_level("ERROR", "bandpo"):
        driver.announce_effect(has_log=True)
    assert not capsys.readouterr().out
    driver.add_audit(the_audit(batch(5), as_method("BandAbove()")))
    driver.announce_effect(has_log=False)
    out = capsys.readouterr().out
    assert "your loss" in out or "too few" in out
    assert out.endswith("more: bandpo audit FOLDER, of a run with trainer.logger=[console,file]\n")


@pytest.mark.parametrize(
    ("config", "trainer", "last"),
    [
        ({}, {"total_training_steps": 7}, 7),
        ({"optim": {"total_training_steps": 12}}, {}, 12),
        (
            {"optim": {"total_training_steps": 12}},
            {"v1": {"trainer_mode": "separate_async", "separate_async": {"parameter_sync_step": 4}}},
            3,
        ),
        ({"optim": {"total_training_steps": 12}}, {"v1": {"trainer_mode": "sync"}}, 12),
        ({"optim": {"total_training_steps": -1}}, {"total_training_steps": None}, None),
        ({}, {}, None),
    ],
)
def test_the_last_step_of_a_run(config, trainer, last):
    assert settled(config, **trainer)._last_step == last


@pytest.mark.filterwarnings("ignore")  # verl's, on importing its trainer
def test_a_record_of_the_fully_asynchronous_trainer_has_the_age_of_each_response(tmp_path, monkeypatch):
    """verl's own trainer assembles batches from its queue, logs the version that it sends, and computes advantages."""
    pytest.importorskip("pyarrow")
    from omegaconf import OmegaConf
    from verl.experimental.fully_async_policy import detach_utils
    from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
    from verl.trainer.ppo import ray_trainer

    from rlvet.records.record import read_record

    # Each module that has imported the function gets verl's own back after the test.
    compute_advantage = ray_trainer.compute_advantage
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get("compute_advantage") is compute_advantage:
            monkeypatch.setattr(module, "compute_advantage", compute_advantage)
    policy_loss = {"_target_": "bandpo.integrations.verl.AuditedPolicyLossConfig", "record": str(tmp_path)}
    rollout = {"n": 4, "temperature": 1.0}
    config = {
        "actor_rollout_ref": {"actor": {"policy_loss": policy_loss | {"watched": "off"}}, "rollout": rollout},
        "algorithm": {"use_kl_in_reward": False, "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0},
    }
    driver = Driver()
    driver.prepare(config)
    # The class in Ray's process, which has copies of the methods of its bases.
    trainer = object.__new__(FullyAsyncTrainer.__ray_metadata__.modified_class)
    trainer.config = OmegaConf.create(config)
    trainer.metrics, trainer.timing_raw, trainer.reward_extra_infos_dict = {}, {}, {}

    def train(versions):
        """Have the trainer compute the advantages of four prompts, with the first and last version of each."""
        samples = []
        for number, (data, (first, last)) in enumerate(
            zip(advantages_known().chunk(4), versions, strict=True)
        ):
            data.batch["attention_mask"] = data.batch["response_mask"]
            data.non_tensor_batch["uid"] = np.array([str(number)] * 4, object)
            data.non_tensor_batch["min_global_steps"] = np.array([first] * 4, object)
            data.non_tensor_batch["max_global_steps"] = np.array([last] * 4, object)
            data.meta_info = {"metrics": [{"generate_sequences": 1.0, "tool_calls": 0.0}] * 4}
            samples.append(detach_utils.RolloutSample(data, str(number), 0, {}))
        batch = detach_utils.assemble_batch_from_rollout_samples(samples, None, None)
        trainer.reward_tensor = batch.batch["token_level_scores"]
        trainer._fit_compute_advantage(batch)
        return batch

    # After a resume, before the first log: all samples are of the version that was loaded.
    train([(3, 3)] * 4)
    driver.logged_step = 6
    # Generation of the last prompt was interrupted by new weights.
    batch = train([(2, 2), (3, 3), (5, 5), (4, 5)])
    first, second = read_record(tmp_path)
    assert (first.current_version, second.current_version, second.version_at) == (3, 6, "answer")
    assert (first.step, second.step) == (4, 7)
    assert not first.lag.any()
    ages = torch.tensor([4, 3, 1, 2]).repeat_interleave(4)
    assert second.lag.tolist() == (ages.view(16, 1) * batch.batch["response_mask"]).tolist()


def test_the_driver_tests_each_batch():
    with pytest.warns(BandWarning, match="engine-mismatch"):
        driven(advantages_known(0.5))
    with pytest.raises(RuntimeError, match="engine-mismatch"):
        driven(advantages_known(0.5), watched="stop")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        driven(advantages_known(0.5), watched="off")
        driven(advantages_known(0.001))


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
    summary = summarize(read_log(log).rows)
    assert "tokens" in summary.metrics
    assert summary.metrics["clip_high"] == pytest.approx(found["audit/clip_high"])
    result = CliRunner().invoke(app, ["audit", str(log)])
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
HOOKED = f"{['verl.utils.metric.utils'] * 3 + ['verl.utils.tracking']} bandpo.integrations.verl.loss"


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


@pytest.mark.parametrize("value", [0.25, -torch.inf, torch.nan])
def test_the_driver_goes_on_with_a_wrong_token(value, tmp_path):
    pytest.importorskip("pyarrow")
    data = advantages_known(0.001)
    data.batch["old_log_probs"][2, 0] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BandWarning)
        driven(data, record=str(tmp_path))
    assert list(tmp_path.rglob("*"))
