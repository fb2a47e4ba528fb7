"""Every page can be reached from README by links that work on a plain code host, without the site's generator."""

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.missing import require
from pages import ROOT, extension

LINK = re.compile(r"(?<!!)\[(?:[^][]|\[[^]]*\])*\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[[^]]*\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
"""All pages of the site."""
BESIDE = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "MAINTAINING.md", "SECURITY.md")
    ),
    *sorted((ROOT / "packages").glob("*/README.md")),
    ROOT / "examples/README.md",
    ROOT / "research/README.md",
    *sorted((ROOT / "research/reports").rglob("*.md")),
    *sorted((ROOT / "upstream").glob("*.md")),
]
"""The texts that are not on the site."""


def text_of(page: Path) -> str:
    """Return a page's text without code blocks and code spans, in which brackets are no links."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.S | re.M)


def targets(page: Path) -> list[tuple[Path, str]]:
    """Return the file and the anchor of each relative link of a page."""
    links = []
    for link in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        links.append(((page.parent / path).resolve() if path else page, anchor))
    return links


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts and the site's generator form them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M), re.M
    )
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def test_every_page_can_be_reached_from_readme():
    pending = [ROOT / "README.md"]
    reached = set()
    while pending:
        page = pending.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        pending += [path for path, _ in targets(page)]
    missing = [page.relative_to(ROOT).as_posix() for page in PAGES if page not in reached]
    assert missing == [], "link these pages from README.md"


def test_readme_lists_every_page():
    listed = {path for path, _ in targets(ROOT / "README.md")}
    missing = [page.relative_to(ROOT).as_posix() for page in PAGES if page not in listed]
    require(missing, "README.md", lambda page: f"[TITLE]({page})", "the section “Where to go”")


def test_the_first_page_of_the_site_is_readme():
    """Its links and its picture lead from the folder of the pages to the files that README's lead to."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = extension("start_page").start_page(readme)
    local = [address for address in LINK.findall(page) if not re.match(r"[a-z]+:|#", address)]
    assert len(local) >= len(PAGES)
    assert [address for address in local if not (DOCS / address.partition("#")[0]).exists()] == []
    [picture] = [name for name, _ in IMAGE.findall(page) if name.startswith("figures/")]
    assert (DOCS / picture).exists()
    assert not re.search(r"!\[[^]]*\]\(https?:", page)
    assert [line for line in readme.splitlines() if line.startswith("#")] == [
        line for line in page.splitlines() if line.startswith("#")
    ]


def test_a_readme_without_a_picture_makes_no_first_page():
    with pytest.raises(ValueError, match="has no <picture>"):
        extension("start_page").start_page("# bandpo\n")


@pytest.mark.parametrize(
    "page",
    [*BESIDE, *PAGES],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_links_and_pictures_exist(page):
    for path, anchor in targets(page):
        assert path.exists(), f"{page.name} links to {path}, which is not there"
        assert ROOT in path.parents
        # An anchor with a dot is that of a name in the reference, which the site's generator makes.
        if anchor and "." not in anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{path.name} has no heading #{anchor}"
    for groups in IMAGE.findall(text_of(page)):
        picture = next(filter(None, groups))
        # The site's generator puts the explorer's scripts beside the pages.
        if not re.match(r"[a-z]+:", picture) and not picture.startswith("explorer/"):
            assert (page.parent / picture).exists(), f"{page.name} shows {picture}, which is not there"


def test_the_site_leads_to_files_beside_its_pages_on_the_code_host():
    links = extension("repository_links")

    def shown(text, address):
        page = SimpleNamespace(file=SimpleNamespace(src_uri="trl.md"))
        return links.on_page_markdown(text, page, SimpleNamespace(repo_url=address), None)

    text = "See [a `[0.8, 2]` study](../research/README.md#the-numbers), [a page](when.md), [here](#below)."
    link = "[a `[0.8, 2]` study](https://host/us/bandpo/blob/main/research/README.md#the-numbers)"
    assert shown(text, "https://host/us/bandpo/") == f"See {link}, [a page](when.md), [here](#below)."
    twice = "[One](../a.md#x) and [two](../a.md)."
    assert shown(twice, None) == "One (`a.md`) and two."
    assert (
        shown(text, None)
        == "See a `[0.8, 2]` study (`research/README.md`), [a page](when.md), [here](#below)."
    )


def test_no_page_is_a_link_or_made_of_others():
    assert [path for path in DOCS.rglob("*") if path.is_symlink()] == []
    assert [page.name for page in PAGES if re.search(r"^--8<--", page.read_text(), re.M)] == []


def test_no_tracked_file_is_a_symbolic_link():
    listed = subprocess.run(["git", "ls-files", "-sz"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    entries = [entry for entry in listed.stdout.split("\0") if entry.startswith("120000")]
    assert entries == [], os.linesep.join(entries)
