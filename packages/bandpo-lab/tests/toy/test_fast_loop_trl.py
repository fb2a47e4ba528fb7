"""Updates of `bandpo_lab.toy.fast_loop` against those of TRL's trainer on the same answers."""

from zlib import crc32

import pytest
import torch

from helpers.frameworks import needs

needs("trl")
from bandpo.core.schedules import TrainingState
from bandpo.core.text import as_method
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks import multiplication
from bandpo_lab.toy.fast_loop import ALPHABET, BETAS, Batch, Network, group_advantages, update


def varied_reward(completions, **_):
    """Return rewards that differ within every group, so that no advantage is 0."""
    return [crc32(text.encode()) % 97 / 97 for text in completions]


def as_batch(inputs):
    """Return the micro-batch that TRL's trainer passes to its loss as a batch of the loop."""
    mask = inputs["completion_mask"].float()
    nothing = torch.zeros(len(mask), dtype=torch.long)
    return Batch(
        prompts=inputs["prompt_ids"],
        tokens=inputs["completion_ids"],
        mask=mask,
        logp=inputs["old_per_token_logps"] * mask,
        entropy=torch.zeros_like(mask),
        rewards=torch.zeros(len(mask)),
        advantages=inputs["advantages"],
        group=nothing,
        version=nothing,
    )


@pytest.mark.parametrize("method", ["FixedClip(0.2)", "Band(KL(), 0.05)", "GSPO()"])
def test_two_updates_are_those_of_trl(method, tmp_path, monkeypatch):
    """Two updates on one batch, so that the ratios of the second differ from 1 and the clip acts."""
    config = BandGRPOConfig(
        str(tmp_path),
        method=method,
        certify="off",  # which would compute one more loss
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        num_generations=4,
        num_iterations=2,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        max_completion_length=12,
        max_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        loss_type="grpo",
        beta=0.0,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    path = multiplication.base_model_path()
    trainer = BandGRPOTrainer(
        str(path), varied_reward, args=config, train_dataset=multiplication.dataset("train", 16)
    )
    batches = []
    compute_loss = trainer.compute_loss

    def keep_inputs(model, inputs, *arguments, **named):
        batches.append(as_batch(inputs))
        return compute_loss(model, inputs, *arguments, **named)

    monkeypatch.setattr(trainer, "compute_loss", keep_inputs)
    trainer.train()
    assert len(batches) == 2

    # The advantages are those of the groups, whose answers TRL has shuffled.
    batch = batches[0]
    texts = ["".join(ALPHABET[i] for i in row if i > 1) for row in batch.tokens.tolist()]
    rewards = torch.tensor(varied_reward(texts))
    for prompt in batch.prompts.unique(dim=0):
        rows = (batch.prompts == prompt).all(1)
        torch.testing.assert_close(
            group_advantages(rewards[rows], int(rows.sum())), batch.advantages[rows], rtol=1e-4, atol=1e-4
        )

    network = Network(path)
    before = {name: weight.detach().clone() for name, weight in network.weights.items()}
    optimizer = torch.optim.Adam(network.weights.values(), 1e-3, betas=BETAS)
    results = [update(network, optimizer, part, as_method(method), TrainingState()) for part in batches]
    assert results[0].audit.metrics()["clip_high"] == 0
    if method == "FixedClip(0.2)":
        assert results[1].audit.metrics()["clip_high"] > 0
    trained = dict(trainer.model.named_parameters())
    for name, weight in network.weights.items():
        # Adam's first steps are of the size of the learning rate, whatever the gradient. Where the gradient is nearly
        # 0, as that of a bias of the keys, its rounding is seen: it differs from processor to processor.
        difference = (weight - trained[name]).abs().mean()
        moved = (weight - before[name]).abs().mean()
        assert moved > 1e-4, name
        assert difference < 0.01 * moved, name
