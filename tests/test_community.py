"""The files for people: forms for issues, and the citation."""

import re

import pytest
import yaml

from pages import ROOT

FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
KEYS = {
    "markdown": {"value"},
    "input": {"label", "description", "placeholder", "value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "dropdown": {"label", "description", "options", "multiple", "default"},
    "checkboxes": {"label", "description", "options"},
}
"""The attributes that GitHub accepts for each type of element of a form."""


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_accepts(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form.keys() == {"name", "description", "labels", "body"}
    elements = [element for element in form["body"] if element["type"] != "markdown"]
    for element in form["body"]:
        assert element["attributes"].keys() <= KEYS[element["type"]]
        assert element.keys() <= {"type", "id", "attributes", "validations"}
    for name in ("id", "label"):
        values = [element.get(name) or element["attributes"].get(name) for element in elements]
        assert None not in values
        assert len(set(values)) == len(values)
    for element in elements:
        assert re.fullmatch(r"[\w-]+", element["id"])
        options = element["attributes"].get("options")
        if element["type"] == "dropdown":
            assert len(set(options)) == len(options) > 1
        if element["type"] == "checkboxes":
            assert all(option.keys() <= {"label", "required"} for option in options)
    assert any(element.get("validations", {}).get("required") for element in elements)


def test_the_names_of_forms_differ():
    names = [yaml.safe_load(path.read_text(encoding="utf-8"))["name"] for path in FORMS]
    assert len(set(names)) == len(names) == 3


def test_the_citation_names_the_paper_as_its_page_does():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    [paper] = citation["references"]
    page = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    assert f"{{{paper['title']}}}" in page
    authors = " and ".join(
        f"{author['family-names']}, {author['given-names']}" for author in paper["authors"]
    )
    assert f"{{{authors}}}" in page
    number = paper["url"].rpartition("/")[2]
    assert paper["identifiers"] == [{"type": "other", "value": f"arXiv:{number}"}]
    assert f"arXiv:{number}" in page
