"""verl's record: workers write the tokens of their losses, and find their rows again among the driver's batches."""

import json
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.frameworks import needs

needs("verl")
pytest.importorskip("pyarrow")

from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from verl import DataProto
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from bandpo.audit import recorder
from bandpo.core.errors import BandWarning
from bandpo.integrations.verl import AuditedPolicyLossConfig, BandPolicyLossConfig, record
from bandpo.integrations.verl.driver import Driver
from bandpo.replay.record_audit import audit_record
from rlvet import open_run
from rlvet.records.record import read_record

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl's, of engines that are not installed
    from verl.workers.engine.utils import prepare_micro_batches

ROWS, WIDTH = 32, 12
METHOD = "Method(FixedClip(0.2, 0.28), DualClip(3.0))"


@pytest.fixture(autouse=True)
def _new_worker():
    """Each test has a process of its own, as far as the record goes."""
    record._losses_of.cache_clear()
    yield
    record._losses_of.cache_clear()


def sampled(seed=0, rows=ROWS):
    """A batch as verl's driver has it: four answers a prompt, of ragged lengths, with tokens of a tool in between."""
    g = torch.Generator().manual_seed(seed)
    old = -5 * torch.rand(rows, WIDTH, generator=g) ** 2 - 1e-3
    mask = (torch.arange(WIDTH) < torch.randint(3, WIDTH + 1, (rows, 1), generator=g)).long()
    mask[::5, 1] = 0
    reward = torch.randint(0, 2, (rows, 1), generator=g).float()
    scores = torch.zeros(rows, WIDTH).index_fill(1, torch.tensor(2), 1.0) * reward
    centred = reward.view(-1, 4) - reward.view(-1, 4).mean(1, keepdim=True)
    tensors = {
        "old_log_probs": old,
        "rollout_log_probs": old - 0.01 * torch.rand(rows, WIDTH, generator=g),
        "response_mask": mask,
        "advantages": centred.view(rows, 1) * mask,
        "token_level_scores": scores,
        "responses": torch.randint(2, 50, (rows, WIDTH), generator=g),
    }
    uids = np.repeat(np.array([f"{seed}-{i}" for i in range(rows // 4)], object), 4)
    return DataProto.from_dict(tensors, non_tensors={"uid": uids})


def driver_of(folder, strategy="fsdp", model=None, bypass_mode=False, wrap=False):
    """Return a driver that writes its batches for the record in a folder."""
    policy_loss = {
        "_target_": "bandpo.integrations.verl.BandPolicyLossConfig",
        "record": str(folder),
        "watched": "off",
    }
    driver = Driver()
    if not wrap:  # which would outlast the test
        driver._wrap_advantages = lambda: None
    driver.prepare(
        {
            "actor_rollout_ref": {
                "actor": {"policy_loss": policy_loss, "strategy": strategy},
                "rollout": {"temperature": 1.0},
                "model": model or {},
            },
            "algorithm": {"rollout_correction": {"bypass_mode": bypass_mode}},
            "bandpo": {"method": METHOD},
        }
    )
    return driver


def actor_of(folder, sequence_parallel=1, policy_loss=None):
    policy_loss = policy_loss or BandPolicyLossConfig(method=METHOD, record=str(folder), certify="off")
    return FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=4,
        use_dynamic_bsz=False,
        policy_loss=policy_loss,
        use_remove_padding=sequence_parallel > 1,
        ulysses_sequence_parallel_size=sequence_parallel,
    )


def to_worker(data):
    """Return a batch as verl sends it to its workers, without padding, with a made-up policy in training."""
    tensors = data.batch
    lengths = (WIDTH - tensors["response_mask"].flip(1).argmax(1)).tolist()  # to the last counted token
    columns = {
        name: torch.nested.as_nested_tensor(
            [row[:n] for row, n in zip(tensors[name], lengths, strict=True)], layout=torch.jagged
        )
        for name in ("responses", "response_mask", "old_log_probs", "advantages")
    }
    rows = len(lengths)
    prompts = [torch.arange(1, 2 + i % 3) for i in range(rows)]
    columns["prompts"] = torch.nested.as_nested_tensor(prompts, layout=torch.jagged)
    parts = zip(prompts, tensors["responses"], lengths, strict=True)
    inputs = [torch.cat([prompt, answer[:n]]) for prompt, answer, n in parts]
    columns["input_ids"] = torch.nested.as_nested_tensor(inputs, layout=torch.jagged)
    return TensorDict(columns, batch_size=[rows])


def policy_of(row, seed):
    """Return the log-probabilities of the policy in training for the tokens of a row, a function of its ids."""
    g = torch.Generator().manual_seed(int(row.sum()) * 7 + seed)
    return -3 * torch.rand(len(row), generator=g) - 1e-3


def train(config, data, *, mini_batch, dp=1, rank=0, dynamic=False, seed=0, epochs=1):
    """Have one process make the updates of a batch, with verl's own split into mini-batches and micro-batches."""
    count = len(data) // dp
    td = to_worker(data[rank * count : (rank + 1) * count])
    mini_batches = tensordict_utils.make_iterator(
        td, mini_batch // dp, epochs=epochs, seed=seed + rank, dataloader_kwargs={"shuffle": True}
    )
    for update, mini in enumerate(mini_batches):
        tensordict_utils.assign_non_tensor(
            mini,
            use_dynamic_bsz=dynamic,
            max_token_len_per_gpu=40,
            micro_batch_size_per_gpu=4,
            dp_size=dp,
            batch_num_tokens=100,
            global_batch_size=mini_batch,
            sp_size=1,
        )
        micro_batches, _ = prepare_micro_batches(mini)
        for micro in micro_batches:
            log_probs = []
            rows = zip(micro["prompts"].unbind(), micro["responses"].unbind(), strict=True)
            for prompt, row in rows:
                # As from the model: the value at a token belongs to the next one.
                log_probs.append(
                    torch.cat([torch.zeros(len(prompt) - 1), policy_of(row, update), torch.zeros(1)])
                )
            flat = torch.cat(log_probs).requires_grad_()
            loss, _ = ppo_loss(config, {"log_probs": flat}, micro)
            loss.backward()


def expected(data):
    """Return what the record must have of each row of a batch: by the ids of its counted tokens."""
    tensors = data.batch
    groups = np.unique(data.non_tensor_batch["uid"].astype(str), return_inverse=True)[1]
    rows = {}
    for i in range(len(data)):
        mask = tensors["response_mask"][i].bool()
        length = WIDTH - int(tensors["response_mask"][i].flip(0).argmax())
        rows[tuple(tensors["responses"][i][mask].tolist())] = {
            "old": tensors["old_log_probs"][i][mask],
            "rollout": tensors["rollout_log_probs"][i][mask],
            "advantages": tensors["advantages"][i][mask],
            "ids": tensors["responses"][i][:length],
            "mask": mask[:length],
            "group": int(groups[i]),
            "reward": float(tensors["token_level_scores"][i].sum()),
        }
    return rows


def check(batches, data, updates):
    """Check that each row of a batch is recorded once for each epoch, with all of its values."""
    want, seen = expected(data), []
    for batch in batches:
        assert batch.has_logp
        for i, mask in enumerate(batch.mask):
            ids = tuple(batch.token[i][mask].tolist())
            row = want[ids]
            seen.append((ids, batch.update))
            new = policy_of(row["ids"], batch.update)[row["mask"]]
            assert torch.equal(torch.tensor(batch.logp_old[i][mask]), row["old"])
            assert np.allclose(batch.log_ratio[i][mask], new - row["old"], atol=1e-6)
            assert np.allclose(batch.logp_rollout[i][mask], row["rollout"], atol=1e-6)
            assert np.allclose(batch.advantages[i][mask], row["advantages"])
            assert (batch.group[i], batch.reward[i]) == (row["group"], row["reward"])
    assert sorted(ids for ids, _ in seen) == sorted([*want] * (len(seen) // len(want)))
    assert sorted({update for _, update in seen}) == list(range(updates))
    return seen


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed micro-batches", "dynamic micro-batches"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_worker_records_each_row_with_what_the_driver_knows(dynamic, epochs, tmp_path):
    """verl shuffles rows, splits them into mini-batches and micro-batches, and removes padding."""
    driver, config = driver_of(tmp_path), actor_of(tmp_path)
    batches = [sampled(seed) for seed in range(3)]
    for number, data in enumerate(batches):
        with driver.knowing(number + 5, [number + 3] * ROWS, current_version=number + 4):
            driver.add_batch(data)
        train(config, data, mini_batch=16, dynamic=dynamic, epochs=epochs)
    found = list(read_record(tmp_path))
    for number, data in enumerate(batches):
        of_batch = [batch for batch in found if batch.generation == number]
        assert {batch.step for batch in of_batch} == {number + 5}
        assert all((batch.lag[batch.mask] == 1).all() for batch in of_batch)
        seen = check(of_batch, data, updates=2 * epochs)
        assert len(seen) == ROWS * epochs
    assert (found[0].framework[:4], found[0].anchor, found[0].version_at) == ("verl", "trainer", "answer")


@pytest.mark.filterwarnings("ignore")  # verl's, on importing its trainer
def test_the_v1_trainer_s_batches_have_ids_and_ages(tmp_path, monkeypatch):
    """Its method that computes advantages, with a queue of tensors in this process."""
    from verl.trainer.ppo import ray_trainer
    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1.trainer_base import KVBatchMeta

    data = sampled(5)
    stored = to_worker(data)
    del stored["advantages"]
    scores = data.batch["token_level_scores"]
    lengths = stored["responses"].offsets().diff().tolist()
    rows = [row[:n] for row, n in zip(scores, lengths, strict=True)]
    stored["rm_scores"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    uids = data.non_tensor_batch["uid"]

    class Queue:
        @staticmethod
        def kv_batch_get(keys, partition_id, select_fields):
            fields = [name for name in select_fields if name in set(stored.keys())]
            found = stored.select(*fields)
            if "uid" in select_fields:
                found["uid"] = NonTensorStack(*uids)
            return found

        @staticmethod
        def kv_batch_put(keys, partition_id, fields):
            stored["advantages"] = fields["advantages"]

    # Each module that has imported a wrapped function gets verl's own back after the test.
    function = ray_trainer.compute_advantage
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get("compute_advantage") is function:
            monkeypatch.setattr(module, "compute_advantage", function)
    monkeypatch.setattr(trainer_base, "tq", Queue)
    monkeypatch.setattr(
        trainer_base.PPOTrainer, "_compute_advantage", trainer_base.PPOTrainer._compute_advantage
    )
    driver = driver_of(tmp_path, bypass_mode=True, wrap=True)
    abstract = dict.fromkeys(trainer_base.PPOTrainer.__abstractmethods__)
    trainer = object.__new__(type("Trainer", (trainer_base.PPOTrainer,), abstract))
    trainer.global_steps = 3
    trainer.config = OmegaConf.create(
        {
            "algorithm": {
                "use_kl_in_reward": False,
                "adv_estimator": "grpo",
                "gamma": 1.0,
                "lam": 1.0,
                "rollout_correction": {"bypass_mode": True},
            },
            "actor_rollout_ref": {"rollout": {"n": 4}},
        }
    )
    keys = [f"{uid}_{i}_0" for i, uid in enumerate(uids)]
    tags = [{"min_global_steps": i % 3} for i in range(ROWS)]
    trainer._compute_advantage(KVBatchMeta(keys=keys, partition_id="train", tags=tags), {})
    assert driver._batches == 1
    (batch,) = read_record(tmp_path / record.BATCHES)
    assert (batch.step, batch.current_version) == (3, 2)
    for i, mask in enumerate(batch.mask):
        counted = data.batch["response_mask"][i].bool()
        assert batch.token[i][mask].tolist() == data.batch["responses"][i][counted].tolist()
        assert (batch.lag[i][mask] == 2 - i % 3).all()


def test_updates_are_counted_since_the_weights_had_their_version(tmp_path):
    """The fully asynchronous trainer updates on several batches before it sends the weights."""
    driver, config = driver_of(tmp_path), actor_of(tmp_path)
    for number, version in enumerate([4, 4, 5]):
        data = sampled(number)
        with driver.knowing(version + 1, [version] * ROWS, current_version=version):
            driver.add_batch(data)
        train(config, data, mini_batch=16)
    updates = {}
    for batch in read_record(tmp_path):
        updates.setdefault(batch.generation, set()).add(batch.update)
    assert updates == {0: {0, 1}, 1: {2, 3}, 2: {0, 1}}


def test_a_record_of_workers_is_audited_by_age_under_any_rule(tmp_path):
    driver, config = driver_of(tmp_path, bypass_mode=True), actor_of(tmp_path)
    data = sampled(4)
    with driver.knowing(3, [2] * 16 + [0] * 16, current_version=2):
        driver.add_batch(data)
    train(config, data, mini_batch=16)
    audit = audit_record(open_run(tmp_path))
    text = "\n".join(audit.lines)
    assert "anchor: rollout" in text
    assert audit.effect.tokens > 0
    assert [row.name for row in audit.replay.ages.rows] == ["0", "2"]
    assert all(row.spread > 0 for row in audit.replay.ages.rows)
    assert "has no log-probabilities of the policy in training" not in text


def test_each_process_records_its_rows(tmp_path, monkeypatch):
    """Two data-parallel processes of two sequence-parallel ones: the second of each pair has the rows of the first."""
    driver, config = driver_of(tmp_path), actor_of(tmp_path, sequence_parallel=2)
    data = sampled(2)
    driver.add_batch(data)
    for rank in range(4):
        record._losses_of.cache_clear()
        monkeypatch.setattr(record, "process_number", lambda rank=rank: rank)
        monkeypatch.setattr(recorder, "process_number", lambda rank=rank: rank)
        train(config, data, mini_batch=16, dp=2, rank=rank // 2)
    assert sorted(path.name for path in tmp_path.glob("*.arrow")) == [
        "tokens-00000-0000.arrow",
        "tokens-00002-0000.arrow",
    ]
    assert len(check(list(read_record(tmp_path)), data, updates=2)) == ROWS


def test_a_resumed_run_goes_on_with_its_own_batches(tmp_path):
    first, second = sampled(0), sampled(1)
    for number, data in enumerate([first, second]):
        record._losses_of.cache_clear()
        driver = driver_of(tmp_path)
        with driver.knowing(number + 1, [number] * ROWS, current_version=number):
            driver.add_batch(data)
        train(actor_of(tmp_path), data, mini_batch=16)
    found = list(read_record(tmp_path))
    for step, data in (1, first), (2, second):
        check([batch for batch in found if batch.step == step], data, updates=2)


def test_verls_own_losses_are_recorded_too(tmp_path):
    """Also one that is no method of bandpo, which has no audit."""
    for name in ("vanilla", "gpg"):
        record._losses_of.cache_clear()
        policy_loss = AuditedPolicyLossConfig(loss_mode=name, record=str(tmp_path / name))
        driver, data = driver_of(tmp_path / name), sampled(3)
        driver.add_batch(data)
        train(actor_of(tmp_path / name, policy_loss=policy_loss), data, mini_batch=32)
        check(list(read_record(tmp_path / name)), data, updates=1)


@pytest.mark.parametrize("change", ["old_log_probs", "advantages"])
def test_a_row_that_is_not_the_driver_s_to_the_last_bit_says_so(change, tmp_path):
    driver, data = driver_of(tmp_path), sampled(0)
    driver.add_batch(data)
    other = sampled(0)
    values = other.batch[change]
    values[0] = torch.nextafter(values[0], torch.full_like(values[0], 9.0))
    with pytest.warns(BandWarning, match=r"1 of \d+ sequences of a loss are not among the driver's"):
        train(actor_of(tmp_path), other, mini_batch=32)
    batches = list(read_record(tmp_path))
    (alone,) = [batch for batch in batches if batch.generation is None]
    assert len(alone.mask) == 1
    assert [alone.step, alone.token, alone.group, alone.reward, alone.lag] == [None] * 5
    assert sum(len(batch.mask) for batch in batches) == ROWS
    assert alone.has_logp


def test_rows_alike_are_told_apart_or_not_at_all(tmp_path):
    """Two rows with the same values are one, if the driver knows the same of both; else neither is named."""
    alike, differing = sampled(0, rows=8), sampled(0, rows=8)
    for data in alike, differing:
        for x in data.batch.values():
            x[1] = x[0]
    differing.batch["responses"][1] += 1
    driver = driver_of(tmp_path / "alike")
    driver.add_batch(alike)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(actor_of(tmp_path / "alike"), alike, mini_batch=8)
    assert sum(len(batch.mask) for batch in read_record(tmp_path / "alike")) == 8

    record._losses_of.cache_clear()
    driver = driver_of(tmp_path / "differing")
    driver.add_batch(differing)
    with pytest.warns(BandWarning, match="of a loss are not among the driver's"):
        train(actor_of(tmp_path / "differing"), differing, mini_batch=8)
    batches = list(read_record(tmp_path / "differing"))
    assert sum(len(batch.mask) for batch in batches if batch.generation is None) == 2


def test_without_the_driver_s_folder_nothing_is_recorded_and_a_sentence_says_so(tmp_path):
    config = actor_of(tmp_path / "tokens")
    with pytest.warns(
        BandWarning, match="are not recorded: .*batches of the driver is not there; name a folder"
    ):
        train(config, sampled(0), mini_batch=32)
    assert not (tmp_path / "tokens").exists()


def test_recording_changes_nothing_of_the_loss(tmp_path):
    data = sampled(0)
    driver_of(tmp_path).add_batch(data)
    results = []
    for folder in (None, tmp_path):
        policy_loss = BandPolicyLossConfig(method=METHOD, record=folder and str(folder), certify="off")
        config, tensors = actor_of(tmp_path, policy_loss=policy_loss), data.batch
        config.global_batch_info.update(dp_size=1, batch_num_tokens=100, global_batch_size=ROWS)
        new = (tensors["old_log_probs"] - 0.1).requires_grad_()
        torch.manual_seed(0)
        loss, _ = get_policy_loss_fn("band")(
            old_log_prob=tensors["old_log_probs"],
            log_prob=new,
            advantages=tensors["advantages"],
            response_mask=tensors["response_mask"],
            config=config,
        )
        (gradient,) = torch.autograd.grad(loss, new)
        results.append((loss.detach(), gradient, torch.rand(1)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert [*read_record(tmp_path)]


def test_workers_of_other_engines_do_not_record_and_the_driver_says_so(tmp_path, capsys):
    driver = driver_of(tmp_path, strategy="megatron")
    driver.add_batch(sampled(0))
    assert (
        "workers of strategy=megatron do not record, only those of fsdp and fsdp2" in capsys.readouterr().out
    )
    (batch,) = read_record(tmp_path)
    assert not batch.has_logp
    settings = SimpleNamespace(
        policy_loss=PolicyLossConfig(), get=lambda name: {"strategy": "megatron"}.get(name)
    )
    x = torch.zeros(1, 1)
    record.record_loss(settings, x, x, x, x)


def test_the_record_has_the_tokenizer_of_the_model(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    driver_of(tmp_path / "a", model={"path": str(model)})
    assert (tmp_path / "a/tokenizer.json").read_text() == (model / "tokenizer.json").read_text()
    for number, path in enumerate(["no/such/folder at all", "some-org/some-model", str(tmp_path)]):
        driver_of(tmp_path / str(number), model={"path": path})
        assert not (tmp_path / str(number) / "tokenizer.json").exists()


def test_a_worker_that_starts_late_reads_the_last_batches_only(tmp_path):
    driver = driver_of(tmp_path)
    batches = [sampled(seed) for seed in range(6)]
    for data in batches:
        driver.add_batch(data)
    reader = record.DriverBatches(tmp_path / record.BATCHES)
    reader.refresh()
    assert len(reader.latest) == 2
    last = batches[-1].batch
    mask = last["response_mask"][0].bool()
    values = (last[name][0][mask].numpy() for name in ("old_log_probs", "advantages"))
    assert reader.find(*values).batch["generation"] == 5
