"""Write an HTML page about runs. This module collects the page's data, and the scripts in ``assets`` draw them."""

from __future__ import annotations

import html
import json
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import rlvet
from rlvet._atomic import write_whole
from rlvet.checks.diagnosis import Diagnosis
from rlvet.dispatch import diagnose, open_run
from rlvet.errors import InvalidValue
from rlvet.plugins import COLLECTORS, INSTALL_BANDPO, load_plugin, require_plugin
from rlvet.records.run import RecordedRun, find_record
from rlvet.report.audit_steps import audit_table
from rlvet.report.curves import (
    Curves,
    as_json,
    charts,
    collect_curves,
    segments_per_curve,
    start_of_last_tenth,
)
from rlvet.report.palette import colours_of, css_variables, rule_colour
from rlvet.runs import Run
from rlvet.runs.effect import RUN, Effect, matter_line, rules_of_log
from rlvet.runs.metric_names import BINS
from rlvet.runs.quantities import Row
from rlvet.runs.summary import summarize


def write_report(
    runs: Sequence[str | Path],
    output: str | Path,
    *,
    methods: Mapping[str, object] | Sequence[object] = (),
    method: object | None = None,
    tokenizer: str | None = None,
    names: Mapping[str, str] | None = None,
    run_names: Sequence[str | None] = (),
) -> Path:
    """Write an HTML file with the diagnosis of runs, their curves, and the effect of clip rules on their tokens.

    The file is self-contained, and executes nothing from the files of a run. The report of a log needs only the
    standard library; that of recorded tokens needs bandpo.

    Args:
        runs: Paths for `rlvet.open_run`. A record in a folder of a run is shown with the run's log.
        output: The file to write. Its folder is created if necessary, and an existing file is kept if writing fails.
        methods: Rules and methods to apply to recorded tokens, as texts or as objects of bandpo.
            Their names in the report are their texts, or the keys of a mapping.
        method: The method of the runs, used if their files name none.
        tokenizer: The tokenizer for recorded ids: a folder, or a name on the Hugging Face hub.
        names: The logs' keys for quantities, see `rlvet.runs.Run`.
        run_names: The name of the run to read of each path, None for a file of one run; empty if all are of one run.

    Raises:
        ValueError: if a run or a method cannot be read, or ``output`` does not end in .html.
    """
    output = Path(output)
    if output.suffix != ".html":
        raise InvalidValue(f"{output}: the report is written as .html")
    methods_by_name = methods if isinstance(methods, Mapping) else {str(m): m for m in methods}
    opened_runs = [
        open_run(path, method=None if method is None else str(method), names=names, run_name=run_name)
        for path, run_name in zip(runs, run_names or [None] * len(runs), strict=True)
    ]

    # The report of a log needs no other package, unless there are methods that must be checked.
    has_losses = any(_path_of_losses(run) is not None for run in opened_runs)
    analysis = _token_analysis(methods_by_name, method, tokenizer, has_losses)

    reported = [_report_run(run, analysis) for run in opened_runs]
    _add_colours([run.data for run in reported])
    data: dict[str, Any] = {
        "version": rlvet.__version__,
        "bins": {name: name.replace("_", " ") for name in BINS},
        "grid": [] if analysis is None else analysis.grid,
        **_curves_data(reported),
        "runs": [run.data for run in reported],
        "audit_ways": _ways_to_audit({run.framework for run in reported}),
    }
    # Escape every <, so that no text can close the script element that contains the data.
    text = json.dumps(_plain(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    output.parent.mkdir(parents=True, exist_ok=True)
    headlines = html.escape("\n".join(f"{run.data['name']}: {run.data['headline']}" for run in reported))
    write_whole(output, _fill_template({"data": text, "palette": css_variables(), "headlines": headlines}))
    return output


def _token_analysis(
    methods: Mapping[str, object],
    method: object | None,
    tokenizer: str | None,
    has_losses: bool,
) -> Any:
    """Return the analysis of recorded tokens; None if it is not needed, or without bandpo.

    Args:
        methods: The rules and methods to apply, by name.
        method: The method of the runs.
        tokenizer: The tokenizer for recorded ids.
        has_losses: True if a run has recorded losses.

    Raises:
        ImportError: if bandpo is not installed, and methods are given, or the method of recorded losses.
    """
    if methods or (has_losses and method is not None):
        plugin = require_plugin(COLLECTORS, "token_figures", "a method")
    elif has_losses or method is not None:
        plugin = load_plugin(COLLECTORS, "token_figures")
    else:
        return None
    return None if plugin is None else plugin(methods, method, tokenizer)


def _fill_template(values: Mapping[str, str]) -> str:
    """Return the template with each ``{{ NAME }}`` replaced by a value, or by the content of the file of that name."""
    folder = resources.files("rlvet.report") / "assets"

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        return values[name] if name in values else (folder / name).read_text(encoding="utf-8")

    return re.sub(r"{{ (\S+) }}", replacement, (folder / "report.html").read_text(encoding="utf-8"))


def _plain(value: Any) -> Any:
    """Return data for JSON: integers and floats of five digits, None for NaN and infinity, and keys as strings."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() else float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@dataclass
class ReportedRun:
    """The data and curves of one run in a report."""

    data: dict[str, Any]
    """The diagnosis and the figures of recorded tokens, in the form that the page's scripts read."""
    curves: Curves
    """The curves of the run."""
    framework: str = ""
    """The framework that wrote the log; empty if it is not known."""

    @property
    def evidence(self) -> set[str]:
        """The names of curves to which findings refer."""
        return set().union(*(finding["quantities"] for finding in self.data["findings"]))


def _path_of_losses(run: Run | RecordedRun) -> Path | None:
    """Return the path of a run's record, or of a framework's batches if they have the policy in training; else None.

    Raises:
        ValueError: if the batches cannot be read.
    """
    if isinstance(run, Run):
        return find_record(run.path)
    if not run.dumps:
        return run.record
    first = next(run.batches(), None)
    return run.path if first is not None and first.has_logp else None


def _report_run(run: Run | RecordedRun, analysis: Any) -> ReportedRun:
    """Return the data and curves of one run. The entry ``no_tokens`` is the reason if there are no recorded tokens."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data: dict[str, Any] = {"name": run.title, "no_tokens": ""}
        token_diagnosis: Diagnosis | None = None
        log_diagnosis: Diagnosis | None = None
        token_rows: list[Row] = []
        method = None
        path_of_losses = _path_of_losses(run)
        if path_of_losses is not None and analysis is not None:
            # Open the record itself, whose method may differ from that of the configuration in the run's folder.
            figures = analysis.analyze(RecordedRun(path_of_losses, run.method))
            token_diagnosis = figures.diagnosis
            token_rows = [*figures.diagnosis.rows]
            method = figures.method
            if figures.no_tokens:
                data["no_tokens"] = figures.no_tokens
            else:
                token_rows += figures.rows
                data |= figures.data
        elif path_of_losses is not None:
            data["no_tokens"] = f"a record, whose figures need bandpo: {INSTALL_BANDPO}"
        else:
            kind = "a log" if isinstance(run, Run) else "batches saved before their losses"
            data["no_tokens"] = (
                f"{kind}, without the tokens of losses, which a record of bandpo.audit.Recorder has"
            )
        if token_diagnosis is None or path_of_losses != run.path:
            log_diagnosis = diagnose(run, method=run.method)
            method = method or log_diagnosis.setup.method

    diagnosis = _merge_diagnoses(token_diagnosis, log_diagnosis)
    data |= _diagnosis_data(diagnosis, log_diagnosis)
    data["method"] = method or ""
    data["warnings"] = list(dict.fromkeys(str(warning.message) for warning in caught))

    log_rows = [] if log_diagnosis is None else log_diagnosis.rows
    read = {} if log_diagnosis is None or log_diagnosis.log is None else log_diagnosis.log.read
    curves = collect_curves(log_rows, token_rows, read)
    data["last_tenth"] = start_of_last_tenth(curves)
    data["audit"] = audit_table(token_rows if "tokens" in data else [*log_rows, *token_rows])
    if "opening" not in data and data["audit"]["columns"]:
        data["opening"] = _effect_lines(log_rows)
    data["rule_colors"] = _colours_of_rules(data)
    framework = (log_diagnosis or diagnosis).setup.framework
    return ReportedRun(data, curves, framework or "")


AUDIT_WAYS: Mapping[str, tuple[str, str]] = {
    "trl": (
        "In TRL one import adds it",
        "from bandpo.integrations.trl import AuditedGRPOTrainer as GRPOTrainer",
    ),
    "verl": (
        "In verl one setting adds it",
        "actor_rollout_ref.actor.policy_loss._target_=bandpo.integrations.verl.AuditedPolicyLossConfig",
    ),
}
"""The way to add bandpo's audit to a run of each framework: a clause, and a line of code."""

AUDIT_ELSEWHERE = ("How it is added to another framework", "docs/audit.md")
"""The page that tells it for other frameworks, likewise."""


def _ways_to_audit(frameworks: Collection[str]) -> list[tuple[str, str]]:
    """Return what adds bandpo's audit to the runs of a page, for each framework.

    >>> [code for _, code in _ways_to_audit(["slime", "skyrl"])]
    ['docs/audit.md']
    """
    ways = [way for framework, way in AUDIT_WAYS.items() if framework in frameworks]
    is_complete = len(ways) == len(frameworks)
    return [*ways, *([] if is_complete else [AUDIT_ELSEWHERE])]


def _effect_lines(rows: Sequence[Row]) -> list[str]:
    """Return what the run's rule and others drop of the gradient on rare winners, from the audit's metrics in a log."""
    metrics = summarize(rows).metrics
    return [*Effect.from_log(metrics).lines, *filter(None, [matter_line(rules_of_log(metrics))])]


def _colours_of_rules(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of a colour for each rule that was applied to the tokens of a run, whose own is `RUN`."""
    of_log = (re.match(r"audit/if/(.+)/", name) for name in data["audit"]["columns"])
    others = dict.fromkeys([*data.get("rules", {}), *(match[1] for match in of_log if match)])
    others.pop(RUN, None)
    return {RUN: rule_colour(data["method"]) or "ink", **colours_of(others)}


def _add_colours(runs: Sequence[dict[str, Any]]) -> None:
    """Add to the data of each run the name of its colour: that of its rule, if the runs have different ones."""
    of_rules = [rule_colour(run["method"]) for run in runs]
    if None in of_rules or len(set(of_rules)) < len(of_rules):
        of_rules = (
            ["ink"]
            if len(runs) == 1
            else [*colours_of(f"run {number}" for number, _ in enumerate(runs)).values()]
        )
    for run, colour in zip(runs, of_rules, strict=True):
        run["color"] = colour


def _merge_diagnoses(of_tokens: Diagnosis | None, of_log: Diagnosis | None) -> Diagnosis:
    """Return the diagnosis of a run from those of its tokens and its log, of which at least one is given."""
    if of_tokens is None or of_log is None:
        diagnosis = of_tokens or of_log
        assert diagnosis is not None
        return diagnosis
    tested = [*of_tokens.tested, *of_log.tested]
    notes = [f"{len(of_tokens.passed)} tests of the record passed, and {len(of_log.passed)} of the log"]
    if of_log.no_verdict:
        notes.append(f"the log alone gets no verdict: {of_log.no_verdict}")
    return Diagnosis(
        tested,
        of_tokens.setup,
        coverage=of_tokens.coverage,
        configuration=of_log.configuration,
        notes=notes,
    )


def _diagnosis_data(diagnosis: Diagnosis, log_diagnosis: Diagnosis | None) -> dict[str, Any]:
    """Return the diagnosis of a run for the page's data.

    Args:
        diagnosis: The diagnosis of the run, from its log, its record of tokens, or both.
        log_diagnosis: The diagnosis of its log alone; None without a log.
    """
    log = None if log_diagnosis is None else log_diagnosis.log
    if diagnosis.no_verdict:
        state = "none"
    elif not diagnosis.healthy:
        state = "fault"
    else:
        state = "look" if diagnosis.is_at_least("look") else "ok"
    coverage = diagnosis.coverage
    passed = diagnosis.passed
    # What is said of a record and a log together stands at the top.
    is_of_both = log_diagnosis is not None and diagnosis is not log_diagnosis
    notes = [] if is_of_both else list(diagnosis.notes)
    if log_diagnosis is not None and log_diagnosis.replaced_keys:
        notes.append(f"read from another key: {log_diagnosis.replaced_text}")
    return {
        **diagnosis.as_json(),
        "findings": [{**finding.as_json(), "evidence": finding.evidence} for finding in diagnosis.findings],
        "order_text": diagnosis.order_text,
        "legend": diagnosis.legend,
        "state": state,
        "setup": str(diagnosis.setup),
        "coverage_text": "" if coverage is None else str(coverage),
        "covered_part": "" if coverage is None else coverage.part,
        "untested": {name: remedy for name, remedy in diagnosis.untested.items() if name not in passed},
        "no_verdict": diagnosis.no_verdict,
        "basis": "" if log_diagnosis is None else log_diagnosis.basis,
        "configuration": None if log_diagnosis is None else log_diagnosis.as_json().get("configuration"),
        "expected_fall": ""
        if diagnosis.is_at_least("look") or log_diagnosis is None
        else log_diagnosis.expected_fall,
        "remarks": [
            *(diagnosis.notes if is_of_both else []),
            *([] if log is None else log.notes),
            *([] if log_diagnosis is None else log_diagnosis.remarks),
        ],
        "are_steps_counted": log is not None and log.are_steps_counted,
        "how_sure": diagnosis.how_sure,
        "notes": notes,
        "unread": [] if log_diagnosis is None else log_diagnosis.unread,
    }


def _curves_data(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """Return the charts of a page, and add the points of their curves to the data of each run."""
    evidence: set[str] = set().union(*(run.evidence for run in runs))
    plan = charts([run.curves for run in runs], evidence)
    drawn = [chart["name"] for chart in plan["charts"]]
    for run in runs:
        run.data["curves"] = {}
    for names in (drawn, plan["others"]):
        segments = segments_per_curve(len(names) * len(runs))
        for run in runs:
            names_of_run = [name for name in names if name in run.curves]
            run.data["curves"] |= {name: as_json(run.curves[name], segments) for name in names_of_run}
    return plan
