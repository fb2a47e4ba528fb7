"""AReaL's own actor and loss, on an engine that has log-probabilities in place of a model."""

import pytest
import torch
from torch.nn.functional import pad

from bandpo.testing import check_record
from contract import Contract, make_batch, written
from helpers.frameworks import importing, needs
from rlvet.records.record import read_record

needs("areal")

API = ("engine_api", "workflow_api", "scheduler_api", "io_struct", "alloc_mode")
TRAINERS = ("dpo_trainer", "rl_trainer", "rw_trainer", "sft_trainer")
with importing(
    *(
        "colorlog",
        "einops",
        "hydra",
        "numba",
        "omegaconf",
        "orjson",
        "pynvml",
        "tensordict",
        "torchdata",
        "uvloop",
    ),
    *("areal.infra", "areal.experimental"),
    *(f"areal.api.{part}" for part in API),
    *(f"areal.trainer.{trainer}" for trainer in TRAINERS),
    framework="areal",
):
    from areal.api.cli_args import PPOActorConfig
    from areal.trainer.ppo.actor import PPOActor
    from areal.utils import stats_tracker

    from bandpo_areal import BandPPOActor


def config_of(**settings):
    """AReaL's own settings, decoupled: both the trainer's and the sampler's log-probabilities are there."""
    names = ("experiment_name", "trial_name", "path")
    return PPOActorConfig(
        **dict.fromkeys(names, "unused"), **{"use_decoupled_loss": True, "ppo_n_minibatches": 1} | settings
    )


@pytest.fixture(autouse=True)
def _one_minibatch(monkeypatch):
    """Accept one update for each batch, which most tests make of their batch."""
    monkeypatch.setenv("BANDPO_ACCEPT_IDLE_CLIP", "1")


class Engine:
    """What a training engine does with a batch: it calls the loss with the log-probabilities of its model."""

    def __init__(self, logp, packed=False):
        self.logp = logp
        self.packed = packed

    def train(self):
        pass

    def get_version(self):
        return 7

    def train_batch(self, input_, loss_fn, loss_weight_fn):
        # AReaL orders the sequences anew.
        logp = self.logp[input_["rows"][:, 0]].float()
        if self.packed:
            count, length = logp.shape
            input_ = {name: x.flatten() for name, x in input_.items() if torch.is_tensor(x)}
            input_["cu_seqlens"] = torch.arange(0, (count + 1) * length, length)
            logp = logp.flatten()
        self.loss = loss_fn(logp, torch.zeros_like(logp), input_)
        return {}


def ids_of(batch):
    """Ids whose first is that of a prompt, which two sequences share."""
    count, length = batch.mask.shape
    ids = torch.arange(count * length).view(count, length)
    ids[:, 0] = torch.arange(count) // 2
    return ids


def call(cls, batch, packed=False, mismatch=0.1, **settings):
    """Return the loss that an actor computes on a batch whose tokens were sampled by two versions of the weights."""
    count, length = batch.mask.shape
    engine = Engine(batch.logp, packed)
    versions = torch.arange(length).expand(count, -1) // 5 + 3
    each = torch.ones(count, length)
    data = {
        "prox_logp": batch.logp_old,
        "logprobs": batch.logp_old - mismatch,
        "advantages": batch.advantages[:, None].expand_as(batch.mask).contiguous(),
        "loss_mask": batch.mask,
        # A place of the loss belongs to the token after it.
        "versions": pad(versions, (1, 0), value=-1)[:, :-1].contiguous(),
        "attention_mask": each,
        "rows": torch.arange(count)[:, None].expand(-1, length).contiguous(),
        "input_ids": ids_of(batch),
        "rewards": torch.arange(count).float(),
        "tot_rewards": each,
        "kl_rewards": each,
    }
    # Its statistics are of one shape until they are exported.
    stats_tracker.DEFAULT_TRACKER.stats.clear()
    # AReaL holds float32.
    data = {name: x.float() if x.is_floating_point() else x for name, x in data.items()}
    cls(config_of(**settings), engine)._ppo_update(data)
    return engine.loss


class TestAReaL(Contract):
    takes_dual_clip = True

    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch):
        self.patch = monkeypatch

    def ours(self, batch, clip):
        self.patch.setenv("BANDPO_METHOD", clip)
        return call(BandPPOActor, batch)

    def stock(self, batch, low, high):
        return call(PPOActor, batch, eps_clip=low, eps_clip_higher=high)

    def recorded(self, batch, folder):
        self.patch.setenv("BANDPO_RECORD", folder)
        return call(BandPPOActor, batch, mismatch=0.0)

    def sequence_level(self, batch):
        call(BandPPOActor, batch, importance_sampling_level="sequence")


def test_a_packed_batch_is_the_padded_one():
    batch = make_batch(22)
    TestAReaL().compare(batch, call(BandPPOActor, batch, packed=True), call(BandPPOActor, batch))


