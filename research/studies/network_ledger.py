"""Does the entropy ledger of the first batches say how entropy differs later, in the network of the paper's setting?

    PYTHONPATH=research python -m studies.network_ledger records.jsonl            # goes on with what is missing
    PYTHONPATH=research python -m studies.network_ledger records.jsonl --report report.md

A record is of the first batches of a run under clip 0.2 that has a row in `studies.paper_setting`, made again with its
seed. The ledgers of the other rules on its tokens are compared with the differences of the rows. The terms and the
predictions are in `network-ledger-predictions.md`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy import stats

from bandpo.audit.entropy_ledger import collision_of, entropy_changes
from bandpo.core.batch import Batch as TokenBatch
from bandpo.core.methods import Method
from bandpo.core.schedules import TrainingState
from bandpo.core.text import as_method
from bandpo_lab.files.writing import drop_unfinished_line, replacing
from bandpo_lab.output.tables import Table
from bandpo_lab.study.interval import Interval, signed
from bandpo_lab.toy.fast_loop import Batch, Training, UpdateResult
from rlvet.runs.files import read_jsonl
from studies.paper_setting import ARMS, CELLS, CLIP, SECOND_HALF, Cell, Key, Rows, settings_of

if TYPE_CHECKING:
    from torch import Tensor

SEEDS = range(300, 304)
"""The seeds of the records: of each cell the first four of the rows."""
EVERY = {"fresh": 8, "lag 4": 8, "4 x 4": 4}
"""The batches between two that are recorded."""
BATCHES = {"fresh": 40, "lag 4": 40, "4 x 4": 16}
"""The batches that a run is made again for."""
VOTE = {"Clip-Higher": 1, "clip [.8, 2]": 1, "no bound": -1, "BandPO": -1, "BandAbove": 1, "room by mass": 1}
"""The sign that the sides of a rule let expect: higher upper bounds keep entropy, and lower lower ones cost it."""
FIELDS = ("logp", "log ratio", "entropy", "collision", "advantage", "length")
"""What a record has of a token: log-probability, log-ratio and entropy of the policy in training, the second term of
the ledger, the advantage, and the length of its answer."""


class RecordingTraining(Training):
    """A run that records the tokens of each update of some batches.

    Args:
        cell: The cell of the paper's setting.
        key: The run.
    """

    def __init__(self, cell: Cell, key: Key):
        super().__init__(settings_of(cell, key), None)
        self.every = EVERY[cell.name]
        self.tokens: dict[str, list[Tensor]] = {name: [] for name in FIELDS}

    def update(self, batch: Batch, method: Method, state: TrainingState) -> UpdateResult:
        if (len(self.log) + 1) % self.every == 0:
            self._record(batch)
        return super().update(batch, method, state)

    @torch.no_grad()
    def _record(self, batch: Batch) -> None:
        """Add the tokens of a minibatch, before its update."""
        start = batch.prompts.shape[1] - 1
        logits = self.network.logits(torch.cat([batch.prompts, batch.tokens], 1))[:, start:-1]
        logp_all = logits.log_softmax(-1)
        logp = logp_all.gather(-1, batch.tokens[..., None])[..., 0]
        values = (
            logp,
            logp - batch.logp,
            -(logp_all.exp() * logp_all).sum(-1),
            collision_of(logp_all),
            batch.advantages[:, None].expand_as(logp),
            batch.mask.sum(1, keepdim=True).expand_as(logp),
        )
        for name, value in zip(FIELDS, values, strict=True):
            self.tokens[name].append(value[batch.mask > 0])

    def row(self, key: Key) -> dict[str, Any]:
        """Return the record as a row."""
        return {
            **key._asdict(),
            "curve": [round(line["entropy"], 3) for line in self.log],
            "tokens": {
                name: [float(f"{value:.4g}") for value in torch.cat(values).tolist()]
                for name, values in self.tokens.items()
            },
        }


def planned() -> Iterator[tuple[Cell, Key]]:
    """Yield the runs, with all cells and rates of a seed before the next seed."""
    for seed in SEEDS:
        for cell in CELLS:
            for rate in cell.rates:
                yield cell, Key(cell.name, CLIP, rate, seed)


def read_records(file: Path) -> dict[Key, Mapping[str, Any]]:
    """Return the records of a file by run."""
    return {Key(*(row[name] for name in Key._fields)): row for _, row in read_jsonl(file)}


# The report -----------------------------------------------------------------------------------------------------------


def ledger_of(record: Mapping[str, Any], arm: str, second: str) -> float:
    """Return the ledger of a rule minus that of clip 0.2 on the tokens of a record, weighted as in the run's loss.

    Args:
        record: The record.
        arm: A name in `ARMS`.
        second: The second term: ``exact``, its ``mean`` over the record, or ``none``.
    """
    columns = {name: torch.tensor(values)[None] for name, values in record["tokens"].items()}
    logp = columns["logp"]
    batch = TokenBatch.read(
        logp, logp - columns["log ratio"], columns["advantage"], entropy=columns["entropy"]
    )
    surprise = logp.exp() * (logp + columns["entropy"])
    collision = {"exact": columns["collision"], "mean": surprise.mean().item(), "none": None}[second]
    ours, theirs = (entropy_changes(batch, as_method(ARMS[name]), collision) for name in (arm, CLIP))
    weights = 1 / columns["length"]
    return float(((ours - theirs) * weights).sum() / weights.sum())


SECOND_TERMS = {"exact": "with the second term", "mean": "with its mean", "none": "without it"}
"""The ledgers by their second term."""


class Pair(NamedTuple):
    """A rule at one rate of one cell: its ledger on the records, and how its entropy differs from clip 0.2's."""

    cell: str
    rate: float
    arm: str
    ledgers: Mapping[str, float]
    """The mean over the records, by second term."""
    effect: Interval
    """In entropy at equal step, the mean over the second half of the batches."""

    @property
    def is_sure(self) -> bool:
        """True if the interval excludes 0."""
        return self.effect.low > 0 or self.effect.high < 0


