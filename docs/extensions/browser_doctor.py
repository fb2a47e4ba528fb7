"""Puts on the site what the pages that diagnose a log run: Pyodide, rlvet's own Python, and an example log.

These pages get a policy by which the browser loads nothing from another host and sends nothing anywhere.
"""

import base64
import contextlib
import hashlib
import importlib.util
import io
import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PYODIDE = ROOT / "build/pyodide"
PAGES = {"diagnose.md": "../"}
"""The page that diagnoses a log, and the way from it to the root of the site."""
FOLDER = "doctor"
"""Where the files of the page lie on the site."""

EXAMPLE = "example.jsonl"
EXAMPLE_SEED = 2
HEAD = """
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="stylesheet" href="{root}{folder}/doctor.css">
"""
CHART = '<script src="{root}explorer/chart.js"></script>'
SCRIPT = '<script src="{root}{folder}/doctor.js"></script>\n'


def on_files(files: Any, config: Any) -> Any:
    """Add Pyodide, the package and the example log to the site (an event of mkdocs)."""
    pyodide = _module(ROOT / "scripts/fetch_pyodide.py")
    missing = [name for name in pyodide.FILES if not (PYODIDE / name).is_file()]
    if missing:
        raise PluginError(
            f"build/pyodide lacks {', '.join(missing)}, which {' and '.join(PAGES)} need. `make docs` fetches them; so "
            "does `python scripts/fetch_pyodide.py build/pyodide`, which takes npm."
        )
    for name in pyodide.FILES:
        files.append(File.generated(config, f"{FOLDER}/pyodide/{name}", abs_src_path=str(PYODIDE / name)))
    package = rlvet_archive()
    fetched = [
        len(package),
        *((PYODIDE / name).stat().st_size for name in pyodide.FILES if not name.endswith("mjs")),
    ]
    settings = {
        "version": pyodide.VERSION,
        "bytes": sum(fetched),
        "patterns": readable_patterns(),
    }
    made = {
        "rlvet.zip": package,
        "settings.json": json.dumps(settings).encode(),
        EXAMPLE: example_log().encode(),
        "example.json": example_verdict().encode(),
    }
    for name, content in made.items():
        files.append(File.generated(config, f"{FOLDER}/{name}", content=content))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Add the scripts and the security policy to the pages that diagnose a log (an event of mkdocs)."""
    if page.file.src_uri not in PAGES:
        return output
    root = PAGES[page.file.src_uri]
    # The theme would ask the code host for the number of stars, which the policy forbids.
    output = output.replace('data-md-component="source"', "")
    head = HEAD.format(policy=security_policy(output), root=root, folder=FOLDER)
    output = output.replace("<head>", f"<head>{head}", 1)
    scripts = SCRIPT.format(root=root, folder=FOLDER)
    # The explorer of the start page has loaded the charts.
    chart = CHART.format(root=root)
    if chart not in output:
        scripts = chart + scripts
    return output.replace("</body>", f"{scripts}</body>", 1)


def security_policy(page: str) -> str:
    """Return the Content-Security-Policy of a page: what is on the site, and the scripts that stand in the page now.

    The worker is made from a text of the page (``blob:``), because such a worker takes over the policy of its page.
    """
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    hashes = sorted(
        {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    )
    return "; ".join(
        (
            "default-src 'self'",
            "script-src 'self' 'wasm-unsafe-eval' " + " ".join(f"'sha256-{digest}'" for digest in hashes),
            "worker-src 'self' blob:",
            "connect-src 'self'",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data:",
            "object-src 'none'",
            "form-action 'none'",
            "base-uri 'self'",
        )
    )


def rlvet_archive() -> bytes:
    """Return a zip archive of rlvet and of PyYAML, which it needs and which is Python throughout."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        for package in (ROOT / "packages/rlvet/src/rlvet", Path(yaml.__file__).parent):
            for file in sorted(package.rglob("*")):
                if file.suffix in (".py", ".json", ".tsv"):
                    # A fixed date, so that the same source makes the same archive.
                    entry = zipfile.ZipInfo(f"{package.name}/{file.relative_to(package).as_posix()}")
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    opened.writestr(entry, file.read_bytes())
    return archive.getvalue()


def readable_patterns() -> list[str]:
    """Return the names of the files that are read in the folder of a run."""
    from rlvet.runs.configs import READERS
    from rlvet.runs.formats import IN_FOLDERS
    from rlvet.runs.logs import NAMES_FILE

    return [*IN_FOLDERS, *READERS, NAMES_FILE]


def example_log() -> str:
    """Return a simulated log in which the engine departs from the trainer, and the reward falls after it."""
    scenarios = _module(ROOT / "benchmarks/doctor/log_scenarios.py")
    rows = ({name: float(f"{x:.4g}") for name, x in row.items()} for row in scenarios.mismatch(EXAMPLE_SEED))
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def example_verdict() -> str:
    """Return the verdict on the example log as JSON, as the page's worker computes it."""
    verdict = _module(ROOT / "docs/doctor/verdict.py").verdict
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path(EXAMPLE).write_text(example_log(), encoding="utf-8")
        return verdict(EXAMPLE, {}, "")


def _module(file: Path) -> ModuleType:
    """Return the module in a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name.
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
