"""Write one HTML page on one run or several. Its data are gathered here, and drawn by the scripts in ``assets``."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo import __version__
from bandpo._atomic import write_whole
from bandpo.doctor.diagnosis import Diagnosis, diagnose
from bandpo.errors import InvalidValue
from bandpo.report.audit_steps import audit_table
from bandpo.report.curves import Curves, as_json, charts, gather, parts_for, start_of_last_tenth
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
    opened = [open_run(path, method=None if method is None else str(method)) for path in runs]
    # The report of a log takes no torch, unless methods are named that must be checked.
    needs_tokens = bool(labelled) or method is not None or any(_losses_of(run) is not None for run in opened)
    tokens = _tokens(labelled, method, tokenizer) if needs_tokens else None
    bins = {name: name.replace("_", " ") for name in BINS}
    data: dict[str, Any] = {
        "version": __version__,
        "bins": bins,
        "grid": [] if tokens is None else tokens.grid,
    }
    gathered = [_run_data(run, tokens) for run in opened]
    data |= _curves_data(gathered)
    data["runs"] = [run.data for run in gathered]

    # No < in it, so that nothing can end the element in which it stands.
    written = json.dumps(_plain(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, _page({"data": written}))
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


@dataclass
class RunData:
    """What a page shows of one run."""

    data: dict[str, Any]
    """The diagnosis, and the figures of recorded tokens, as the page's scripts take them."""
    curves: Curves

    @property
    def evidence(self) -> set[str]:
        """Names of the curves that findings rest on."""
        return {name for finding in self.data["findings"] for name in finding["quantities"]}


def _losses_of(run: Run) -> Path | None:
    """Return the record of a run's losses, or a framework's export that has the policy in training; None without one.

    Raises:
        ValueError: if the export cannot be read.
    """
    if not run.dumps:
        return run.record
    first = next(run.batches(), None)
    return run.path if first is not None and first.has_logp else None


def _run_data(run: Run, tokens: Tokens | None) -> RunData:
    """Return what the page holds of one run; ``lacks`` says why it holds no tokens, if so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data: dict[str, Any] = {"name": str(run.path), "lacks": ""}
        of_tokens: Diagnosis | None = None
        of_log: Diagnosis | None = None
        finer_rows: list[Row] = []
        method = None
        losses = _losses_of(run)
        if losses is not None and tokens is not None:
            # The record names its own method, also where the folder around it has a configuration.
            gathered = tokens.gather(open_run(losses, method=run.method))
            of_tokens = gathered.diagnosis
            finer_rows = [*gathered.diagnosis.rows]
            method = gathered.method
            if gathered.lacks:
                data["lacks"] = gathered.lacks
            else:
                finer_rows += gathered.rows
                data |= gathered.data
        elif losses is not None:
            data["lacks"] = "a record, whose tokens need torch, which is not installed"
        else:
            kind = "batches saved before their losses" if run.dumps else "a log"
            data["lacks"] = f"{kind}, without the tokens of losses, which a record of bandpo.Recorder has"
        if of_tokens is None or losses != run.path:
            of_log = diagnose(run)
            method = method or of_log.setup.method

    whole = of_tokens or of_log
    assert whole is not None
    if of_tokens is not None and of_log is not None:
        whole = Diagnosis([*of_tokens.tested, *of_log.tested], of_tokens.setup, coverage=of_tokens.coverage)
    data |= _diagnosis_data(whole, of_log)
    data["method"] = method or ""
    data["warned"] = list(dict.fromkeys(str(warning.message) for warning in caught))

    log_rows = [] if of_log is None else of_log.rows
    read = {} if of_log is None or of_log.log is None else of_log.log.read
    curves = gather(log_rows, finer_rows, read)
    data["last_tenth"] = start_of_last_tenth(curves)
    data["audit"] = audit_table(finer_rows if "tokens" in data else [*log_rows, *finer_rows])
    return RunData(data, curves)


def _diagnosis_data(whole: Diagnosis, of_log: Diagnosis | None) -> dict[str, Any]:
    """Return what the page says of a run's diagnosis, and of what it rests on.

    Args:
        whole: The diagnosis of everything that there is of the run.
        of_log: The diagnosis of its log alone, if it has one.
    """
    log = None if of_log is None else of_log.log
    if whole.no_verdict:
        state = "none"
    elif not whole.healthy:
        state = "fault"
    else:
        state = "look" if whole.is_at_least("look") else "ok"
    return {
        **whole.as_json(),
        "state": state,
        "setup": str(whole.setup),
        "looked_at": "" if whole.coverage is None else str(whole.coverage),
        "part": "" if whole.coverage is None else whole.coverage.part,
        "untested": {name: how for name, how in whole.untested.items() if name not in whole.passed},
        "no_verdict": whole.no_verdict,
        "basis": "" if of_log is None else of_log.basis,
        "configuration": None if of_log is None else of_log.as_json().get("configuration"),
        "notes": [] if log is None else list(log.notes),
        "unread": [] if log is None else list(log.unread),
    }


def _curves_data(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return the charts of a page, and add their points to the data of each run."""
    evidence = {name for run in runs for name in run.evidence}
    plan = charts([run.curves for run in runs], evidence)
    drawn = [chart["name"] for chart in plan["charts"]]
    for run in runs:
        run.data["curves"] = {}
    for names in (drawn, plan["others"]):
        parts = parts_for(len(names) * len(runs))
        for run in runs:
            run.data["curves"] |= {
                name: as_json(run.curves[name], parts) for name in names if name in run.curves
            }
    return plan
