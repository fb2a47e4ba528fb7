"""What the rules of `rlvet lint` say of TRL, against TRL's own code."""

import ast
from dataclasses import fields

import pytest

from helpers.frameworks import needs

needs("trl")
import torch
from trl import GRPOConfig

from bandpo.integrations.trl import BandGRPOConfig
from rlvet.lint import lint_findings, lint_run
from rlvet.lint.known.trl import TRL
from rlvet.lint.readers import parse_configurations


def errors_of(arguments):
    """Return the identifiers of errors that the rules find in a script with these arguments."""
    script = f"from trl import GRPOConfig\nGRPOConfig('out', {arguments})\n"
    (configuration,) = parse_configurations(script.encode(), "train.py")
    return [finding.id for finding in lint_findings(configuration) if finding.severity == "fix"]


@pytest.mark.parametrize(
    ("arguments", "rules"),
    [
        ("num_generations=1", ["group-of-one"]),
        ("num_generations=2", []),
        ("num_generations=8", []),
        ("num_generations=8, generation_batch_size=24", []),
        ("num_generations=6, generation_batch_size=16", ["batch-does-not-divide"]),
        ("num_generations=8, generation_batch_size=16, steps_per_generation=2", ["batch-set-twice"]),
        ("num_generations=8, steps_per_generation=2", []),
    ],
)
def test_grpo_config_refuses_what_is_called_an_error_and_nothing_else(arguments, rules, tmp_path):
    call = ast.parse(f"f({arguments})", mode="eval").body
    keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert errors_of(arguments) == rules
    if rules:
        with pytest.raises(ValueError, match=r"num_generations|generation_batch_size|at least 2"):
            GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **keywords)
    else:
        config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **keywords)
        # What transformers saves beside a model has the settings that GRPOConfig has filled in.
        torch.save(config, tmp_path / "training_args.bin")
        assert [finding.id for finding in lint_run(tmp_path) if finding.severity == "fix"] == []


@pytest.mark.parametrize(
    ("arguments", "one_update"),
    [
        ("gradient_accumulation_steps=4", True),
        ("gradient_accumulation_steps=4, steps_per_generation=2", True),
        ("gradient_accumulation_steps=4, steps_per_generation=8", False),
        ("gradient_accumulation_steps=4, num_iterations=2", False),
    ],
)
def test_the_clip_is_called_idle_where_trl_takes_no_old_probabilities(arguments, one_update, tmp_path):
    script = f"from trl import GRPOConfig\nGRPOConfig('out', epsilon=0.1, {arguments})\n"
    (configuration,) = parse_configurations(script.encode(), "train.py")
    assert ("clip-cannot-act" in [finding.id for finding in lint_findings(configuration)]) == one_update
    call = ast.parse(f"f({arguments})", mode="eval").body
    keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **keywords)
    # The condition of GRPOTrainer._generate_and_score_completions under which old probabilities are computed.
    generate_every = config.steps_per_generation * config.num_iterations
    assert (config.gradient_accumulation_steps % generate_every == 0) == one_update


def test_lint_knows_the_settings_that_the_adapter_adds():
    added = {field.name for field in fields(BandGRPOConfig)} - {field.name for field in fields(GRPOConfig)}
    assert added == TRL.added
