"""Each cell of a table on the site has the name of its column, which a phone shows."""

import importlib.util
import re

from pages import ROOT


def hook():
    spec = importlib.util.spec_from_file_location("table_cards", ROOT / "docs/extensions/table_cards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = """<p>before</p><table>
<thead>
<tr>
<th></th>
<th style="text-align: right;">a <code>"b"</code> &amp; c</th>
</tr>
</thead>
<tbody>
<tr>
<td>x</td>
<td style="text-align: right;">1</td>
</tr>
<tr>
<td>y</td>
<td style="text-align: right;"></td>
</tr>
</tbody>
</table><table><tr><td>no header</td></tr></table>"""


def test_cells_have_the_names_of_their_columns_and_nothing_else_changes():
    labelled = hook().on_page_content(PAGE, None, None, None)
    assert re.findall(r'data-label="(.*?)"', labelled) == ["", "a &quot;b&quot; &amp; c"] * 2
    assert re.sub(r' data-label=".*?"', "", labelled) == PAGE
    assert "<td>no header</td>" in labelled


def test_the_style_sheet_uses_the_names():
    assert "content: attr(data-label)" in (ROOT / "docs/extra.css").read_text()
    assert "docs/extensions/table_cards.py" in (ROOT / "mkdocs.yml").read_text()
