"""The policy losses of slime and of miles, with log-probabilities in place of a model's.

They are not on the package index. Where neither an installed package nor a clone is here, a stand-in takes their place:
PPO's clamp at ``args.eps_clip`` and ``args.eps_clip_high``. `IMITATED` says what of their code it and these tests rely
on, and is compared with it where it is here.
"""

import inspect
import sys
from argparse import Namespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bandpo_slime
from bandpo import Band
from bandpo.testing import check_record
from bandpo_slime import before_train_step, miles_policy_loss, miles_start, policy_loss, start
from contract import Batch, Contract, dense_loss, make_batch, written
from helpers.frameworks import importing, is_here
from rlvet.records.record import read_record
from stand_ins import stand_in

MODULES = {
    "slime": "slime.backends.megatron_utils.loss",
    "miles": "miles.backends.training_utils.loss_hub.losses",
}
IMITATED = {
    "parameters": ["args", "batch", "logits", "sum_of_sample_mean"],
    "settings": {"use_rollout_logprobs", "advantage_estimator", "eps_clip", "eps_clip_high", "eps_clip_c"},
    "keys": {"log_probs", "rollout_log_probs", "advantages", "loss_masks", "unconcat_tokens"},
}
"""The parameters of ``policy_loss_function``, and what it reads of its arguments and of its micro-batch."""

REAL = {}
for framework, name in MODULES.items():
    if is_here(framework, clone=framework):
        with importing("megatron", "ray", "transformers", "sglang", "wandb", "httpx", framework=framework):
            REAL[framework] = __import__(name, fromlist=["policy_loss_function"])


def clamped_loss(ppo_kl, advantages, low, high, dual_clip):
    """PPO's clamp, with slime's dual clip; and which tokens are clipped."""
    ratio = (-ppo_kl).exp()
    unclipped, clipped = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    loss = torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss, (clipped > unclipped).float()