@pytest.mark.parametrize("packed", [False, True])
def test_a_record_has_the_age_of_each_token(packed, monkeypatch, tmp_path):
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("BANDPO_RECORD", str(tmp_path))
    batch = make_batch(23)
    # The last place of a row has no token after it, and AReaL does not count it.
    batch.mask[:, -1] = 0
    call(BandPPOActor, batch, packed)
    (loss,) = read_record(tmp_path)
    versions = torch.arange(batch.mask.shape[1]).expand_as(batch.mask) // 5 + 3
    assert loss.step == 7
    assert loss.lag[loss.mask].tolist() == (7 - versions)[batch.mask > 0].tolist()


@pytest.mark.parametrize("packed", [False, True])
def test_a_record_has_ids_prompts_and_rewards(packed, monkeypatch, tmp_path):
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("BANDPO_RECORD", str(tmp_path))
    batch = make_batch(24)
    batch.mask[:, -1] = 0
    call(BandPPOActor, batch, packed)
    count = len(batch.mask)
    loss = written(
        batch,
        logp_rollout=batch.logp_old - 0.1,
        tokens=ids_of(batch).roll(-1, -1),
        group=torch.arange(count) // 2,
        reward=torch.arange(count).float(),
        step=7,
        generation=7,
        update=0,
    )
    (read,) = read_record(tmp_path)
    # AReaL may order the sequences anew.
    order = read.reward.astype(int)
    whole = {name: x if isinstance(x, int) else x[order] for name, x in loss.items()}
    check_record(tmp_path, [whole], sampling={"temperature": 1.0})


def test_its_own_dual_clip_stands_beside_a_rule_alone(monkeypatch):
    monkeypatch.setenv("BANDPO_METHOD", "FixedClip(0.2)")
    batch = make_batch(21, spread=1.5)
    TestAReaL().compare(batch, *(call(cls, batch, c_clip=1.5) for cls in (BandPPOActor, PPOActor)))
    assert call(BandPPOActor, batch, c_clip=1.5) != call(BandPPOActor, batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"use_sapo_loss": True, "use_decoupled_loss": False},
            "^actor.use_sapo_loss=True: AReaL would compute SAPO's loss",
        ),
        ({"importance_sampling_level": "sequence"}, "^actor.importance_sampling_level=sequence: "),
        ({"prox_logp_method": "loglinear"}, "^actor.prox_logp_method=loglinear: "),
        ({"eps_clip_higher": 0.28}, "^actor.eps_clip_higher=0.28: it would have no effect"),
        ({"c_clip": 3.0}, "^actor.c_clip=3.0: the method and this setting"),
    ],
)
def test_settings_that_make_its_loss_another_one_are_refused(settings, message, monkeypatch):
    monkeypatch.setenv("BANDPO_METHOD", "DAPO()")
    with pytest.raises(ValueError, match=message):
        BandPPOActor(config_of(**settings), Engine(None))


def test_a_run_in_which_every_ratio_is_one_is_refused(monkeypatch, capsys):
    monkeypatch.delenv("BANDPO_ACCEPT_IDLE_CLIP")
    with pytest.raises(
        ValueError, match=r"every ratio is 1 .*: set actor.ppo_n_minibatches above 1; or, if training is"
    ):
        BandPPOActor(config_of(), Engine(None))
    with pytest.raises(ValueError, match=r"every ratio is 1"):
        BandPPOActor(config_of(use_decoupled_loss=False, recompute_logprob=True), Engine(None))
    BandPPOActor(config_of(ppo_n_minibatches=4), Engine(None))
    assert "If training is asynchronous, older weights sampled" in capsys.readouterr().out
    # AReaL's defaults.
    BandPPOActor(config_of(use_decoupled_loss=False), Engine(None))
    assert "anchor      the sampler's log-probabilities" in capsys.readouterr().out
    monkeypatch.setenv("BANDPO_METHOD", "Method(FixedClip(0.2), old_policy='rollout')")
    BandPPOActor(config_of(use_decoupled_loss=False), Engine(None))
    with pytest.raises(
        ValueError, match=r"a setting of this framework determines: set actor.use_decoupled_loss=false"
    ):
        BandPPOActor(config_of(), Engine(None))


def test_the_ratio_refers_to_the_sampler_by_default():
    """By AReaL's own code, in which its settings choose the old log-probabilities."""
    batch = make_batch(24, spread=1.0)
    assert not config_of(use_decoupled_loss=False).should_compute_prox_logp()
    assert config_of(use_decoupled_loss=False, recompute_logprob=True).should_compute_prox_logp()
    assert config_of().should_compute_prox_logp()
    actor = BandPPOActor(config_of(use_decoupled_loss=False), Engine(batch.logp))
    assert actor.engine.old_is_rollout
