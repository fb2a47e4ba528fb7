"""The one environment for verl: its lock, the page that says how to make it, and whatever else names it."""

import re
from pathlib import Path

import pytest

from bandpo_lab.cluster.pip_arguments import OPTIONAL_PACKAGES
from helpers.frameworks import needs
from pages import PAGES, ROOT

LOCK = "packages/bandpo-lab/src/bandpo_lab/recipes/gpu.txt"
DIGESTS = "locks/gpu.txt"
CONTAINERFILE = ROOT / "packages/bandpo-lab/src/bandpo_lab/recipes/Containerfile"
NAMING = [*PAGES, CONTAINERFILE, ROOT / "Makefile"]
SOURCES = [*ROOT.glob("packages/*/src/**/*.py"), *PAGES]


def pins(lock: str = LOCK) -> dict[str, str]:
    """The packages of a lock and their versions."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / lock).read_text(), re.M))


def installations(files: list[Path]) -> list[tuple[str, str]]:
    """Each `pip install …` in these files, with the file's name."""
    return [
        (file.relative_to(ROOT).as_posix(), command)
        for file in files
        for command in re.findall(r"pip install[^`\n]*", file.read_text())
    ]


def test_each_file_that_pip_is_to_read_is_there():
    named = {
        (file, name.strip("`',;.").replace("$(NODE_LOCK)", LOCK))
        for file, command in installations(NAMING)
        for name in re.findall(r" -[rc] (\S+)", command)
    }
    assert len({file for file, _ in named}) >= 3
    assert {(file, name) for file, name in named if not (ROOT / name).is_file()} == set()


def test_whatever_installs_verl_takes_the_versions_of_the_lock():
    of_verl = [(file, command) for file, command in installations(SOURCES) if "[verl]" in command]
    assert of_verl
    assert [one for one in of_verl if f"-c {LOCK}" not in one[1]] == []


def test_flash_attn_is_installed_as_a_wheel_or_not_at_all():
    compiling = re.compile(r"flash.attn[^`\n]*--no-build-isolation|--no-build-isolation[^`\n]*flash.attn")
    assert [file for file in SOURCES if compiling.search(file.read_text())] == []


def test_page_container_and_make_have_one_python_and_one_lock():
    page, make = (ROOT / "docs/install.md").read_text(), (ROOT / "Makefile").read_text()
    for text in (page, CONTAINERFILE.read_text()):
        assert f"--no-deps --require-hashes -r {DIGESTS}" in text
    assert f"NODE_LOCK := {LOCK}" in make.replace("$(LAB)", "packages/bandpo-lab/src/bandpo_lab")
    assert "python3.12 -m venv" in page
    assert "python3.12 -m venv" in make
    assert "python:3.12" in CONTAINERFILE.read_text()


def test_the_installation_without_vllm_is_the_one_that_is_made_each_night():
    page, make = (ROOT / "docs/install.md").read_text(), (ROOT / "Makefile").read_text()
    (command,) = re.findall(rf"^pip install (-c {LOCK} .*)$", page, re.M)
    nightly = (
        make.replace("$(NODE_LOCK)", LOCK).replace("--quiet ", "").replace("-e packages/", "./packages/")
    )
    nightly = nightly.replace("-e 'packages/", "'./packages/").replace(" \\\n\t  ", " ")
    assert f"-m pip install {command}" in nightly


def test_the_page_has_the_versions_of_the_lock():
    page = (ROOT / "docs/install.md").read_text()
    for package, name in (
        ("torch", "torch"),
        ("vllm", "vLLM"),
        ("transformers", "transformers"),
        ("ray", "Ray"),
    ):
        assert f"{name} {pins()[package]}" in page


def test_the_page_counts_the_packages_in_which_the_tests_differ_from_the_lock():
    node, tests = pins(), pins("constraints.txt")
    common = node.keys() & tests.keys()
    differing = {name for name in common if node[name] != tests[name]}
    page = " ".join((ROOT / "docs/install.md").read_text().split())
    said = "have the same verl and Ray, and other versions of"
    counts = (
        f"{said} {len(differing)} of the {len(common)} shared packages, among them torch and transformers."
    )
    assert counts in page
    assert {"torch", "transformers"} <= differing
    assert {"verl", "ray", "hydra-core", "tensordict", "transferqueue"} <= common - differing


@pytest.mark.parametrize("name", ["verl.md", "paper.md"])
def test_the_other_pages_refer_to_that_page(name):
    text = (ROOT / "docs" / name).read_text()
    assert "install.md#an-environment-for-verl" in text
    assert "3.11 or 3.12" not in text
    assert not re.search(r"pip install[^`\n]*\[verl\]", text)


def test_the_lock_is_of_the_torch_that_verls_vllm_needs():
    needs("verl")
    from importlib.metadata import requires

    needed = [text for text in requires("verl") or () if text.endswith('extra == "vllm"')]
    for package in ("torch", "vllm", "transformers"):
        assert any(text.startswith(f"{package}=={pins()[package]};") for text in needed)


def test_a_command_that_lacks_verl_says_how_to_install_it_with_the_lock():
    assert f"-c {LOCK}" in OPTIONAL_PACKAGES["verl"]
