"""The model card names the method that trained, and its paper."""

import pytest

from helpers.frameworks import needs

needs("trl")

from test_trl import SETTINGS, varied_reward
from transformers import AutoTokenizer
from trl import GRPOConfig

import byte_model
from bandpo.integrations.trl import AuditedGRPOTrainer, BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks import multiplication


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_model.save(tmp_path_factory.mktemp("model"))


def card(folder, tmp_path, cls=BandGRPOTrainer, config=BandGRPOConfig, text=None, **settings):
    trainer = cls(
        model=str(folder),
        reward_funcs=varied_reward,
        args=config(str(tmp_path), **SETTINGS | settings),
        train_dataset=multiplication.dataset("train", 32),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    if text is not None:
        trainer.args.method = text
    trainer.create_model_card(model_name="mine")
    return (tmp_path / "README.md").read_text()


def test_a_method_with_a_paper(folder, tmp_path):
    written = card(folder, tmp_path, method="DAPO()")
    assert (
        "This model was trained with `DAPO(low=0.2, high=0.28)`, a method introduced in "
        "[arXiv 2503.14476](https://huggingface.co/papers/2503.14476)."
    ) in written
    assert "eprint = {2503.14476}" in written
    assert "- bandpo\n" in written
    assert "GRPO" not in written.replace("GRPOTrainer", "")
    assert "DeepSeekMath" not in written


def test_a_rule_of_no_paper(folder, tmp_path):
    written = card(
        folder, tmp_path, method="FixedClip(0.1)", loss_type="bnpo", importance_sampling_level="sequence"
    )
    assert (
        "This model was trained with `FixedClip(low=0.1, high=0.1)` (loss_type bnpo, ratios per sequence)."
        in written
    )
    assert "introduced in" not in written
    assert "DeepSeekMath" not in written


def test_a_combination_of_bandpos_own_is_not_called_that_of_the_paper(folder, tmp_path):
    written = card(folder, tmp_path, method="BandAbove()")
    assert (
        ", a combination of bandpo's own, whose upper bound is that of BandPO in "
        "[arXiv 2603.04918](https://arxiv.org/abs/2603.04918)."
    ) in written
    assert "introduced in" not in written


def test_another_average_is_in_the_card(folder, tmp_path):
    written = card(folder, tmp_path, method="DAPO()", loss_type="grpo")
    assert "`DAPO(low=0.2, high=0.28)` (loss_type grpo, ratios per token), a method introduced in" in written


def test_the_text_of_a_method_is_data(folder, tmp_path):
    hostile = "`DAPO`() {{ model_name }} {% raw %}\n---\n[x](javascript:x) <script>"
    written = card(folder, tmp_path, text=hostile)
    expected = "`` `DAPO`() {{ model_name }} {% raw %} --- [x](javascript:x) <script> ``"
    assert f"This model was trained with {expected}" in written
    assert written.count("\n---\n") == 1


def test_a_stock_trainer_keeps_its_card(folder, tmp_path):
    written = card(folder, tmp_path, AuditedGRPOTrainer, GRPOConfig)
    assert "DeepSeekMath" in written