def policy_loss_stand_in(module, args, batch, logits, sum_of_sample_mean):
    outputs = module.get_log_probs_and_entropy(logits, response_lengths=batch["response_lengths"])
    outputs = outputs[1] if isinstance(outputs, tuple) else outputs
    old = torch.cat(batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"])
    loss, clipped = clamped_loss(
        old - torch.cat(outputs["log_probs"]),
        torch.cat(batch["advantages"]),
        args.eps_clip,
        args.eps_clip_high,
        args.eps_clip_c,
    )
    return sum_of_sample_mean(loss), {"pg_clipfrac": sum_of_sample_mean(clipped).detach()}


@pytest.fixture(autouse=True)
def _frameworks(monkeypatch):
    """Log-probabilities in place of a model's: slime's function gives a pair, miles' what is second in it."""

    def log_probs(logits, response_lengths, **_):
        split = list(logits.split(response_lengths))
        return {"log_probs": split, "entropy": [torch.zeros_like(x) for x in split]}

    computed = {"slime": lambda *given, **named: (None, log_probs(*given, **named)), "miles": log_probs}
    for framework, path in MODULES.items():
        module = REAL.get(framework)
        if module is None:
            module = stand_in(monkeypatch, path)
            module.policy_loss_function = lambda *given, module=module: policy_loss_stand_in(module, *given)
            parent, _, name = path.rpartition(".")
            setattr(sys.modules[parent], name, module)
        monkeypatch.setattr(
            module, "get_log_probs_and_entropy", computed[framework], raising=framework in REAL
        )
    if "miles" in REAL:
        monkeypatch.setattr(REAL["miles"], "get_parallel_state", lambda: None)
        # Without context parallelism a rank has the whole of each mask.
        monkeypatch.setattr(
            REAL["miles"], "get_local_response_loss_masks", lambda total, response, masks, *_: list(masks)
        )
        monkeypatch.setattr(REAL["miles"], "compute_ess_ratio_contribution", lambda **_: torch.zeros(()))


DEFAULTS = {
    "advantage_estimator": "grpo",
    "calculate_per_token_loss": False,
    "custom_pg_loss_reducer_function_path": None,
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "eps_clip_c": None,
    "qkv_format": "thd",
    "rollout_top_p": 1.0,
    "save_debug_train_data": None,
    **dict.fromkeys(("use_rollout_logprobs", "use_opsm", "use_tis", "get_mismatch_metrics"), False),
    **dict.fromkeys(("use_kl_loss", "skip_actor_forward_only", "observe_training_entropy"), False),
}
"""Of the frameworks' arguments, what the loss reads."""


def micro_batch(batch):
    length = batch.mask.shape[1]
    ids = torch.arange(batch.mask.numel()).view(batch.mask.shape)
    # A prompt of one token stands before each answer, the same before two.
    prompts = torch.arange(len(batch.mask)) // 2
    return {
        "log_probs": list(batch.logp_old),
        "rollout_log_probs": list(batch.logp_old - 0.1),
        "advantages": [a.expand(length) for a in batch.advantages],
        "loss_masks": list(batch.mask),
        "unconcat_tokens": list(torch.cat([prompts[:, None], ids], 1)),
        "response_lengths": [length] * len(batch.mask),
        "total_lengths": [length + 1] * len(batch.mask),
    }


def call(loss_fn, batch, **settings):
    """Return a batch of samples whose ``logits`` are already the log-probabilities that slime computes from them."""
    args = Namespace(**DEFAULTS | settings)
    mask = batch.mask.flatten()
    result = loss_fn(args, micro_batch(batch), batch.logp.flatten(), lambda x: (x * mask).sum() / mask.sum())
    assert vars(args) == DEFAULTS | settings
    return result


class TestSlime(Contract):
    framework = "slime"
    loss = staticmethod(policy_loss)
    takes_dual_clip = True

    def ours(self, batch, clip):
        return call(self.loss, batch, method=clip)[0]

    def stock(self, batch, low, high):
        stock = sys.modules[MODULES[self.framework]].policy_loss_function
        return call(stock, batch, eps_clip=low, eps_clip_high=high)[0]

    def recorded(self, batch, folder):
        return call(self.loss, batch, record=folder)

    def sequence_level(self, batch):
        call(self.loss, batch, advantage_estimator="gspo")

    def test_its_own_dual_clip_stands_beside_a_rule_alone(self):
        batch = make_batch(21, spread=1.5)
        stock = sys.modules[MODULES[self.framework]].policy_loss_function
        ours = call(self.loss, batch, method="FixedClip(0.2)", eps_clip_c=1.5)[0]
        self.compare(batch, ours, call(stock, batch, eps_clip_c=1.5)[0])
        assert ours != call(self.loss, batch, method="FixedClip(0.2)")[0]

    def test_a_loss_that_is_computed_again_in_the_backward_pass_is_recorded_once(self, tmp_path):
        """As ``--recompute-loss-function`` does."""
        pytest.importorskip("pyarrow")
        batch = make_batch(25)
        args = Namespace(**DEFAULTS, record=str(tmp_path))
        given = micro_batch(batch)
        loss, _ = checkpoint(self.loss, args, given, batch.logp.flatten(), torch.sum, use_reentrant=False)
        loss.backward()
        assert len(list(read_record(tmp_path))) == 1

    def test_a_record_has_ids_prompts_and_the_place_in_training(self, tmp_path, monkeypatch):
        pytest.importorskip("pyarrow")
        monkeypatch.setattr(bandpo_slime, "PROGRESS", {})
        batch = make_batch(27)
        settings = {"record": str(tmp_path), "rollout_temperature": 0.8, "rollout_top_k": -1}
        args = Namespace(**DEFAULTS | settings)
        before_train_step(args, 5, 2, None, None, None)
        self.loss(args, micro_batch(batch), batch.logp.flatten(), torch.sum)
        loss = written(
            batch,
            logp_rollout=batch.logp_old - 0.1,
            tokens=torch.arange(batch.mask.numel()).view(batch.mask.shape),
            group=torch.arange(len(batch.mask)) // 2,
            step=5,
            generation=5,
            update=2,
        )
        check_record(tmp_path, [loss], sampling={"temperature": 0.8, "top_p": 1.0, "top_k": -1})

    def test_a_record_has_the_dual_clip(self, tmp_path):
        pytest.importorskip("pyarrow")
        call(self.loss, make_batch(26), record=str(tmp_path), method="FixedClip(0.2)", eps_clip_c=3.0)
        (loss,) = read_record(tmp_path)
        assert "DualClip(max_ratio=3.0" in loss.method


class TestMiles(TestSlime):
    framework = "miles"
    loss = staticmethod(miles_policy_loss)


@pytest.mark.parametrize("framework", MODULES)
def test_the_stand_in_imitates_the_frameworks_own_code(framework):
    if framework not in REAL:
        pytest.skip(f"needs {framework}, or a clone of it in $BANDPO_CLONES")
    function = REAL[framework].policy_loss_function
    assert list(inspect.signature(function).parameters) == IMITATED["parameters"]
    source = inspect.getsource(function)
    absent = {name for name in IMITATED["settings"] if name not in source}
    absent |= {name for name in IMITATED["keys"] if f'"{name}"' not in source}
    assert absent == set()


@pytest.mark.parametrize("check", [start, miles_start])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage_estimator": "cispo"}, "^--advantage-estimator=cispo: the loss would be another one"),
        ({"advantage_estimator": "gspo"}, "^--advantage-estimator=gspo: the loss would be another one"),
        ({"eps_clip": 0.1}, "^--eps-clip=0.1: it would have no effect"),
        ({"eps_clip_high": 0.28}, "^--eps-clip-high=0.28: it would have no effect"),
        ({"eps_clip_c": 3.0}, "^--eps-clip-c=3.0: the method and this setting"),
        ({"method": "SAPO()"}, r"^method: 'SAPO\(\)' is SigmoidGate"),
    ],
)
def test_settings_that_make_its_loss_another_one_are_refused_at_start(check, settings, message):
    with pytest.raises(ValueError, match=message):
        check(Namespace(**DEFAULTS | {"method": "DAPO()"} | settings))