class Study:
    """The records beside the rows of the paper's setting.

    Args:
        records: The records.
        rows: The rows of `studies.paper_setting`.
    """

    def __init__(self, records: Mapping[Key, Mapping[str, Any]], rows: Mapping[Any, Mapping[str, Any]]):
        self.records = records
        self.rows = rows

    @cached_property
    def pairs(self) -> list[Pair]:
        """All rules at all rates of all cells that have a record."""
        pairs: list[Pair] = []
        for cell in CELLS:
            rows = Rows(cell, self.rows)
            for rate in cell.rates:
                records = [
                    record for key, record in self.records.items() if key[:3] == (cell.name, CLIP, rate)
                ]
                for arm in ARMS if records else ():
                    effect = None if arm == CLIP else rows.difference(arm, CLIP, SECOND_HALF, rate)
                    if effect is None:
                        continue
                    ledgers = {
                        second: float(np.mean([ledger_of(record, arm, second) for record in records]))
                        for second in SECOND_TERMS
                    }
                    pairs.append(Pair(cell.name, rate, arm, ledgers, effect))
        return pairs

    def groups(self) -> dict[str, list[Pair]]:
        """Return the pairs of each cell, and all."""
        by_cell = {cell.name: [pair for pair in self.pairs if pair.cell == cell.name] for cell in CELLS}
        return {**by_cell, "all": self.pairs}

    def signs(self, pairs: Sequence[Pair]) -> dict[str, int]:
        """Return how many sure effects there are, and how many of their signs the vote and each ledger have."""
        sure = [pair for pair in pairs if pair.is_sure]
        found = {"sure": len(sure), "vote": sum(VOTE[pair.arm] * pair.effect.value > 0 for pair in sure)}
        for second in SECOND_TERMS:
            found[second] = sum(pair.ledgers[second] * pair.effect.value > 0 for pair in sure)
        return found

    def correlation(self, pairs: Sequence[Pair], second: str) -> float:
        """Return the rank correlation of a ledger with the effects, those that are not sure among them."""
        ledgers = [pair.ledgers[second] for pair in pairs]
        ranks = stats.rankdata(ledgers), stats.rankdata([pair.effect.value for pair in pairs])
        return float(np.corrcoef(*ranks)[0, 1])

    def signs_table(self) -> Table:
        """Return the signs and the rank correlations by cell."""
        cells: list[list[str]] = []
        for name, pairs in self.groups().items():
            signs = self.signs(pairs)
            texts = [name, str(len(pairs)), *(str(number) for number in signs.values())]
            cells.append([*texts, *(f"{self.correlation(pairs, second):+.2f}" for second in SECOND_TERMS)])
        header = ["data", "differences", "sure", "right: vote by rule"]
        header += [f"right: {text}" for text in SECOND_TERMS.values()]
        return Table([*header, *(f"rank correlation, {text}" for text in SECOND_TERMS.values())], cells)

    def pairs_table(self) -> Table:
        """Return the ledgers and the effects."""
        cells = [
            [
                f"{pair.cell} at {pair.rate:g}",
                pair.arm,
                *(f"{1000 * value:+.3f}" for value in pair.ledgers.values()),
                signed(pair.effect),
            ]
            for pair in self.pairs
        ]
        titles = [f"ledger {text}, thousandths" for text in SECOND_TERMS.values()]
        return Table(["data", "rule minus clip 0.2", *titles, SECOND_HALF], cells)

    def verdicts_table(self) -> Table:
        """Return the predictions with what was found."""
        signs = self.signs(self.pairs)
        reused = [pair for pair in self.pairs if pair.cell == "4 x 4" and pair.arm in ("BandPO", "no bound")]
        wrong = self.signs([pair for pair in reused if pair.effect.value > 0])
        correlation = self.correlation(self.pairs, "exact")
        statements = [
            ("1", f"{signs['exact']} of {signs['sure']}", 4 * signs["exact"] >= 3 * signs["sure"]),
            ("2", f"{signs['exact']} against {signs['vote']}", signs["exact"] > signs["vote"]),
            ("3", f"{correlation:+.2f}", correlation >= 0.3),
            ("4", f"{signs['mean']} against {signs['exact']}", abs(signs["mean"] - signs["exact"]) <= 2),
            ("5", f"{wrong['exact']} of {wrong['sure']}", 2 * wrong["exact"] >= wrong["sure"] > 0),
        ]
        cells = [[name, found, "held" if is_so else "failed"] for name, found, is_so in statements]
        return Table(["prediction", "found", "verdict"], cells)


