"""What TRL's trainers print after training."""

import logging

import pytest

from helpers.frameworks import needs

needs("trl")

from test_trl import make
from trl import GRPOConfig

from bandpo.audit.closing_lines import describe_rare_winners
from bandpo.integrations.trl import AuditedGRPOTrainer, BandGRPOConfig, BandGRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")


FLAT = {"temperature": 4.0, "max_completion_length": 24}
"""Settings of a policy most of whose tokens are rare."""


def closing(errors):
    """The lines at the end of what a trainer printed to stderr."""
    return [line for line in errors.splitlines() if " on your " in line or "bandpo: more: " in line]


def test_what_the_rule_did_is_said_once_after_training(tmp_path, capsys):
    settings = {"method": "Band(KL(), 1e-3)", "max_steps": 4, "logging_strategy": "steps", "logging_steps": 3}
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path, **FLAT, **settings)
    audits = []
    add = trainer._add_to_audit
    trainer._add_to_audit = lambda audit: (audits.append(audit), add(audit))
    trainer.train()
    assert len(audits) == 4
    whole = audits[0]
    for audit in audits[1:]:
        whole = whole + audit
    batch = "each batch served 4 updates"
    lines = describe_rare_winners(whole, trainer.method, "Band", batch)
    printed = capsys.readouterr().err
    more = "more: bandpo audit FOLDER, of a run with record='FOLDER'"
    assert printed.splitlines()[-3:] == [f"bandpo: {line}" for line in (*lines, more)]
    assert " would have dropped " in lines[0]
    assert printed.count(" on your ") == 1


def test_a_stock_trainer_says_it_of_its_clip_and_names_its_record(tmp_path, capsys):
    class Recorded(AuditedGRPOTrainer):
        record = str(tmp_path / "my tokens")

    make(Recorded, GRPOConfig, tmp_path, **FLAT, max_steps=2).train()
    first, more = closing(capsys.readouterr().err)
    assert "Clip-Higher would have dropped" in first
    assert "; clip 0.2 dropped " in first
    assert more == f"bandpo: more: bandpo audit '{tmp_path / 'my tokens'}'"


@pytest.mark.parametrize("silence", ["logging", "audit_steps"])
def test_nothing_is_said_if_it_is_not_wanted(silence, tmp_path, capsys):
    settings = {"audit_steps": 0} if silence == "audit_steps" else {}
    logger = logging.getLogger("bandpo")
    level = logger.level
    if silence == "logging":
        logger.setLevel(logging.ERROR)
    make(BandGRPOTrainer, BandGRPOConfig, tmp_path, **FLAT, max_steps=2, **settings).train()
    logger.setLevel(level)
    assert closing(capsys.readouterr().err) == []


def test_a_run_that_goes_on_says_it_of_its_own_steps(tmp_path, capsys):
    settings = FLAT | {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    settings |= {"logging_strategy": "steps", "logging_steps": 1}
    make(BandGRPOTrainer, BandGRPOConfig, tmp_path, **settings).train()
    first, more = closing(capsys.readouterr().err)
    assert more == f"bandpo: more: bandpo audit {tmp_path}"
    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path, **settings | {"max_steps": 4})
    trainer.train(resume_from_checkpoint=True)
    second, more = closing(capsys.readouterr().err)
    said = [line.partition(" on your ")[2].partition(" rare")[0] for line in (first, second)]
    counts = [int(number.replace(",", "")) for number in said]
    updates = [row for row in trainer.state.log_history if "audit/tokens" in row]
    logged = [row["audit/tokens_positive_below_0.1"] for row in updates]
    assert counts == [sum(logged[:2]), sum(logged[2:])]
