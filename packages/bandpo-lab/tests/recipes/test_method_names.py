"""Every name of a method that `bandpo-lab run verl` accepts gives a command that verl's configuration accepts."""

import random
import re
import shlex

import pytest
from typer.testing import CliRunner

from bandpo import ClipRule
from bandpo.core.methods import METHODS
from bandpo.core.text import PAPER_DCPO, PAPER_DIVERGENCES, _vocabulary, parse
from bandpo_lab.cli.app import app
from bandpo_lab.cli.names import VANILLA, recipe_names
from bandpo_lab.cli.recipes import SHIPPED
from helpers.frameworks import needs

RECIPES = recipe_names(SHIPPED, "rule")
OF_THE_AUTHORS = [
    *(f"{name}{end}" for name in PAPER_DIVERGENCES for end in ("", "005", "_relax", "005_relax")),
    PAPER_DCPO,
]
RULES = [
    name
    for name, value in _vocabulary(package_only=True).items()
    if isinstance(value, type) and issubclass(value, ClipRule)
]
INCOMPLETE = ("LogClip", "Loosest", "Tightest", "TwoSided")
"""Rules that need arguments."""
NAMES = [*RECIPES, VANILLA, *OF_THE_AUTHORS, *METHODS, *(name for name in RULES if name not in INCOMPLETE)]


def invoked(name, *overrides):
    words = ["run", "verl", "--model", "qwen2.5-3b-instruct", "--method", name, *overrides, "--dry-run"]
    return CliRunner().invoke(app, words)


def composed(printed):
    """Return verl's configuration from a printed command."""
    from bandpo_lab.rehearsal.shrink import compose

    words = shlex.split(printed)
    return compose(words[words.index("--config-dir") + 2 :], SHIPPED, "ppo_trainer")


def asked_to_set(config):
    """Return what verl's configuration is asked to set for the method; empty if it accepts it as it is."""
    from bandpo_lab.rehearsal.preflight import validate

    check = validate(config)
    if check.ok:
        return ""
    assert "actor_rollout_ref.actor.policy_loss.method: " in check.detail
    return check.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_verl_accepts_the_printed_command(name):
    """Some methods need the engine's log-probabilities, or a whole mini-batch: there verl says what to set."""
    needs("verl")
    found = invoked(name)
    assert found.exit_code == 0, found.exception
    detail = asked_to_set(composed(found.output))
    if name not in METHODS and name not in RULES:
        assert detail == ""
    elif detail:
        assert re.search(r"[Ss]et actor_rollout_ref|set algorithm\.rollout_correction", detail)


@pytest.mark.parametrize("name", INCOMPLETE)
def test_a_rule_without_its_arguments_is_refused(name):
    assert "missing 2 required positional arguments" in str(invoked(name).exception)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("band-")])
def test_a_radius_that_a_method_does_not_read_is_refused_with_a_spelling_that_works(name):
    plus = random.Random(name).choice(["", "+", "++"])
    found = invoked(name, f"{plus}recipe.radius=0.03")
    assert found.exit_code == 1
    message = str(found.exception)
    assert message.startswith(f"recipe.radius is not used by --method {name!r}")
    spelling = re.search(r"as in --method '(.*)'$", message)[1]
    assert "radius=0.03" in repr(parse(spelling))
    again = invoked(spelling)
    assert again.exit_code == 0
    assert f'policy_loss.method="{spelling}"' in again.output


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("band-")])
def test_the_radius_of_a_recipe_is_what_verl_gets(name):
    needs("verl")
    config = composed(invoked(name, "recipe.radius=0.03").output)
    assert "radius=0.03" in repr(parse(config.actor_rollout_ref.actor.policy_loss.method))
