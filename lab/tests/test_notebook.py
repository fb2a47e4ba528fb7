"""The notebook that ships: it runs, its outputs are of the kinds that it shows, and the site's page is made of it."""

import pytest

from pages import ROOT

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("matplotlib")
NOTEBOOK = ROOT / "docs/notebooks/invent.ipynb"


def kinds(cell):
    """Of a cell's outputs: streams by name, results by what they may be shown as."""
    return [[out.get("name"), *sorted(out.get("data", ()))] for out in cell.get("outputs", ())]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Jupyter's own
def test_the_notebook_runs_and_shows_what_it_did_when_it_was_written(tmp_path):
    from nbclient import NotebookClient

    shipped, run = (nbformat.read(NOTEBOOK, 4) for _ in range(2))
    NotebookClient(run, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [*map(kinds, run.cells)] == [*map(kinds, shipped.cells)]
    [found] = [cell.outputs[0] for cell in run.cells if "bandpo.compare" in cell.source and cell.outputs]
    assert "BandAbove() gains" in found["data"]["text/plain"].partition("4 batches old")[2]


def test_the_page_is_the_notebook():
    """`jupyter nbconvert --to markdown` made it."""
    page = NOTEBOOK.with_suffix(".md").read_text()
    cells = nbformat.read(NOTEBOOK, 4).cells
    assert [cell.source for cell in cells if cell.source not in page] == []
    shown = [out["data"]["text/html"] for cell in cells for out in cell.get("outputs", ()) if "data" in out]
    assert len(shown) == 4
    assert [html for html in shown if html not in page] == []
