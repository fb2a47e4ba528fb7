"""Write one HTML page on one run or several. Its data are gathered here, and drawn by the scripts in ``assets``."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo import __version__
from bandpo.doctor.diagnosis import Diagnosis, diagnose
from bandpo.errors import InvalidValue
from bandpo.runs import Run, open_run
from bandpo.runs.metric_names import BINS
from bandpo.runs.quantities import Row

if TYPE_CHECKING:
    from bandpo.methods import Method
    from bandpo.report.tokens import Tokens
    from bandpo.rules import ClipRule


def write_report(
    runs: Sequence[str | Path],
    output: str | Path,
    *,
    methods: Mapping[str, Method | ClipRule | str] | Sequence[Method | ClipRule | str] = (),
    method: Method | ClipRule | str | None = None,
    tokenizer: str | None = None,
) -> Path:
    """Write one HTML file that shows the diagnosis of runs, their curves, and what rules do to their tokens.

    The file loads nothing from elsewhere, and nothing that a run holds is run in it. The report of a log takes the
    standard library alone; that of recorded tokens takes torch.

    Args:
        runs: Whatever `bandpo.runs.open_run` opens. A record that lies in a folder within a run's is shown with its
            log.
        output: The file to write. Its folder is made if need be, and an earlier file stays if writing fails.
        methods: Rules and methods to try on recorded tokens, beside those of `bandpo.audit.blocked_tokens.RULES`. They
            are called by their text, or by the keys of a mapping.
        method: The runs' own method, used where nothing on the disk names one.
        tokenizer: What decodes recorded ids, as for `bandpo.audit.blocked_tokens.decoder`.

    Raises:
        ValueError: if a run or a method cannot be read, or ``output`` is no .html.
    """
    output = Path(output)
    if output.suffix != ".html":
        raise InvalidValue(f"{output}: the report is written as .html")
    labelled = methods if isinstance(methods, Mapping) else {str(m): m for m in methods}
    tokens = _tokens(labelled, method, tokenizer)
    bins = {name: name.replace("_", " ") for name in BINS}
    data = {"version": __version__, "bins": bins, "grid": [] if tokens is None else tokens.grid}
    text = None if method is None else str(method)
    data["runs"] = [_run_data(open_run(path, method=text), tokens) for path in runs]

    # No < in it, so that nothing can end the element in which it stands.
    written = json.dumps(_plain(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".unfinished-{output.name}")
    try:
        unfinished.write_text(_page({"data": written}), encoding="utf-8")
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
    return output


def _tokens(
    methods: Mapping[str, Method | ClipRule | str],
    method: Method | ClipRule | str | None,
    tokenizer: str | None,
) -> Tokens | None:
    """Return what gathers the figures of recorded tokens; None without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    from bandpo.report.tokens import Tokens

    return Tokens(methods, method, tokenizer)


def _page(filled: Mapping[str, str]) -> str:
    """Return the template with each ``{{ name }}`` replaced: by an entry of ``filled``, or by the file of that name."""
    folder = resources.files("bandpo.report") / "assets"

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return filled[name] if name in filled else (folder / name).read_text(encoding="utf-8")

    return re.sub(r"{{ (\S+) }}", part, (folder / "report.html").read_text(encoding="utf-8"))


def _plain(x: Any) -> Any:
    """Return data as JSON has it: whole numbers, five digits of others, none for what is not finite."""
    if isinstance(x, float):
        return None if not math.isfinite(x) else int(x) if x.is_integer() else float(f"{x:.5g}")
    if isinstance(x, Mapping):
        return {str(name): _plain(value) for name, value in x.items()}
    return [_plain(value) for value in x] if isinstance(x, list | tuple) else x


def _run_data(run: Run, tokens: Tokens | None) -> dict[str, Any]:
    """Return what the page holds of one run; ``lacks`` says why it holds no tokens, if so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data: dict[str, Any] = {"name": str(run.path), "lacks": ""}
        diagnoses: list[Diagnosis] = []
        log_rows: list[Row] = []
        finer_rows: list[Row] = []
        method = None
        if run.record is not None and tokens is not None:
            # The record names its own method, also where the folder around it has a configuration.
            gathered = tokens.gather(open_run(run.record, method=run.method))
            diagnoses.append(gathered.diagnosis)
            finer_rows = [*gathered.diagnosis.rows]
            method = gathered.method
            if gathered.lacks:
                data["lacks"] = gathered.lacks
            else:
                finer_rows += gathered.rows
                data |= gathered.data
        else:
            kind = "batches saved before their losses" if run.dumps else "a log"
            data["lacks"] = f"{kind}, without the tokens of losses, which a record of bandpo.Recorder has"
        if run.record != run.path:
            diagnosis = diagnose(run)
            diagnoses.append(diagnosis)
            log_rows = [*diagnosis.rows]
            method = method or diagnosis.setup.method

    first = diagnoses[0]
    findings = [finding for diagnosis in diagnoses for finding in diagnosis.tested]
    whole = Diagnosis(findings, first.setup, coverage=first.coverage)
    data |= {**whole.as_json(), "healthy": whole.healthy}
    data["looked_at"] = "" if first.coverage is None else str(first.coverage)
    data["part"] = "" if first.coverage is None else first.coverage.part
    data["untested"] = {name: how for name, how in whole.untested.items() if name not in whole.passed}
    warned = list(dict.fromkeys(str(warning.message) for warning in caught))
    return data | _columns(log_rows, finer_rows) | {"method": method or "", "warned": warned}


def _columns(log_rows: Sequence[Row], finer_rows: Sequence[Row]) -> dict[str, Any]:
    """Return the steps of a run, and each metric at each step.

    Args:
        log_rows: The rows of its log.
        finer_rows: The rows computed from its tokens. What they have is not taken from the log.
    """
    finer_names = {name for row in finer_rows for name in row} - {"step"}
    coarse_rows = [{name: x for name, x in row.items() if name not in finer_names} for row in log_rows]
    rows = [*coarse_rows, *finer_rows]
    table: defaultdict[float, dict[str, float]] = defaultdict(dict)
    for row in rows:
        table[row["step"]] |= row
    steps = sorted(table)
    names = {name for row in rows for name in row} - {"step", "epoch"}
    return {"steps": steps, "columns": {name: [table[s].get(name) for s in steps] for name in sorted(names)}}
