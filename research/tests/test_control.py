"""The testbed of the control: its rules, its tasks, its updates against torch's own, and its predictions."""

import json
from dataclasses import replace

import pytest
import torch

from bandpo.core.loss import policy_loss
from bandpo.core.text import as_method
from studies import control
from studies.control import (
    CELLS,
    CLIP,
    HELD_OUT,
    WORLDS,
    Cell,
    Key,
    Trainer,
    World,
    keys_of,
    parts_of,
    rules,
    task_of,
)
from studies.predictions import read_predictions

SMALL = World(vocabulary=12, features=6, length=3, decisive=1, prompts=40, prompts_per_batch=4, group=4)
PREDICTIONS = control.PREDICTIONS


@pytest.fixture
def cell(monkeypatch):
    monkeypatch.setitem(WORLDS, "small", SMALL)
    return Cell("x", "small", 4, (0.01, 0.03), range(3), 0.3, batches=4)


def test_the_rules_are_all_pairs_of_sides():
    assert len(rules()) == 5 * 3 + 1
    batch = torch.tensor([[0.02]]).log()
    for name, text in rules().items():
        upper, _, lower = name.partition(" over ")
        bounds = as_method(text).clip.bounds(batch)
        if upper in control.UPPER:
            assert bounds.upper.item() == pytest.approx(float(upper))
        if lower in control.LOWER:
            assert bounds.lower.item() == pytest.approx(float(lower))
    above, both = (as_method(rules()[name]).clip.bounds(batch) for name in ("Band over .8", "Band over Band"))
    assert torch.equal(above.upper, both.upper)
    assert both.lower < above.lower


def test_a_task_is_that_of_its_seed_and_neutral_tokens_are_right():
    together, alone = task_of(SMALL, [3, 4]), task_of(SMALL, [4])
    for both, one in zip(together, alone, strict=True):
        assert torch.equal(both[1], one[0])
    assert together.right[:, :, SMALL.decisive :].all()
    assert not together.right[:, :, 0].all()
    assert together.features.shape == (2, SMALL.prompts + HELD_OUT, 3, 7)


def test_held_out_prompts_are_not_trained_on(cell):
    trainer = Trainer(cell, "FixedClip(0.2)")
    for _ in range(20):
        prompts = trainer._draw(trainer._generators[0], 16)[0]
        assert prompts.min() >= HELD_OUT
        assert len(set(prompts.tolist())) == SMALL.prompts_per_batch


def test_an_update_is_that_of_torchs_adam_on_one_policy(cell):
    """A rate and a seed alone, by a linear layer, torch's optimizer and the loss of its own answers."""
    method = as_method(rules()["Band over .8"])
    trainer = Trainer(cell, method)
    batch = trainer._sample()
    rate, seed = 1, 2
    layer = trainer.task.start[seed].clone().requires_grad_()
    optimizer = torch.optim.Adam([layer], lr=cell.rates[rate], betas=(0.9, control.BETA2), eps=1e-8)
    for part in batch.order.chunk(cell.minibatches, 1):
        trainer._update(batch, part)
        of_seed = part[seed]
        tokens, logp_old = (values[rate, seed][of_seed] for values in (batch.tokens, batch.logp_old))
        logp = (
            (batch.features[0, seed][of_seed] @ layer).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        )
        loss = policy_loss(
            logp, logp_old, batch.advantages[rate, seed][of_seed], method=method, aggregation="token-mean"
        )
        optimizer.zero_grad()
        loss.loss.backward()
        optimizer.step()
    assert torch.allclose(trainer.weights[rate, seed], layer, atol=1e-5)
    assert not torch.allclose(trainer.weights[rate, seed], trainer.task.start[seed], atol=1e-2)


def test_a_run_does_not_depend_on_the_runs_beside_it(cell):
    def curves(seeds, rates):
        trainer = Trainer(replace(cell, rates=rates, lag=1, epochs=2, noise=0.3), rules()[CLIP], seeds)
        trainer.train()
        return {Key(*(row[name] for name in Key._fields)): row["curves"] for row in trainer.rows(CLIP)}

    together, alone = curves([0, 1, 2], (0.01, 0.03)), curves([1], (0.03,))
    assert len(together) == 6
    key = Key("x", CLIP, 0.03, 1)
    for name, values in alone[key].items():
        assert together[key][name] == pytest.approx(values, abs=2e-4), name
    assert together[key]["reward"] != together[Key("x", CLIP, 0.03, 2)]["reward"]
    assert len(together[key]["entropy"]) == 1
    assert len(together[key]["spread"]) == 3


def test_rewards_at_random_teach_nothing(cell):
    """If all rewards are noise, the reward on held-out prompts does not rise as it does with right answers."""
    gains = []
    for noise in (0.0, 1.0):
        trainer = Trainer(replace(cell, batches=40, rates=(0.03,), noise=noise), "GRPO()", range(24))
        trainer.train()
        rewards = torch.stack(trainer.curves["held out"], -1)[0]
        gains.append((rewards[:, -1] - rewards[:, 0]).mean().item())
    assert gains[0] > 0.05
    assert gains[0] > gains[1] + 0.05


def test_what_is_blocked_is_of_the_side_that_blocks(cell):
    sharp = replace(cell, batches=4, rates=(0.3,))
    blocked = {}
    for name, text in (("both", "FixedClip(0.1)"), ("none", "Unclipped()"), ("above", "FixedClip(1.0, 0.1)")):
        trainer = Trainer(sharp, text)
        trainer.train()
        rows = [*trainer.rows(name)]
        blocked[name] = [sum(row[f"blocked {side}"] for row in rows) for side in ("above", "below")]
    assert min(blocked["both"]) > 0
    assert blocked["none"] == [0, 0]
    assert blocked["above"][0] > 0 == blocked["above"][1]


def test_the_program_goes_on_where_its_file_ends(cell, monkeypatch, tmp_path):
    few = replace(cell, arms=(CLIP, "no bound"), seeds=range(2))
    monkeypatch.setattr(control, "CELLS", [few])
    file = tmp_path / "rows.jsonl"
    control.main([str(file)])
    first = file.read_text()
    assert len(first.splitlines()) == 2 * 2 * 2
    control.main([str(file)])
    assert file.read_text() == first
    kept = [line for line in first.splitlines() if json.loads(line)["arm"] == CLIP]
    file.write_text("\n".join(kept) + "\n")
    control.main([str(file)])
    again = [json.loads(line) | {"seconds": 0} for line in file.read_text().splitlines()]
    assert again == [json.loads(line) | {"seconds": 0} for line in first.splitlines()]


def test_each_prediction_has_its_cell_and_the_seeds_are_no_pilots():
    worlds = {f"{cell.name} at {rate:g}" for cell in CELLS for rate in cell.rates}
    worlds |= {f"{cell.name} at best" for cell in CELLS}
    for prediction in read_predictions(PREDICTIONS):
        assert prediction.world in worlds
        assert {prediction.arm, prediction.minus} <= set(rules())
        assert prediction.metric in ("entropy", "pass@32", "end", "AUC")
    pilots = {seed for cell in CELLS if cell.name.startswith("pilot") for seed in cell.seeds}
    others = [cell for cell in CELLS if not cell.name.startswith("pilot")]
    assert not pilots & {seed for cell in others for seed in cell.seeds}
    runs = sum(len(keys_of(cell, arm, seeds)) for cell in others for arm, seeds in parts_of(cell))
    assert f"All {runs:,} runs" in PREDICTIONS.read_text()
    assert all(0.0125 in cell.rates for cell in CELLS)
