import pytest
import torch
import transformers
from peft import LoraConfig
from test_trl import SETTINGS, varied_reward

from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks import multiplication

pytestmark = pytest.mark.filterwarnings("ignore")  # what small random models make their libraries say


def train(folder, family, fused, lora=None, more=None, **settings):
    tokenizer = transformers.AutoTokenizer.from_pretrained(multiplication.base_model_path())
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "bos")}
    config = getattr(transformers, f"{family}Config")
    config = config(
        vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=16, **shape, **tokens, **more or {}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.get_output_embeddings().weight.data *= 10  # logits of some size, so that a cap acts
    model.save_pretrained(folder)
    logs = {"logging_strategy": "steps", "logging_steps": 1}
    sgd = {"optim": "sgd", "learning_rate": 0.5}  # Adam would make a whole step of a rounding
    settings = {**SETTINGS, **logs, **sgd, "temperature": 0.8, "fused_logits": fused, **settings}
    args = BandGRPOConfig(str(folder), **settings)
    data = multiplication.dataset("train", 32)
    lora = lora and LoraConfig(r=2, **lora)
    trainer = BandGRPOTrainer(str(folder), varied_reward, args, data, None, tokenizer, peft_config=lora)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {"method": "GSPO()", "beta": 0.1}),
        (
            "Qwen2",
            {"method": "FixedClip(0.1)", "top_entropy_quantile": 0.5, "more": {"tie_word_embeddings": True}},
        ),
        ("Qwen3", {"method": "BAPO()", "gradient_checkpointing": True}),
        ("Gemma2", {"method": "SAPO()", "more": {"final_logit_softcapping": 2.0}}),
        ("Gemma3Text", {"method": "KLCov()", "more": {"final_logit_softcapping": 2.0}}),
        ("Llama", {"method": "BandPO()", "beta": 0.1, "lora": {"target_modules": ["q_proj"]}}),
    ],
)
def test_a_run_is_the_one_with_logits(family, settings, tmp_path, capsys):
    runs = [train(tmp_path / str(fused), family, fused, **settings) for fused in (False, True)]
    weights = [list(run.model.parameters()) for run in runs]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
    logs = [[row["entropy"] for row in run.state.log_history if "entropy" in row] for run in runs]
    assert logs[0] == pytest.approx(logs[1], abs=1e-4)
    assert capsys.readouterr().err.count(" has the gradient of ") == 2


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("Cohere", {"more": {"logit_scale": 0.1}}, "the model's logits differ from weight @ hidden by 90"),
        ("Llama", {"lora": {"modules_to_save": ["lm_head"]}}, "the model's is a ModulesToSaveWrapper"),
    ],
)
def test_another_head_is_refused(family, settings, message, tmp_path):
    with pytest.raises(ValueError, match=f"fused_logits=True needs a plain linear head, but {message}"):
        train(tmp_path, family, True, **settings)