def page(study: Study) -> str:
    """Return the report as Markdown."""
    lines = [
        "# The entropy ledger in a network",
        "",
        "Written by `make figures` from the records and from the rows of the paper's setting. The "
        "terms and the predictions are those of `research/studies/network-ledger-predictions.md`, committed before the "
        f"records. {len(study.records)} records of clip 0.2, of the first 40 of 320 batches, and of the first 16 of "
        "100 with reused data. The differences are of whole runs, of twelve seeds on fresh data and eight else; their "
        "intervals are of 95 %, not adjusted.",
        "",
        "## Predictions",
        "",
        study.verdicts_table().markdown(),
        "",
        "## Signs and order",
        "",
        "*Sure* differences are those whose interval excludes 0. They share seeds and the runs of clip 0.2, so their "
        "number is no sample size. The vote by rule says that at equal step higher upper bounds keep entropy, and that "
        "BandPO and no bound cost it.",
        "",
        study.signs_table().markdown(),
        "",
        "## Each difference",
        "",
        study.pairs_table().markdown(),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the records that a file does not have, or write the report."""
    parser = argparse.ArgumentParser(prog="python -m studies.network_ledger")
    parser.add_argument("records", type=Path, help="one line for each run; made if it is not there")
    parser.add_argument("--report", type=Path, help="only write the report to this file")
    parser.add_argument("--rows", type=Path, help="the rows of the paper's setting, for the report")
    options = parser.parse_args(arguments)
    if options.report:
        rows = {Key(*(row[name] for name in Key._fields)): row for _, row in read_jsonl(options.rows)}
        with replacing(options.report) as unfinished:
            unfinished.write_text(page(Study(read_records(options.records), rows)), encoding="utf-8")
        return
    torch.set_num_threads(1)
    options.records.touch()
    drop_unfinished_line(options.records)
    done = read_records(options.records).keys()
    with options.records.open("a", encoding="utf-8") as lines:
        for cell, key in planned():
            if key in done:
                continue
            training = RecordingTraining(cell, key)
            for _ in range(BATCHES[cell.name]):
                training.log.append(training.train_batch())
            lines.write(json.dumps(training.row(key)) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
