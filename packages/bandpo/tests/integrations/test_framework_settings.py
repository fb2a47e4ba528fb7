"""The lists of settings that adapters refuse: each entry works, and is on the page of its framework."""

import pytest
from integrations.refused_settings import mark_of, page_of, table

from bandpo.core.text import as_method
from bandpo.integrations import check_settings
from bandpo.integrations._settings import REFUSED

ENTRIES = [(framework, entry) for framework, refused in REFUSED.items() for entry in refused.settings]
NAMED = [pytest.param(*pair, id=f"{pair[0]}-{pair[1].name}") for pair in ENTRIES]
WHOLE, RULE = as_method("DAPO()"), as_method("Band(KL(), 0.05)")


def wrong_values(entry):
    """Return values that an entry refuses."""
    if entry.refused:
        return entry.refused
    allowed = entry.allowed[0]
    if isinstance(allowed, bool):
        return (not allowed,)
    if isinstance(allowed, int | float):
        return (allowed + 0.5,)
    return ("another",)


def set_to(framework, changed, value):
    """Return settings of a framework that are all allowed, except for one."""
    settings = {}
    for entry in REFUSED[framework].settings:
        chosen = value if entry is changed else (entry.allowed or (None,))[0]
        *levels, last = entry.name.replace("-", "_").split(".")
        level = settings
        for name in levels:
            level = level.setdefault(name, {})
        level[last] = chosen
    return settings


@pytest.mark.parametrize(("framework", "entry"), NAMED)
def test_an_entry_names_values_of_one_kind_a_reason_and_a_fix(framework, entry):
    assert bool(entry.refused) != bool(entry.allowed)
    assert entry.fix[0].islower()
    assert not entry.reason.endswith(".")
    assert not entry.fix.endswith(".")


@pytest.mark.parametrize(("framework", "entry"), NAMED)
def test_a_wrong_value_is_refused_by_an_error_that_names_setting_value_and_fix(framework, entry):
    for value in wrong_values(entry):
        with pytest.raises(ValueError, match=r"=") as error:
            check_settings(framework, set_to(framework, entry, value), WHOLE)
        name = REFUSED[framework].prefix + entry.name
        assert str(error.value) == f"{name}={value}: {entry.reason}; {entry.fix}"


@pytest.mark.parametrize("method", [WHOLE, RULE], ids=["whole", "rule"])
@pytest.mark.parametrize("framework", REFUSED)
def test_right_values_pass(framework, method):
    check_settings(framework, set_to(framework, None, None), method)


def test_what_stands_beside_a_rule_alone_is_refused_beside_a_whole_method_only():
    check_settings("AReaL", {"importance_sampling_level": "token", "c_clip": 3.0}, RULE)
    with pytest.raises(ValueError, match=r"^actor\.c_clip=3\.0: "):
        check_settings("AReaL", {"importance_sampling_level": "token", "c_clip": 3.0}, WHOLE)


def test_all_wrong_settings_are_named_at_once():
    with pytest.raises(ValueError, match="use_cispo=True") as error:
        check_settings("NeMo-RL", {"use_cispo": True, "ratio_clip_max": 0.28}, WHOLE)
    assert str(error.value).count("; also ") == 1


@pytest.mark.parametrize("framework", REFUSED)
def test_a_page_has_the_list(framework):
    page, mark = page_of(framework), mark_of(framework)
    lines = [f"<!-- {mark}: begin -->", *table(framework), f"<!-- {mark}: end -->"]
    assert "\n".join(lines) in page.read_text(), "run packages/bandpo/tests/integrations/refused_settings.py"
