"""Each setting without a value, as ``KEY=null`` and as ``~KEY``: a run is accepted, or refused with the setting's name.

A few settings are drawn at each change, by a seed that a variable of the environment may change, and all of them each
night.
"""

import os
import random
from functools import cache

import pytest

from helpers.frameworks import needs

needs("verl")

from omegaconf import OmegaConf

from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.rehearsal import preflight
from bandpo_lab.rehearsal.checks import demanded_metrics
from bandpo_lab.rehearsal.shrink import changes, compose, refuse

EXPERIMENT = ["+paper/model=qwen2.5-3b-instruct", "+paper/rule=band-kl", "+paper=recommended"]
DRAWN = 4
PARTS = 24
"""Of the settings, each of which a test of the night goes through."""
SEED = int(os.environ.get("BANDPO_SETTINGS_SEED") or 0)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # verl's


@cache
def words() -> tuple[str, ...]:
    """An override for each setting and each group of the recommended recipe, which leaves it without a value."""

    def keys(config, prefix: str = ""):
        for name in config:
            key = f"{prefix}{name}"
            yield key
            group = config._get_node(name)  # the value may be an interpolation, or missing
            if OmegaConf.is_dict(group) and not (
                group._is_none() or group._is_missing() or group._is_interpolation()
            ):
                yield from keys(group, f"{key}.")

    every = list(keys(compose(EXPERIMENT, SHIPPED, "ppo_trainer")))
    return tuple(form.format(key) for key in every for form in ("{}=null", "~{}"))


def refusal(word: str, folder) -> str | None:
    """Why a run with this override is refused before Ray starts, launched or rehearsed; None if it is not."""
    chosen = [*EXPERIMENT, word]
    try:
        config = compose(chosen, SHIPPED, "ppo_trainer")
        check = preflight.validate(config, chosen)
        if not check.ok:
            return check.detail
        with preflight.naming_unset([word]):
            refuse(config)
            for failed in preflight.check_reward(config):
                return failed.detail
            preflight.configured_loss(config)
            demanded_metrics(config)
            changes(config, folder, 2)
            preflight.launch_problems(config)
    except ValueError as error:
        return str(error)
    return None


def unnamed(some, folder) -> dict[str, str]:
    """What of these overrides ends in an error of another kind, or in one without the setting's name."""
    found = {}
    for word in some:
        key = word.removeprefix("~").removesuffix("=null")
        try:
            why = refusal(word, folder)
        except Exception as error:  # what is looked for
            found[word] = f"{type(error).__name__}: {error}"
        else:
            if why is not None and key not in why:
                found[word] = why
    return found


@pytest.mark.slow
def test_a_few_settings_without_a_value_are_accepted_or_named(tmp_path):
    some = random.Random(SEED).sample(words(), DRAWN)
    assert unnamed(some, tmp_path) == {}, f"BANDPO_SETTINGS_SEED={SEED}"


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_setting_without_a_value_is_accepted_or_named(part, tmp_path):
    assert len(words()) > 1000
    assert unnamed(words()[part::PARTS], tmp_path) == {}
