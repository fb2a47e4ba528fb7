"""The notebook that ships runs, and its outputs are of the kinds that it shows."""

import pytest

from pages import ROOT

nbformat = pytest.importorskip("nbformat")
NOTEBOOK = ROOT / "docs/notebooks/invent.ipynb"


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # those of Jupyter's own
def test_the_notebook_runs_and_shows_what_it_did(tmp_path):
    from nbclient import NotebookClient

    shipped, run = (nbformat.read(NOTEBOOK, 4).cells for _ in range(2))
    whole = nbformat.v4.new_notebook(cells=run)
    NotebookClient(whole, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = (
        [[{*out.get("data", ())} for out in c.get("outputs", ())] for c in cells] for cells in (run, shipped)
    )
    assert next(kinds) == next(kinds)
