"""One page on one run or several: its data gathered here, drawn by the scripts of `bandpo/page`. `bandpo report`."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bandpo import __version__
from bandpo.audit.diagnosis import Diagnosis, diagnose
from bandpo.audit.dumps import dump_files
from bandpo.audit.metrics import BINS
from bandpo.audit.record import read_calls
from bandpo.audit.recorder import record_files
from bandpo.audit.replay import replay_record
from bandpo.audit.words import RULES, costliest, decoder, in_text, kept_by
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.rule_check import check
from bandpo.rules import ClipRule
from bandpo.text import as_method

SHOWN = 12_000
"""Tokens of a record that a page holds, about 1 MB of them: those that moved farthest in each step."""
GRID = torch.logspace(-6, 0, 121, dtype=torch.float64).clamp(max=1 - 1e-9)
"""Old probabilities at which rules are drawn."""


def write_report(
    runs: Sequence[str | Path],
    output: str | Path,
    *,
    methods: Mapping[str, Method | ClipRule | str] | Sequence[Method | ClipRule | str] = (),
    method: Method | str | None = None,
    tokenizer: str | None = None,
) -> Path:
    """Write one HTML file that shows what `diagnose` finds in runs, their curves, and what rules do to their tokens.

    The file loads nothing from elsewhere, and nothing that a run holds is run in it.

    Args:
        runs: Whatever `diagnose` reads. A record that lies in a folder within a run's is shown with its log.
        output: The file to write; its folder is made if need be, and an earlier file stays if that fails.
        methods: Rules and methods to try on recorded tokens, beside those of `bandpo.audit.words.RULES`. They are
            called by their text, or by the keys of a mapping.
        method: The runs' own, where they do not tell it.
        tokenizer: What decodes recorded ids, as for `bandpo.audit.words.decoder`.

    Raises:
        ValueError: a run or a method cannot be read, or ``output`` is no .html.
    """
    output, own = Path(output), as_method(method) if method else None
    if output.suffix != ".html":
        raise InvalidValue(f"{output}: the report is written as .html")
    labelled = methods if isinstance(methods, Mapping) else {str(m): m for m in methods}
    tried = RULES | {label: as_method(m) for label, m in labelled.items()}
    for one in tried.values():
        check(as_method(one))
    bins = [name.replace("_", " ") for name in BINS]
    data = {"version": __version__, "bins": dict(zip(BINS, bins, strict=True)), "grid": GRID.tolist()}
    data["runs"] = [_run(Path(run), tried, own, tokenizer) for run in runs]
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


def _page(filled: Mapping[str, str]) -> str:
    """The template with each ``{{ name }}`` in it replaced: by what is given, or by the file of that name."""
    folder = resources.files("bandpo") / "page"

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return filled[name] if name in filled else (folder / name).read_text(encoding="utf-8")

    return re.sub(r"{{ (\S+) }}", part, (folder / "report.html").read_text(encoding="utf-8"))


def _plain(x: Any) -> Any:
    """As JSON has it: whole numbers, five digits of others, none for what is not finite."""
    if isinstance(x, float):
        return None if not math.isfinite(x) else int(x) if x.is_integer() else float(f"{x:.5g}")
    if isinstance(x, Mapping):
        return {str(name): _plain(value) for name, value in x.items()}
    return [_plain(value) for value in x] if isinstance(x, list | tuple) else x


def _run(
    path: Path, tried: Mapping[str, Method | str], own: Method | None, tokenizer: str | None
) -> dict[str, Any]:
    """What the page holds of one run; ``lacks`` says why it holds no tokens, if so."""
    records = [path] if record_files(path) else sorted({f.parent for f in path.glob("*/tokens-*.arrow")})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        looked = [diagnose(part, method=own) for part in dict.fromkeys([*records[:1], path])]
        coverage = looked[0].coverage
        found = Diagnosis([f for one in looked for f in one.tested], looked[0].setup, coverage=coverage)
        seen = {"name": str(path), **found.as_json(), "healthy": found.healthy, "lacks": ""}
        seen["looked_at"] = "" if coverage is None else str(coverage)
        seen["part"] = "" if coverage is None else coverage.part
        seen["untested"] = {what: how for what, how in found.untested.items() if what not in found.passed}
        rows, method = looked[-1].rows, next((one.setup.method for one in looked if one.setup.method), None)
        recorded = [*looked[0].rows] if records else []
        if records:
            try:
                seen |= _record(records[0], tried, method, tokenizer)
                recorded += seen.pop("rows")
            except InvalidValue as error:
                seen["lacks"] = str(error)
        else:
            kind = "batches saved before their losses" if dump_files(path) else "a log"
            seen["lacks"] = f"{kind}, without the tokens of losses, which a record of bandpo.Recorder has"
    finer = {name for row in recorded for name in row} - {"step"}
    rows = [{name: x for name, x in row.items() if name not in finer} for row in rows] + recorded
    table: defaultdict[float, dict[str, float]] = defaultdict(dict)
    for row in rows:
        table[row["step"]] |= row
    steps = sorted(table)
    names = {name for row in rows for name in row} - {"step", "epoch"}
    seen["columns"] = {name: [table[step].get(name) for step in steps] for name in sorted(names)}
    warned = list(dict.fromkeys(str(one.message) for one in said))
    return seen | {"method": str(method or ""), "steps": steps, "warned": warned}


def _record(
    path: Path, tried: Mapping[str, Method | str], own: Method | None, tokenizer: str | None
) -> dict[str, Any]:
    """What rules would have done to the tokens, step by step; those that moved most; the words."""
    replayed = replay_record(path, tried, method=own)
    rules, each = list(replayed.by_step), max(20, SHOWN // len(replayed.rows))
    tokens: defaultdict[int, Tensor] = defaultdict(lambda: torch.zeros(0, 3 + len(rules)))
    for number, call in enumerate(read_calls(path, own), 1):
        step = number if call.step is None else call.step
        if not call.known:
            continue
        seen, kept = kept_by(call, tried)
        columns = [seen.logp_anchor.exp(), seen.log_ratio_anchor.exp(), seen.advantages]
        moved = (seen.mask * seen.advantages * seen.log_ratio != 0).expand_as(seen.logp_old)
        some = torch.stack([x.expand_as(moved)[moved] for x in (*columns, *map(kept.__getitem__, rules))], 1)
        some = torch.cat([tokens[step], some])
        tokens[step] = some[some[:, 1].log().abs().topk(min(each, len(some))).indices]
    decode = decoder(path, tokenizer)
    words = [
        {**w._asdict(), "text": in_text(w, decode)} for w in costliest(read_calls(path, own), rules=tried)
    ]
    methods = {name: as_method(tried.get(name, own)) for name in rules}
    return {
        "rows": replayed.rows,
        "rules": {name: {"method": str(m), "limits": _limits(m)} for name, m in methods.items()},
        "tokens": {step: some.tolist() for step, some in tokens.items()},
        "words": words,
    }


def _limits(method: Method) -> Any:
    """A token's bounds at each p of `GRID`; None where they depend on more than p."""
    try:
        bounds = method.clip.bounds(GRID.log()) if (method.bound_level or method.level) == "token" else ()
    except ValueError:  # they need to know how far training has come
        return None
    return [x.tolist() for x in bounds]
