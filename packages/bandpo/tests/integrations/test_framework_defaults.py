"""The defaults that `rlvet diff` fills in are those of the frameworks."""

import json

import pytest

from helpers.frameworks import needs

needs("trl")
needs("verl")

import framework_defaults


@pytest.mark.filterwarnings("ignore::UserWarning")  # verl warns of engines that are not installed
def test_the_table_has_the_defaults_of_the_installed_frameworks():
    stored = json.loads(framework_defaults.FILE.read_text())
    table = framework_defaults.table()
    if {name: entry["version"] for name, entry in table.items()} != {
        name: entry["version"] for name, entry in stored.items()
    }:
        pytest.skip("other versions are installed")
    assert table == stored, "run packages/bandpo/tests/integrations/framework_defaults.py"
