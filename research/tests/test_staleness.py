"""The study of stale data: its loop against transformers and by hand, its terms, and its page on made-up runs."""

import json
import re
from collections import Counter

import pytest
import torch

from helpers.frameworks import needs

needs("trl")
from transformers import AutoModelForCausalLM

from bandpo import FixedClip, Method
from bandpo_lab.tasks.multiplication import base_model_path, problems, tokenizer
from pages import ROOT
from reports import check_same_report
from studies import staleness, staleness_report
from studies.base_model import WarmUp, warm_up
from studies.rewards import OPENERS
from studies.staleness import CELLS, RANDOM, Cell, Drawn, Run, draw, forward, push, runs, train
from studies.staleness_report import PREDICTIONS, World, broken, entropy_when_learned, page, read_predictions


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(base_model_path())


@pytest.fixture(scope="module")
def drawn(model):
    prompts = torch.tensor([tokenizer()(p.prompt).input_ids for p in problems("eval", 4)])
    chances = torch.rand(64, 40, generator=torch.Generator().manual_seed(3))
    return prompts, *draw(model, prompts, chances)


@torch.no_grad()
def test_samples_and_their_probabilities_are_the_model_s(model, drawn):
    prompts, tokens, mask, logp, entropy = drawn
    text = torch.cat([prompts.repeat_interleave(16, 0), tokens], 1)
    every = model(text).logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1)
    assert torch.equal(forward(model, text)[:, prompts.shape[1] - 1 : -1].log_softmax(-1), every)
    seen = every.gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(logp * mask, seen * mask, atol=2e-5, rtol=0)
    spread = -(every.exp() * every).sum(-1)
    assert float(entropy) == pytest.approx(float((spread * mask).sum() / mask.sum()), abs=1e-5)
    ends = (tokens == model.config.eos_token_id).int().argmax(1)  # each ends with its first end token
    finished = mask.sum(1) < mask.shape[1]
    assert torch.equal(mask.sum(1)[finished], ends[finished] + 1.0)
    chosen = torch.tensor([row[0] for row in tokens])
    assert len(chosen.unique()) > 1


def test_the_gradient_is_that_of_the_whole_minibatch_and_dropped_winners_give_none(model, drawn):
    prompts, tokens, mask, logp, _ = drawn
    advantages = torch.linspace(-1, 1, 64)
    batch = Drawn(prompts.repeat_interleave(16, 0), tokens, mask, logp, advantages)
    seen = forward(model, torch.cat([batch.prompts, tokens], 1))[:, prompts.shape[1] - 1 : -1].log_softmax(-1)
    seen = seen.gather(-1, tokens[..., None])[..., 0]
    for dropped, kept in (
        (0.0, torch.ones_like(mask)),
        (1.0, 1.0 * ~((logp.exp() < 0.1) & (advantages[:, None] > 0))),
    ):
        each = -(seen - logp).exp() * advantages[:, None] * kept * mask
        model.zero_grad()
        (each.sum(1) / mask.sum(1)).mean().backward(retain_graph=True)
        expected = model.lm_head.weight.grad.clone()
        model.zero_grad()
        push(model, batch, Method(FixedClip(0.2)), dropped, torch.Generator())
        torch.testing.assert_close(model.lm_head.weight.grad, expected, atol=1e-6, rtol=1e-4)


def test_a_run_is_the_same_twice_and_trains_only_on_what_is_old_enough():
    cell = Cell("small", 2, 1, 2, [1e-3], ["clip 0.2", RANDOM], batches=4, seeds=[20])
    first, again = (train(cell, Run("small", "clip 0.2", 1e-3, 20), base_model_path(), []) for _ in range(2))
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert (len(first["reward"]), len(first["blocked"])) == (4, 2)
    fresh = train(cell, Run("small", "no upper bound", 1e-9, 20), base_model_path(), [])
    assert fresh["reward"][:3] == first["reward"][:3]  # before the third batch nothing is trained
    assert fresh["entropy"][3] != first["entropy"][3]


def test_a_cut_file_is_gone_on_with(tmp_path, monkeypatch, capsys):
    cells = [Cell("small", 0, 1, 1, [1e-3], ["clip 0.2", RANDOM], batches=1, seeds=[20, 21])]
    for name, value in {"CELLS": cells, "HELD_OUT": 1}.items():
        monkeypatch.setattr(staleness, name, value)
    monkeypatch.setattr(staleness, "train", lambda cell, run, base, yoke: {**run._asdict(), "blocked": [0.5]})
    file, arguments = tmp_path / "runs.jsonl", ["--bases", str(tmp_path)]
    staleness.main([str(file), *arguments])
    whole = file.read_text()
    file.write_text(whole[:-20])
    staleness.main([str(file), *arguments])
    assert file.read_text() == whole
    staleness.main([str(file), *arguments, "--count"])
    assert "small: 4 of 4 runs" in capsys.readouterr().out


@pytest.mark.exhaustive  # trains a model of a study that has ended
def test_other_openers_are_as_rare_as_the_scratchpad():
    model = warm_up(WarmUp(tail=0.02, steps=60, wrong=True), progress=False)
    ids = tokenizer().get_vocab()
    asked = torch.tensor([tokenizer()(p.prompt).input_ids for p in problems("eval", 8)])
    with torch.no_grad():
        first = model(asked).logits[:, -1].softmax(-1).mean(0)
    assert all(0.004 < first[ids[opener]] < 0.1 for opener in OPENERS)


# The page -------------------------------------------------------------------------------------------------------------


