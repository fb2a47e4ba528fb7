"""The certificate in TRL's trainer: silent where the gradient is the method's, a stop where TRL's loss is another."""

import inspect
import textwrap

import pytest
from test_trl import SETTINGS, varied_reward
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

import byte_model
from bandpo.audit.logs import named_rows
from bandpo.integrations._trl_certificate import BY_WINDOW
from bandpo.integrations.trl import AuditedGRPOTrainer, BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks import multiplication

pytestmark = pytest.mark.filterwarnings("ignore::bandpo.audit.watch.BandWarning")
OTHERS = {"per_device_train_batch_size": 4, "learning_rate": 4e-3, "seed": 3, "max_steps": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_model.save(tmp_path_factory.mktemp("model"))


def train(folder, tmp_path, cls=BandGRPOTrainer, config=BandGRPOConfig, **settings):
    trainer = cls(
        model=str(folder),
        reward_funcs=varied_reward,
        args=config(str(tmp_path), **SETTINGS | OTHERS | settings),
        train_dataset=multiplication.dataset("train", 32),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()
    return trainer


LUSPO = pytest.mark.skipif(not BY_WINDOW, reason="TRL 1.8's luspo is not certified")
EVERYTHING = {
    "beta": 0.05,
    "use_bias_correction_kl": True,
    "top_entropy_quantile": 0.5,
    "off_policy_mask_threshold": 1e-3,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "FixedClip(0.02, 0.03)", "delta": 1.01, "loss_type": "grpo"},
        {"method": "FixedClip(0.02, 0.03)", "loss_type": "cispo"},
        {"method": "GSPO(1e-3, 1e-3)", **EVERYTHING},
        pytest.param({"method": "BandPO()", "loss_type": "luspo"}, marks=LUSPO),
        {"method": "SPO(0.02)", **EVERYTHING},
        {"method": "SAPO()", "bf16": True},
        {"method": "Method(Band(KL(), 1e-3), aggregation='seq-mean-token-sum-norm')"},
        {"method": "BAPO()"},
    ],
    ids=str,
)
def test_the_gradient_is_the_methods(settings, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bandpo.integrations._trl_certificate.EVERY", 1)
    train(folder, tmp_path, **settings)
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("bandpo: gradient equals ")
    ]
    assert 1 <= len(lines) <= 2


def patched(old, new):
    """TRL's loss with one line changed."""
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss))
    assert old in source
    found = {}
    exec(source.replace(old, new), vars(grpo_trainer), found)
    return found["_compute_loss"]


READ = 'advantages = inputs["advantages"]\n'
LOG_RATIO = "per_token_logps - old_per_token_logps"
PATCHES = {
    "advantages clamped": (READ, READ.strip() + ".clamp(-0.3, 0.3)\n", {}),
    "advantages normalised": (READ, READ.strip() + "; advantages = advantages / advantages.std()\n", {}),
    "advantages detached": (READ, READ.strip() + ".detach()\n", {}),
    "log-ratio clamped": (f"= {LOG_RATIO}", f"= ({LOG_RATIO}).clamp(-0.01, 0.01)", {}),
    "a clip of its own": ("1 - self.epsilon_low, 1 + self.epsilon_high)", "0.99, 1.01)", {}),
    "half of it": ("return loss", "return loss * 0.5", {}),
    "another KL": ("+ self.beta * per_token_kl", "+ 1.1 * self.beta * per_token_kl", {"beta": 0.05}),
}


@pytest.mark.filterwarnings("ignore:the loss of trl .* is none that bandpo was tested with")
@pytest.mark.parametrize("patch", PATCHES)
def test_another_loss_is_stopped_at_the_first_update(patch, folder, tmp_path, monkeypatch):
    old, new, settings = PATCHES[patch]
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patched(old, new))
    settings = {"method": "FixedClip(0.1)", "loss_type": "grpo", **settings}
    seen = []

    class Seen(BandGRPOTrainer):
        def training_step(self, *arguments, **named):
            seen.append(self.state.global_step)
            return super().training_step(*arguments, **named)

    with pytest.raises(RuntimeError, match=r"gradient differs from FixedClip|does not use the advantages"):
        train(folder, tmp_path, Seen, **settings)
    assert seen[-1] <= 1
    if patch == "half of it":
        with pytest.warns(UserWarning, match="every token is 0.5 times as expected.* certify='warn' goes on"):
            train(folder, tmp_path, **settings, certify="warn")


def test_a_subclass_that_changes_the_loss_is_stopped(folder, tmp_path):
    class Doubled(BandGRPOTrainer):
        def compute_loss(self, *arguments, **named):
            return 2 * super().compute_loss(*arguments, **named)

    with pytest.raises(RuntimeError, match="every token is 2 times as expected"):
        train(folder, tmp_path, Doubled)
    train(folder, tmp_path, Doubled, certify="off")


def test_an_audit_of_another_loss_is_told(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patched(*PATCHES["a clip of its own"][:2]))
    with pytest.warns(UserWarning, match=r"gradient differs from FixedClip\(low=0.2.*: another clip or mask"):
        train(folder, tmp_path, AuditedGRPOTrainer, GRPOConfig)


def test_the_audit_counts_the_tokens_that_have_a_gradient(folder, tmp_path):
    """Of as many in both runs, up to the first update, a fifth where TRL takes the fifth with the highest entropy."""
    tokens = []
    for share in (1.0, 0.2):
        trainer = train(folder, tmp_path, top_entropy_quantile=share, logging_steps=1)
        tokens.append(named_rows(trainer.state.log_history)[0]["audit/tokens"])
    assert tokens[1] / tokens[0] == pytest.approx(0.2, abs=0.03)


def test_an_unknown_loss_is_told_at_start_up(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patched("return loss", "return loss * 1"))
    with pytest.warns(UserWarning, match="is none that bandpo was tested with"):
        train(folder, tmp_path)
