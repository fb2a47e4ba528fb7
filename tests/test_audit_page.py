"""The output of `bandpo audit --json` in the browser has sentences, tokens and tables, and obeys nothing."""

import ast
import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from bandpo.audit import Recorder
from bandpo.cli.app import app
from browser import PAGE, needs_browser, opened
from pages import ROOT

pytestmark = [pytest.mark.slow, needs_browser]
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e"


@pytest.fixture
def shown(tmp_path):
    """A function that opens the page's scripts and gives them a text."""
    page = (ROOT / "docs/audit.md").read_text()
    extension = ast.parse((ROOT / "docs/extensions/explorer.py").read_text())
    [scripts] = [
        ast.literal_eval(node.value)
        for node in extension.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "AUDIT_SCRIPTS"
    ]
    assert '<div id="audit-summary"></div>' in page
    for name in scripts:
        source = next(path for path in (PAGE / name, ROOT / "docs/explorer" / name) if path.is_file())
        shutil.copy(source, tmp_path)
    file = tmp_path / "page.html"
    loaded = "".join(f'<script src="{name}"></script>' for name in scripts)
    file.write_text(f'<meta charset="utf-8"><body><div id="audit-summary"></div>{loaded}')

    def show(text):
        quoted = json.dumps(text).replace("<", "\\u003c")
        return opened(file, tmp_path, f'document.getElementById("audit-summary").show({quoted});')

    return show


@pytest.fixture
def audited(tmp_path):
    """The output of the command about a record, in which a rule blocks a token."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "tokens"
    old = torch.tensor([[0.5, 0.05, 0.05]]).log().repeat(40, 1)
    new = old + torch.tensor([[1.0, 2.0, 1.0]]).log()
    with Recorder(folder, method="FixedClip(0.2)") as recorder:
        ids = torch.tensor([[0, 1, 2]]).repeat(40, 1)
        recorder.add(logp=new, logp_old=old, advantages=torch.ones(40), tokens=ids, step=1)
    model = tokenizers.models.WordLevel({"Yes": 0, "12": 1, HOSTILE: 2}, unk_token="Yes")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    return CliRunner().invoke(app, ["audit", str(folder), "--json"]).output


def test_the_page_shows_what_the_command_found(shown, audited):
    [found] = json.loads(audited).values()
    page = shown(audited)
    for line in found["lines"]:
        assert line in page.text
    assert "Yes 12 </script><img src=x onerror=alert(1)>\\u202e" in page.text
    assert "rare winners by kindtokensof the gradientthe run dropsclip 0.2 drops" in page.text
    assert "numbers4066.7 %100.0 %100.0 %" in page.text
    assert "gradient on winners dropped, p < 0.166.7 %66.7 %" in page.text
    cosine = found["methods"]["Band"]["gradient_cosine"]
    assert f"{cosine:.3g}" in page.text.partition("gradient's cosine with the run's")[2]
    assert "img" not in [tag for tag, _ in page.elements]


def test_of_few_tokens_the_page_shows_numbers_and_no_shares(shown, audited):
    [found] = json.loads(audited).values()
    found["tokens"] = []
    kind = {
        **found["kinds"][0],
        "kind": "words",
        "tokens": 3,
        "dropped_tokens": {"the run": 2},
        "dropped": {"the run": 0.9},
    }
    few = {
        **found["methods"]["the run"],
        "tokens": 5,
        "tokens_positive_below_0.1": 3,
        "tokens_positive_below_0.01": 0,
    }
    page = shown(
        json.dumps(
            {"run": {"lines": [], "tokens": [], "kinds": [kind], "methods": {"the run": few, "Band": few}}}
        )
    )
    assert "words3–2 of 3" in page.text
    assert "%" not in page.text


def test_the_page_shows_the_rules_of_a_log(shown):
    metrics = {"blocked_mass_below_0.1": 0.3, "if/Clip-Higher/blocked_mass_below_0.1": 0.25}
    page = shown(json.dumps({"run": {"lines": ["a sentence"], "methods": {"the run": metrics}}}))
    assert "a sentence" in page.text
    assert "the runClip-Higher" in page.text
    assert "p < 0.130.0 %25.0 %" in page.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "This is no JSON"),
        ("[1, 2]", "This is not the output of bandpo audit"),
        ('{"a": {"lines": 3, "methods": {}}}', "This is not the output of bandpo audit"),
        ("null", "This is not the output of bandpo audit"),
    ],
)
def test_another_file_is_refused(shown, text, message):
    assert message in shown(text).text


def test_a_damaged_summary_is_shown_as_far_as_it_goes(shown):
    run = {"lines": [HOSTILE, 3], "methods": {"x": None}, "kinds": [None, 3, {}], "tokens": [{"text": 7}]}
    page = shown(json.dumps({HOSTILE: run}))
    assert page.text.count("onerror=alert(1)>\\u{202e}") == 2
    assert "img" not in [tag for tag, _ in page.elements]
