"""Every name of a method that `bandpo-lab run verl` accepts gives a command that verl's configuration accepts."""

import random
import re
import shlex
import shutil

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
OF_THE_ENGINE = ("DPPO", "IcePop", "CPPO", "PrimeRL", "IPO", "TRM")
"""Methods whose ratio refers to the log-probabilities of the rollout engine."""
OF_A_MINI_BATCH = ("BAPO", "M2PO", "KLCov", "ClipCov", "BalancedBounds", "SecondMoment")
"""Methods and rules with sums over a whole mini-batch."""
BYPASS = (
    "algorithm.rollout_correction.bypass_mode=true",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
)
ONE_MICRO_BATCH = (
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=128",
)
"""With the recipes, 64 prompts × 16 responses on 8 GPUs."""
NAMES = [*RECIPES, VANILLA, *OF_THE_AUTHORS, *METHODS, *(name for name in RULES if name not in INCOMPLETE)]


def invoked(name, *overrides):
    words = ["run", "verl", "--model", "qwen2.5-3b-instruct", "--method", name, *overrides, "--dry-run"]
    return CliRunner().invoke(app, words)


def composed(printed):
    """Return verl's configuration from a printed command."""
    from bandpo_lab.rehearsal.shrink import compose

    words = shlex.split(printed)
    return compose(words[words.index("--config-dir") + 2 :], SHIPPED, "ppo_trainer")


def refusal(config):
    """Return what verl says against a configuration; empty if it accepts it."""
    from bandpo_lab.rehearsal.preflight import validate

    check = validate(config)
    return "" if check.ok else check.detail


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["recommended", "authors"])
@pytest.mark.parametrize("name", NAMES)
def test_verl_accepts_the_printed_command(name, settings):
    needs("verl")
    found = invoked(name, "--settings", settings)
    if name in OF_THE_ENGINE or name in OF_A_MINI_BATCH:
        assert found.exit_code == 1
        assert "policy_loss" not in found.output
        return
    assert found.exit_code == 0, found.exception
    assert refusal(composed(found.output)) == ""


@pytest.mark.parametrize(
    "text", [*OF_THE_ENGINE, *OF_A_MINI_BATCH, "DPPO(radius=0.1)", "M2PO(0.1)", "BAPO(0.4)"]
)
def test_a_method_that_the_recipes_cannot_train_is_refused_with_one_that_works(text):
    message = str(invoked(text).exception)
    assert message.startswith(f"--method {text!r}: it")
    spelling = re.search(r"--method (?:'([^']*)'|\"(.*)\")", message.removeprefix(f"--method {text!r}"))
    if text not in ("BalancedBounds", "SecondMoment") or spelling:
        again = invoked(spelling[1] or spelling[2])
        assert again.exit_code == 0, again.exception


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_THE_ENGINE, *OF_A_MINI_BATCH])
def test_the_settings_of_the_refusal_are_those_with_which_verl_accepts_the_method(name):
    needs("verl")
    settings = BYPASS if name in OF_THE_ENGINE else ONE_MICRO_BATCH
    message = str(invoked(name).exception)
    assert all(setting.removesuffix("128") in message for setting in settings)
    found = invoked(name, *settings)
    assert found.exit_code == 0, found.exception
    assert refusal(composed(found.output)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THE_ENGINE)
def test_an_asynchronous_trainer_has_the_ratio_to_the_engine(name):
    needs("verl")
    found = invoked(name, "--mode", "colocate_async")
    assert found.exit_code == 0, found.exception
    assert refusal(composed(found.output)) == ""


def test_an_override_that_turns_the_setting_off_does_not_help():
    assert invoked("DPPO", "algorithm.rollout_correction.bypass_mode=false").exit_code == 1


@pytest.mark.parametrize(
    ("name", "line", "own"),
    [
        ("DPPO", "bypass_mode: false", "bypass_mode: true"),
        ("M2PO", "use_dynamic_bsz: true", "use_dynamic_bsz: false\n    ppo_micro_batch_size_per_gpu: 128"),
    ],
)
def test_the_settings_of_ones_own_recipes_are_left_to_verl(name, line, own, tmp_path):
    recipes = tmp_path / "recipes"
    shutil.copytree(SHIPPED, recipes)
    assert invoked(name, "--config-dir", str(recipes)).exit_code == 1
    settings = recipes / "paper/recommended.yaml"
    settings.write_text(settings.read_text().replace(line, own))
    assert invoked(name, "--config-dir", str(recipes)).exit_code == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Band(KL(), Linear(0.05, 0.01))", "depends on progress"),
        ("FixedClip(0.2, 28)", "at no probability"),
        ("Band(KL(), 5)", "at no probability"),
    ],
)
def test_what_verl_can_never_train_is_refused_without_verl(text, reason):
    message = str(invoked(text).exception)
    assert message.startswith("--method: ")
    assert reason in message


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


@pytest.mark.parametrize("name", ["bandkl5", "bandkl05", "bandtv0005", "bandkl05_relax", "bndkl005"])
def test_digits_that_are_no_radius_are_refused_with_how_a_radius_is_written(name):
    message = str(invoked(name).exception)
    digits, call = re.search(r"as in (\w+), which is (\S+)$", message).groups()
    assert parse(digits) == parse(call)
