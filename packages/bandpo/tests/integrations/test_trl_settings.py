"""Every setting beside a method is honoured, refused or announced."""

import math
from dataclasses import fields

import pytest
import torch

from helpers.frameworks import needs

needs("trl")

import transformers
import trl
import trl_settings
from test_trl import LOG, SETTINGS, half, make, varied_reward
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import byte_model
from bandpo.integrations.trl import AuditedGRPOTrainer, AuditMixin, BandGRPOConfig, BandGRPOTrainer
from bandpo.integrations.trl.audit import check_trl_version
from bandpo.integrations.trl.probe import probe_loss
from bandpo_lab.tasks import multiplication
from rlvet.records.record import read_record

pytestmark = pytest.mark.filterwarnings(
    "ignore::bandpo.core.errors.BandWarning", "ignore:You are using 'rollout_func'"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_model.save(tmp_path_factory.mktemp("model"))


def small(cls, config, folder, tmp_path, **settings):
    """Return a trainer of a tiny model."""
    return cls(
        model=str(folder),
        reward_funcs=varied_reward,
        args=config(str(tmp_path), **SETTINGS | settings),
        train_dataset=multiplication.dataset("train", 64),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )


def test_every_field_of_a_grpo_config_is_in_the_tables():
    names = {setting.name for setting in fields(GRPOConfig)}
    missing = sorted(names - trl_settings.LOSS.keys() - trl_settings.AROUND)
    versions = f"TRL {trl.__version__} with transformers {transformers.__version__}"
    assert not missing, (
        f"{versions} has settings that no table names: {', '.join(missing)}. Add each to LOSS in "
        "packages/bandpo/tests/integrations/trl_settings.py if the loss depends on it, else to AROUND, and "
        "to ONLY_WITH if some versions of transformers lack it, and run that file"
    )
    assert not trl_settings.LOSS.keys() & trl_settings.AROUND
    assert trl_settings.ONLY_WITH.keys() <= trl_settings.LOSS.keys() | trl_settings.AROUND


@pytest.mark.skipif(trl.__version__ != "1.16.0", reason="the tables are those of the newest TRL")
def test_the_tables_name_what_this_transformers_has():
    names = {setting.name for setting in fields(GRPOConfig)}
    tables = trl_settings.LOSS.keys() | trl_settings.AROUND
    assert {name for name in tables if trl_settings.is_there(name, transformers.__version__)} == names


@pytest.mark.skipif(trl.__version__ != "1.16.0", reason="the page is that of the newest TRL")
def test_the_page_is_made_from_the_tables():
    marked = ["<!-- settings: begin -->", *trl_settings.table(trl.__version__), "<!-- settings: end -->"]
    assert "\n".join(marked) in trl_settings.PAGE.read_text()


def rows(kind):
    return [
        pytest.param(name, case, id=f"{name}-{number}")
        for name, cases in trl_settings.LOSS.items()
        for number, case in enumerate(cases)
        if isinstance(case, kind) and trl_settings.is_there(name, transformers.__version__)
    ]


@pytest.mark.parametrize(("name", "case"), rows(trl_settings.Refused))
def test_a_row_that_is_refused(name, case, tmp_path):
    assert name in case.settings
    with pytest.raises(ValueError, match=case.message):
        BandGRPOConfig(str(tmp_path), **SETTINGS | case.settings)


@pytest.mark.parametrize("name", ["epsilon", "epsilon_high"])
def test_an_epsilon_is_accepted_if_it_is_the_methods_own(name, tmp_path):
    own = {"epsilon": 0.2, "epsilon_high": 0.28}
    settings = SETTINGS | {"method": "FixedClip(0.2, 0.28)"}
    config = BandGRPOConfig(str(tmp_path), **settings | {name: own[name]})
    assert (config.epsilon, config.epsilon_high) == (0.2, 0.28)
    with pytest.raises(ValueError, match=f"{name}=0.3 would have no effect"):
        BandGRPOConfig(str(tmp_path), **settings | {name: 0.3})
    assert f"| `{name}` | refused, but for the number of a method" in trl_settings.PAGE.read_text()


@pytest.mark.parametrize(("name", "case"), rows(trl_settings.Announced))
def test_a_row_that_is_announced(name, case, folder, tmp_path, capsys):
    assert name in case.settings
    small(BandGRPOTrainer, BandGRPOConfig, folder, tmp_path, **case.settings)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bandpo: ")]
    assert any(case.message in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), rows(trl_settings.Honoured))