def made(cell, seeds):
    """Rows in which an arm's place in its cell is worth 0.1, the second rate 0.1, and model b 0.3."""
    return {
        run: {
            "reward": [
                0.1 * cell.arms.index(run.arm) + 0.1 * (run.rate == cell.rates[1]) + 0.3 * (run.seed % 2)
            ]
            * 12,
            "entropy": [0.5] * 12,
            "blocked": [None, 0.4],
            "end": 0.5,
            "pass@32": 1.0,
        }
        for _, run in runs([cell])
        if run.seed in seeds
    }


def test_predictions_are_about_arms_that_run():
    predictions = read_predictions(PREDICTIONS)
    arms = {cell.name: cell.arms for cell in CELLS}
    assert len(predictions) == 32
    assert all({p.arm, p.minus} <= {*arms[p.world.split(", model")[0]]} for p in predictions)


def test_the_page_judges_whole_seeds_and_says_that_it_is_early():
    rows = made(CELLS[0], range(20, 25))
    lost = next(run for run in rows if run.seed == 24)
    whole = World(CELLS[0], "", {run: row for run, row in rows.items() if run != lost})
    assert whole.seeds == [20, 21, 22, 23]
    gap = whole.difference("BandAbove", "clip 0.2")
    assert gap == pytest.approx((0.4, 0.4, 0.4))
    assert whole.curve("clip 0.2").scores.mean(1) == pytest.approx([0.15, 0.25, 0.15, 0.15])
    assert [gap.value for gap in whole.at_one_rate("BandAbove", "clip 0.2")] == pytest.approx([0.4] * 4)
    table, *_ = page(rows).sections[0].content
    held = "lag 4|AUC: BandAbove minus clip 0.2|greater|+0.400 [+0.400, +0.400]|5 of 12|held"
    assert "|".join(table.rows[0]) == held
    assert ["lag 8", "AUC: BandAbove minus clip 0.2", "greater", "–", "0", "not yet"] in table.rows
    assert "All verdicts are provisional" in page(rows).lead[1]
    [early] = [part for part in page(made(CELLS[0], [20])).sections if part.title == "lag 4"]
    assert "seeds: 1." in early.content[0].caption  # and nothing is compared


def test_what_is_read_from_a_run():
    row = {"reward": [0.1] * 10 + [0.9] * 12 + [0.2] * 10, "entropy": [*range(32)]}
    assert broken(row)
    assert not broken({"reward": row["reward"][:22]})
    assert entropy_when_learned(row) == 12
    assert entropy_when_learned({"reward": [0.1] * 3, "entropy": [1, 2, 3]}) == 3


def test_the_report_is_written_where_it_is_asked_for(tmp_path):
    lines = [json.dumps({**run._asdict(), **row}) for run, row in made(CELLS[0], range(20, 24)).items()]
    (tmp_path / "runs.jsonl").write_text("\n".join(lines) + "\n")
    staleness_report.main([str(tmp_path / "runs.jsonl"), str(tmp_path / "report.md")])
    assert "| BandAbove | 0.650 | +0.400 [+0.400, +0.400] |" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_the_committed_report_is_of_the_committed_runs_and_docs_quote_it(tmp_path):
    report = (ROOT / "research/reports/staleness/report.md").read_text()
    runs = ROOT / "research/results/staleness/runs.jsonl.gz"
    staleness_report.main([str(runs), str(tmp_path / "report.md")])
    check_same_report(report, (tmp_path / "report.md").read_text())

    def first_table(section):
        lines = section.partition("\n| ")[2].partition("\n\n")[0].splitlines()
        return {arm: cells for arm, *cells in (line.strip("| ").split(" | ") for line in lines)}

    when = (ROOT / "research/reports/rules-compared.md").read_text()
    prose = " ".join(when.split())
    counts = Counter(re.findall(r"\| (held|failed|undecided) \|$", report, re.M))
    assert "Of the 32 predictions {held} held, {failed} failed and {undecided} are".format(**counts) in prose
    old = re.findall(r"^\| (?:lag [^0]|long).* \| (\S+) \| 0.[5-9]. \| (\S+) \[.*\|$", report, re.M)
    gains = [float(gain) for rate, gain in old if float(rate) < 5e-4]  # where most runs break
    assert f"in {sum(gain >= 0.07 for gain in gains)} of {len(gains)} places" in prose
    breaks = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", report, re.M)
    clip, wide, above, none, runs_of_each = (sum(map(int, column)) for column in zip(*breaks, strict=True))
    assert (
        f"by half in {wide} of {runs_of_each} runs, against {above} under BandAbove, {none} without an upper bound "
        f"(predicted: most there) and {clip} under clip 0.2"
    ) in prose
    fresh = first_table(report.split("\n## lag 0, 400 batches\n")[1])
    for arm, name in (("Band", "Band"), ("relaxed Band", "relaxed Band"), ("BandAbove", "BandAbove")):
        assert f"{name} {fresh[arm][1]}" in prose
    assert f"clip 0.2's AUC of {fresh['clip 0.2'][0]}" in prose
    quoted = first_table(when.split("by the age of the data:\n")[1])
    in_report = {world: first_table(report.split(f"\n## {world}\n")[1]) for world in quoted["rule"]}
    for arm, cells in [*quoted.items()][2:]:
        for cell, (world, found) in zip(cells, in_report.items(), strict=True):
            texts = found.get(arm, ["–"] * 2)  # the AUC; the gain, and behind it its interval
            assert cell == texts[arm != "clip 0.2"].partition(" ")[0], (arm, world)
    at_lag_4 = in_report["lag 4"]
    assert (
        f"mean reward is {at_lag_4['clip 0.2'][0]} under clip 0.2 and {at_lag_4['BandAbove'][0]} under BandAbove"
    ) in prose
