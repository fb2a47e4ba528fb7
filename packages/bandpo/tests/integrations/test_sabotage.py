"""The table of sabotages: what the certificates stop, by which sentence, and what they pass.

A row is a change of a loss that is handed to `bandpo.testing.assert_is` or `bandpo.certify`, of a trainer's loss, or of
what surrounds it. Rows of a framework that is not installed are skipped.
"""

import importlib
import re

import pytest

SUBJECTS = ("plain", "trl", "trl_async", "verl", "skyrl")


def rows():
    """Yield the rows of all subjects."""
    for subject in SUBJECTS:
        try:
            module = importlib.import_module(f"integrations.sabotages.{subject}")
        except pytest.skip.Exception as reason:
            yield pytest.param(None, marks=pytest.mark.skip(reason=str(reason)), id=subject)
            continue
        for name, row in module.ROWS.items():
            marks = pytest.mark.slow if row.slow else ()
            yield pytest.param(row, marks=marks, id=f"{subject}: {name}")


@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
@pytest.mark.parametrize("row", [*rows()])
def test_a_sabotage_is_stopped_by_its_sentence(row, tmp_path, monkeypatch):
    if row.sentence is None:
        row.certify(tmp_path, monkeypatch)
        return
    with pytest.raises(row.error) as caught:
        row.certify(tmp_path, monkeypatch)
    said = str(caught.value)
    assert re.search(row.sentence, said), said
