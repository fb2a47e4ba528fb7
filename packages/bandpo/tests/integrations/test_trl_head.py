"""BandGRPOTrainer with the log-probabilities of TRL's own head, for models that scale, cap or adapt their logits."""

import pytest
import torch

from helpers.frameworks import needs

needs("trl")
needs("peft")

import transformers
import trl
from packaging.version import Version
from peft import LoraConfig
from test_trl import SETTINGS, varied_reward

from bandpo import linear_logp
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks import multiplication

pytestmark = pytest.mark.filterwarnings("ignore")  # what small random models make their libraries say


def make(folder, family, lora=None, **shape):
    """Return a trainer of BandPO with a tiny random model of a family."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(multiplication.base_model_path())
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "bos")}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=16, **sizes, **tokens, **shape
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.get_output_embeddings().weight.data *= 10  # logits of some size, so that a cap acts
    model.save_pretrained(folder)
    settings = SETTINGS | {"method": "BandPO()", "temperature": 0.8, "learning_rate": 0.05}
    return BandGRPOTrainer(
        str(folder),
        varied_reward,
        BandGRPOConfig(str(folder), **settings),
        multiplication.dataset("train", 32),
        None,
        tokenizer,
        peft_config=lora and LoraConfig(r=2, **lora),
    )


@pytest.mark.skipif(Version(trl.__version__) < Version("1.15"), reason="this TRL has no head of its own")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Cohere", {"logit_scale": 0.1}),
        ("Granite", {"logits_scaling": 8.0}),
        ("Gemma2", {"final_logit_softcapping": 2.0}),
        ("Llama", {"lora": {"modules_to_save": ["lm_head"]}}),
        ("Qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_band_trains_on_log_probabilities_of_trls_own_head(family, settings, tmp_path, capsys):
    trainer = make(tmp_path, family, **settings)
    before = [x.detach().clone() for x in trainer.model.parameters()]
    trainer.train()
    assert " has the gradient of " in capsys.readouterr().err  # the gradient check
    assert any(not x.equal(y) for x, y in zip(before, trainer.model.parameters(), strict=True))

    ids = torch.randint(trainer.model.config.vocab_size, (2, 12))
    attention = torch.ones_like(ids)
    with torch.no_grad():
        logp, entropy, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attention, 7, compute_entropy=True
        )
        logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, -8:-1] / 0.8
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(logp, expected.gather(-1, ids[:, -7:, None])[..., 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "shape"), [("Cohere", {"logit_scale": 0.1}), ("Granite", {"logits_scaling": 8.0})]
)
def test_linear_logp_has_the_scales_of_transformers(family, shape):
    """By the temperature, as its docstring says."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97, pad_token_id=0, num_key_value_heads=1, **sizes, **shape
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    head = model.get_output_embeddings()
    head.weight.data *= 10
    ids = torch.randint(97, (2, 12))
    scale = shape.get("logit_scale") or 1 / shape["logits_scaling"]

    logits = model(input_ids=ids).logits[:, :-1] / 0.8
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    logp = linear_logp(hidden, head.weight, ids[:, 1:], temperature=0.8 / scale).logp
    torch.testing.assert_close(logp, expected, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(x.sum(), head.weight, retain_graph=True)[0] for x in (logp, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_the_setting_of_earlier_versions_is_named(tmp_path):
    with pytest.raises(ValueError, match="fused_logits is no longer a setting; leave it out"):
        BandGRPOConfig(str(tmp_path), fused_logits=True)
