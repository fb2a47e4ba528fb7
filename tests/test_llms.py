"""llms.txt, of the site and of the wheel, has the form of llmstxt.org, and its links exist."""

import re
import sys
import tomllib

import pytest
import yaml

from pages import ROOT

sys.path.insert(0, str(ROOT / "docs/extensions"))

import for_agents

DOCS = ROOT / "docs"
SKILL = ROOT / "packages/rlvet/src/rlvet/skill"
LINK = re.compile(r"^- \[([^][]+)\]\(([^()\s]+)\)(?:: (\S.*))?$")


class Loader(yaml.SafeLoader):
    """A loader of mkdocs.yml, which takes values from the environment by tags."""


Loader.add_multi_constructor("!", lambda *_: None)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=Loader)  # noqa: S506


def nav_pages(content):
    """Return the files of a part of the navigation."""
    if isinstance(content, str):
        return [content]
    entries = content if isinstance(content, list) else content.values()
    return [page for entry in entries for page in nav_pages(entry)]


def read(text):
    """Return the title, the summary, and the links of each section. The form is checked."""
    title, blank, summary, *rest = text.splitlines()
    assert title.startswith("# ")
    assert blank == ""
    assert summary.startswith("> ")
    sections = {}
    for line in rest:
        if line.startswith("## "):
            links = sections[line[3:]] = []
        elif sections and line:
            match = LINK.match(line)
            assert match, line
            links.append(match.groups())
    assert all(sections.values())
    return title[2:], summary[2:], sections


@pytest.fixture
def site(tmp_path):
    """Return the folder of a site that has a file for every page of the navigation."""
    for page in nav_pages(CONFIG["nav"]):
        file = tmp_path / ("index.html" if page == "index.md" else f"{page.removesuffix('.md')}/index.html")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    config = {"site_dir": str(tmp_path), "docs_dir": str(DOCS)}
    for_agents.on_post_build(
        config | {name: CONFIG[name] for name in ("site_name", "site_description", "nav")}
    )
    return tmp_path


def test_the_site_has_a_line_for_every_page(site):
    title, summary, sections = read((site / "llms.txt").read_text())
    assert (title, summary) == (CONFIG["site_name"], CONFIG["site_description"])
    assert [*sections] == ["For agents", *(name for entry in CONFIG["nav"] for name in entry)]
    links = [target for lines in sections.values() for _, target, _ in lines]
    assert len(set(links)) == len(links)
    assert [target for target in links if not (site / target).is_file()] == []
    pages = {*site.rglob("index.html")}
    assert {site / target for target in links if target.endswith("index.html")} == pages
    assert len(pages) == len(nav_pages(CONFIG["nav"]))


def test_the_site_has_the_skill_as_it_is_in_the_wheel(site):
    files = {file.relative_to(SKILL) for file in SKILL.rglob("*") if file.is_file()}
    assert {
        file.relative_to(site / "skill") for file in (site / "skill").rglob("*") if file.is_file()
    } == files
    for file in files:
        assert (site / "skill" / file).read_bytes() == (SKILL / file).read_bytes()


def test_most_pages_have_a_sentence(site):
    _, _, sections = read((site / "llms.txt").read_text())
    lines = [line for name, section in sections.items() if name != "For agents" for line in section]
    sentences = [sentence for _, _, sentence in lines if sentence]
    assert len(sentences) >= 0.9 * len(lines)
    assert [
        sentence for sentence in sentences if len(sentence) > 250 or re.search(r"[`*]|\]\(", sentence)
    ] == []


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        (
            "# Title\n\n`rlvet lint` reads a [configuration](lint.md). It reports.\n",
            "rlvet lint reads a configuration.",
        ),
        (
            "# Title\n\n```sh\nrlvet lint\n```\n\n| a |\n|---|\n\n**Bold** text\nof two lines\n",
            "Bold text of two lines",
        ),
        ("---\ntitle: x\n---\n# Title\n", ""),
    ],
)
def test_the_first_sentence_of_a_page(page, sentence):
    assert for_agents.first_sentence(page) == sentence.removesuffix(".")


def test_the_wheel_has_a_line_for_every_file_of_the_skill():
    title, summary, sections = read((SKILL / "llms.txt").read_text())
    project = tomllib.loads((ROOT / "packages/rlvet/pyproject.toml").read_text())["project"]
    assert (title, summary) == (project["name"], project["description"])
    linked = {SKILL / target for lines in sections.values() for _, target, _ in lines}
    assert linked == {file for file in SKILL.rglob("*") if file.is_file()} - {SKILL / "llms.txt"}


def test_the_build_of_the_site_writes_it(tmp_path):
    """The site of two pages is built with the navigation of its own."""
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Start\n\nThe start. More.\n")
    (docs / "lint.md").write_text("# Lint\n\nOf configurations: all.\n")
    changes = {
        "docs_dir": str(docs),
        "site_dir": str(tmp_path / "site"),
        "nav": [{"Start": [{"What it is": "index.md"}]}, {"Lint": "lint.md"}],
        "plugins": [],
        "theme": {"name": "mkdocs"},
        "extra_css": [],
        "hooks": [str(ROOT / "docs/extensions/for_agents.py")],
    }
    build(load_config(str(ROOT / "mkdocs.yml"), **changes))
    _, _, sections = read((tmp_path / "site/llms.txt").read_text())
    assert sections["Start"] == [("What it is", "index.html", "The start")]
    assert sections["Lint"] == [("Lint", "lint/index.html", "Of configurations")]
    targets = [target for lines in sections.values() for _, target, _ in lines]
    assert [target for target in targets if not (tmp_path / "site" / target).is_file()] == []
