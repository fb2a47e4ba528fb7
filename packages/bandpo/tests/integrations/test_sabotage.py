"""The table of sabotages: what the certificates stop, by which sentence, and what they pass.

A row is a change of a loss that is handed to `bandpo.testing.assert_is` or `bandpo.certify`, of a trainer's loss, or of
what surrounds it. The certificate names what it does not compare, and the checks of the run find some of that. Rows of
a framework that is not installed are skipped.
"""

import importlib
import re
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "sabotages"
SUBJECTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "table")


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
def test_a_sabotage_is_stopped_by_its_sentence_or_named_as_not_compared(row, tmp_path, monkeypatch):
    if row.sentence is None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            said = row.certify(tmp_path, monkeypatch)
        if row.unseen:
            assert re.search(f"not compared: .*{row.unseen}", said), said
        if row.warning:
            assert any(re.search(row.warning, str(one.message)) for one in caught)
        return
    with pytest.raises(row.error) as stopped:
        row.certify(tmp_path, monkeypatch)
    said = str(stopped.value)
    assert re.search(row.sentence, said), said