def test_a_row_that_is_honoured(name, case, folder, tmp_path):
    """A fixed clip trains bit for bit as the stock trainer."""
    assert name in case.settings
    settings = {"max_steps": 4, "loss_type": "dapo", "gradient_accumulation_steps": 1} | case.settings
    high = 1.03 if settings["loss_type"] == "cispo" else 0.03
    stock = small(GRPOTrainer, GRPOConfig, folder, tmp_path, epsilon=0.02, epsilon_high=high, **settings)
    stock.train()
    ours = small(
        BandGRPOTrainer, BandGRPOConfig, folder, tmp_path, method="FixedClip(0.02, 0.03)", **settings
    )
    ours.train()
    for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"method": "SAPO()", "sapo_temperature_pos": 2.0},
            r"sapo_temperature_pos=2.0 would have no effect .*SAPO\(",
        ),
        ({"method": "SAPO()", "sapo_temperature_neg": 2.0}, r"sapo_temperature_neg=2.0 would have no effect"),
        ({"method": "VESPO()", "vespo_k_pos": 1.0}, r"vespo_k_pos=1.0 would have no effect .*VESPO\("),
        ({"method": "Band()", "vespo_lambda_neg": 1.0}, "vespo_lambda_neg=1.0 would have no effect"),
        ({"loss_type": "cispo", "delta": 3.0}, "delta=3.0 has no effect with loss_type='cispo'"),
        (
            {"method": "GSPO()", "importance_sampling_level": "token"},
            "'token', but GSPO.* is a method of sequences",
        ),
        (
            {"method": "SAPO()", "importance_sampling_level": "sequence"},
            "'sequence', but SAPO.* is a method of tokens",
        ),
    ],
    ids=str,
)
def test_what_a_method_replaces_is_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        BandGRPOConfig(str(tmp_path), **SETTINGS | settings)


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        ({"method": "GSPO()"}, "sequence"),
        ({"method": "GSPO()", "importance_sampling_level": "sequence"}, "sequence"),
        ({"method": "SAPO()"}, "token"),
        ({"method": "FixedClip(0.2)"}, "token"),
        ({"method": "FixedClip(0.2)", "importance_sampling_level": "sequence"}, "sequence"),
    ],
    ids=str,
)
def test_the_level_is_the_methods_unless_a_rule_leaves_it_open(settings, level, tmp_path):
    config = BandGRPOConfig(str(tmp_path), **SETTINGS | settings)
    assert config.importance_sampling_level == config.effective_method.level == level