SIZES = {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 256}
"""slime's arguments for one update for each rollout."""


@pytest.mark.parametrize("check", [start, miles_start])
def test_a_run_in_which_every_ratio_is_one_is_refused_at_start(check, capsys):
    settings = DEFAULTS | SIZES | {"method": "BandPO()"}
    with pytest.raises(
        ValueError, match=r"every ratio is 1 .*: use --num-steps-per-rollout 2.*--use-rollout-logprobs"
    ):
        check(Namespace(**settings))
    check(Namespace(**settings | {"global_batch_size": 128}))
    said = capsys.readouterr().out
    assert (
        "anchor      the trainer's log-probabilities before the first update on a batch (the default)" in said
    )
    assert "If training is asynchronous, older weights sampled" in said
    for remedy in ({"use_rollout_logprobs": True}, {"keep_old_actor": True}):
        check(Namespace(**settings | remedy))
        assert "anchor      the sampler's log-probabilities" in capsys.readouterr().out
    check(Namespace(**settings, accept_idle_clip=True))
    assert "never acts, as every ratio is 1 (accept_idle_clip: true)" in capsys.readouterr().out


def test_the_anchor_follows_slimes_own_switch():
    batch = make_batch(12)
    trainer, sampler = (call(policy_loss, batch, use_rollout_logprobs=flag)[1] for flag in (False, True))
    assert trainer["pg_clipfrac"] != sampler["pg_clipfrac"]


def test_without_old_log_probabilities_slime_is_left_alone(monkeypatch):
    calls = []
    module = sys.modules[MODULES["slime"]]
    monkeypatch.setattr(module, "policy_loss_function", lambda args, *_: calls.append(args) or (0, {}))
    args = Namespace(**DEFAULTS)
    policy_loss(args, {"log_probs": None}, None, None)
    assert calls == [args]


def test_part_of_a_sequence_under_context_parallelism():
    batch = make_batch(13)
    half = slice(0, 4)
    args = Namespace(**DEFAULTS, method="Band(KL(), 0.05)")
    given = micro_batch(
        Batch(batch.logp[:, half], batch.logp_old[:, half], batch.advantages, batch.mask[:, half])
    )
    given["loss_masks"] = list(batch.mask)
    logits = batch.logp[:, half].flatten()
    with pytest.raises(ValueError, match="record=here: under context parallelism"):
        policy_loss(Namespace(**vars(args), record="here"), given, logits, torch.sum)
    loss, _ = policy_loss(args, given, logits, torch.sum)
    part = Batch(batch.logp[:, half], batch.logp_old[:, half], batch.advantages, torch.ones(6, 4))
    bounds = Band().bounds(part.logp_old)
    torch.testing.assert_close(loss, dense_loss(part, bounds.lower, bounds.upper, "sum"))