class Sets(TrainerCallback):
    """Changes a setting of the trainer after its first update."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def on_step_end(self, args, state, control, **_):
        owner, name = (args, "delta") if self.name == "args.delta" else (self.trainer, self.name)
        setattr(owner, name, self.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("epsilon_low", 0.1), ("epsilon_high", 0.5), ("args.delta", 3.0), ("loss_type", "grpo")],
)
def test_a_setting_that_a_callback_changes_stops_the_run(name, value, tmp_path):
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path)
    callback = Sets(name, value)
    callback.trainer = trainer
    trainer.add_callback(callback)
    with pytest.raises(ValueError, match=rf"trainer.{name} was changed from .* to {value} during training"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(("name", "value"), [("epsilon_low", 0.1), ("epsilon_high", 1e-6)])
def test_a_stock_trainer_honours_it_and_the_audit_follows(name, value, tmp_path):
    trainer = make(AuditedGRPOTrainer, GRPOConfig, tmp_path)
    callback = Sets(name, value)
    callback.trainer = trainer
    trainer.add_callback(callback)
    trainer.train()
    high = value if name == "epsilon_high" else 0.2
    assert trainer.loss_method().clip.high == high
    assert "has the gradient of " in probe_loss(trainer)


def test_a_trainer_of_trl_with_a_loss_of_its_own_is_refused():
    gmpo = pytest.importorskip("trl.experimental.gmpo").GMPOTrainer
    for base in (AuditMixin, BandGRPOTrainer):
        with pytest.raises(
            TypeError,
            match=r"derives from GMPOTrainer, which replaces the loss of GRPOTrainer.* method='GMPO\(\)'",
        ):
            type("Mine", (base, gmpo), {})


def test_a_version_whose_averages_are_others_is_refused():
    for version in ("1.10.0", "1.16.0", "2.0.0.dev0"):
        check_trl_version(version)
    with pytest.raises(ImportError, match="gradient_accumulation_steps / steps_per_generation"):
        check_trl_version("1.9.2")


def said_by(tmp_path, capsys, **settings):
    rollout_func = settings.pop("rollout_func", None)
    make(BandGRPOTrainer, BandGRPOConfig, tmp_path, rollout_func, **settings)
    return "".join(line for line in capsys.readouterr().err.splitlines() if line.startswith("bandpo: "))


@pytest.mark.parametrize(
    "settings", [{"method": "DPPO()"}, {"method": "IcePop()"}, {"anchor": "rollout"}], ids=str
)
def test_sampling_beside_the_rollouts_probabilities_is_announced(settings, tmp_path, capsys):
    settings = settings | {"rollout_func": half}
    assert said_by(tmp_path, capsys, **settings) == ""
    said = said_by(tmp_path, capsys, **settings, top_p=0.9, top_k=50, temperature=0.7)
    assert "top_p=0.9, top_k=50, so ratios are not 1 before the first update" in said
    assert "sample with top_p=1.0, top_k=0" in said
    said = said_by(tmp_path, capsys, **settings, temperature=0.7)
    assert "at temperature=0.7 over the whole vocabulary" in said
    assert "rollout_func must return them at the same temperature" in said


def test_sampling_beside_the_trainers_probabilities_is_announced(tmp_path, capsys):
    assert said_by(tmp_path, capsys, temperature=0.7) == ""
    said = said_by(tmp_path, capsys, generation_kwargs={"top_p": 0.9})
    assert (
        "tokens are sampled with top_p=0.9, but the probabilities in ratios and bounds are the trainer's"
        in said
    )
    said = said_by(tmp_path, capsys, generation_kwargs={"temperature": 0.5})
    assert (
        "generation_kwargs samples at temperature=0.5, but the trainer's probabilities are at temperature=1"
        in said
    )


@pytest.mark.parametrize("masked", [False, True])
def test_the_record_has_rewards_truncation_and_sampling(masked, tmp_path):
    pytest.importorskip("pyarrow")
    settings = LOG | {"record": str(tmp_path / "tokens"), "top_k": 50, "temperature": 0.7}
    expected = {}

    def noted(completions, completion_ids, **_):
        rewards = varied_reward(completions)
        expected.update({tuple(ids): reward for ids, reward in zip(completion_ids, rewards, strict=True)})
        return rewards

    trainer = make(
        BandGRPOTrainer,
        BandGRPOConfig,
        tmp_path,
        mask_truncated_completions=masked,
        **settings,
        reward_weights=[2.0],
    )
    trainer.reward_funcs = [noted]
    trainer.train()
    compared = 0
    for loss in read_record(tmp_path / "tokens"):
        assert loss.reward is not None
        assert loss.truncated is not None
        for row, (mask, tokens) in enumerate(zip(loss.mask, loss.token, strict=True)):
            ids = tuple(tokens[mask].tolist())
            if ids:
                assert loss.reward[row] == pytest.approx(2 * expected[ids])
                assert loss.truncated[row] == (len(ids) == 12 and ids[-1] not in trainer.eos_token_ids)
                compared += 1
            else:
                assert masked
                assert loss.truncated[row]
    assert compared or masked


def test_the_doctor_tests_that_reward_and_advantage_agree(tmp_path):
    """Also while training: advantages of the wrong sign are reported."""

    class Flipped(BandGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            outputs = super()._generate_and_score_completions(inputs)
            outputs["advantages"] = -outputs["advantages"]
            return outputs

    make(BandGRPOTrainer, BandGRPOConfig, tmp_path, watched="stop").train()
    with pytest.raises(RuntimeError, match="reward-sign: better answers have lower advantages"):
        make(Flipped, BandGRPOConfig, tmp_path, watched="stop").train()


def sampled_from_a_part(prompts, trainer):
    """Sample from the tokens that top-p leaves, and return their probabilities among these."""
    outputs = half(prompts, trainer)
    ids = [
        torch.tensor(prompt + answer)
        for prompt, answer in zip(outputs["prompt_ids"], outputs["completion_ids"], strict=True)
    ]
    logprobs = []
    for tokens in ids:
        with torch.no_grad():
            logp = trainer.model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        drawn = logp.gather(1, tokens[1:, None])[-3:, 0]
        left = drawn.exp() + 0.9 * (1 - drawn.exp())
        logprobs.append((drawn - left.log()).tolist())
    return outputs | {"logprobs": logprobs}


@pytest.mark.filterwarnings("default::bandpo.core.errors.BandWarning")
def test_the_doctor_names_top_p_and_no_dropout(tmp_path):
    trainer = make(
        BandGRPOTrainer, BandGRPOConfig, tmp_path, sampled_from_a_part, method="IcePop()", top_p=0.9
    )
    with pytest.warns(
        UserWarning, match=r"top-p: the engine's probabilities are above .* sample from the whole vocabulary"
    ):
        trainer.train()
    assert math.isfinite(trainer.state.log_history[-1].get("train_loss", 0.0))
