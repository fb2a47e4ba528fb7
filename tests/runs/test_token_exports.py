"""prime-rl's token exports and miles' policy_loss_debug, written by their own code where BANDPO_SOURCES has it.

BANDPO_SOURCES is a folder with ``token_export.py`` of PrimeIntellect-ai/prime-rl at commit
559b44772e471d1538537b8805cc77f3824a5e64 (src/prime_rl/trainer/rl) and ``debug_dump.py`` of radixark/miles at commit
31f1ca961a94cb860cec3b2dea34ec332bfa8f76 (miles/backends/training_utils). Elsewhere the same fields are written here.
"""

import importlib.util
import json
import math
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bandpo.audit.replay import replay_record
from bandpo.doctor.diagnosis import diagnose
from bandpo.report import write_report
from bandpo.runs import open_run
from bandpo.testing import check_record

PROMPT, LENGTH, ROWS = 3, 9, 32


def batch(step, temperature=1.0, moved=0.0):
    """Sequences of a trainer whose engine samples at a temperature, (rows, time), with a prompt before each."""
    g = torch.Generator().manual_seed(step)
    logits = 2 * torch.randn(ROWS, LENGTH, 20, generator=g)
    old = logits.log_softmax(-1)
    engine = (logits / temperature).log_softmax(-1)
    ids = torch.multinomial(engine.exp().flatten(0, 1), 1, generator=g).view(ROWS, LENGTH, 1)
    new = (logits + moved * torch.randn(logits.shape, generator=g)).log_softmax(-1)
    advantages = (ids.squeeze(2) % 2).float().mean(1).view(-1, 4)
    advantages = (advantages - advantages.mean(1, keepdim=True)).flatten()
    return {
        "prompt": torch.arange(ROWS // 4).repeat_interleave(4)[:, None].expand(-1, PROMPT),
        "ids": ids.squeeze(2),
        "new": new.gather(2, ids).squeeze(2),
        "old": old.gather(2, ids).squeeze(2),
        "engine": engine.gather(2, ids).squeeze(2),
        "entropy": -(new.exp() * new).sum(-1),
        "advantages": advantages[:, None].expand(-1, LENGTH),
    }


def with_prompt(x, before=0.0):
    """Return values of answers with those of prompts before them."""
    return torch.cat([torch.full((ROWS, PROMPT), before, dtype=x.dtype), x], 1)


def source(monkeypatch, file, **modules):
    """Return the framework's own module, with stand-ins for what it imports of the framework; None where it is not."""
    folder = os.environ.get("BANDPO_SOURCES")
    if not folder:
        return None
    for name, attributes in modules.items():
        dotted = name.replace("__", ".")
        for end in range(1, dotted.count(".") + 2):
            part = ".".join(dotted.split(".")[:end])
            monkeypatch.setitem(sys.modules, part, sys.modules.get(part) or ModuleType(part))
        for key, value in attributes.items():
            monkeypatch.setattr(sys.modules[dotted], key, value, raising=False)
    spec = importlib.util.spec_from_file_location(f"source_{file}", Path(folder) / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prime_rl_columns(d):
    """Return a micro-batch and what the model gives for it, packed into one row as the trainer packs them."""
    tokens = torch.cat([d["prompt"], d["ids"]], 1)
    micro_batch = {
        "input_ids": tokens,
        "position_ids": torch.arange(PROMPT + LENGTH).expand(ROWS, -1),
        "loss_mask": with_prompt(torch.ones(ROWS, LENGTH, dtype=torch.bool), False),
        "advantages": with_prompt(d["advantages"]),
        "inference_logprobs": with_prompt(d["engine"]),
    }
    output = {"logprobs": with_prompt(d["new"], -math.inf), "entropy": with_prompt(d["entropy"])}
    return micro_batch, output


def prime_rl(folder, step, d, monkeypatch):
    """Write token_exports/step_N/rank_0.jsonl."""
    micro_batch, output = prime_rl_columns(d)

    def ratios(new, engine):
        log_ratio = new - engine
        return log_ratio, log_ratio.exp(), log_ratio.exp() - log_ratio - 1

    module = source(
        monkeypatch,
        "token_export",
        prime_rl__configs__trainer={"DefaultLossConfig": Namespace, "TrainerConfig": object},
        prime_rl__trainer__rl__loss={"compute_importance_ratio_and_mismatch_kl": ratios},
    )
    if module is not None:
        flat = {name: x.reshape(1, -1) for name, x in micro_batch.items()}
        flat["env_names"] = ["math"] * ROWS * (PROMPT + LENGTH)
        exporter = module.TokenExporter(folder, 0)
        loss = Namespace(dppo_mask_high=0.2, dppo_mask_low=0.2)
        packed = {name: x.reshape(1, -1) for name, x in output.items()}
        exporter.export(step, 0, flat, packed, [PROMPT + LENGTH] * ROWS, loss)
        exporter.mark_stable()
        return
    path = folder / f"token_exports/step_{step}/rank_0.jsonl"
    path.parent.mkdir(parents=True)
    renamed = {
        "token_ids": micro_batch["input_ids"],
        "position_ids": micro_batch["position_ids"],
        "loss_mask": micro_batch["loss_mask"],
        "advantages": micro_batch["advantages"],
        "inference_logprobs": micro_batch["inference_logprobs"],
        "trainer_logprobs": output["logprobs"],
        "entropy": output["entropy"],
    }
    lines = []
    for row in range(ROWS):
        columns = {name: x[row].tolist() for name, x in renamed.items()}
        columns["trainer_logprobs"] = [x if math.isfinite(x) else None for x in columns["trainer_logprobs"]]
        head = {"schema_version": 1, "step": step, "rank": 0, "micro_step": 0, "micro_sequence_idx": row}
        lines.append(json.dumps(head | {"export_sequence_idx": row, "env_name": "math"} | columns))
    path.write_text("\n".join(lines) + "\n")
    (path.parent / "STABLE").touch()


def miles(folder, call, d, monkeypatch):
    """Write policy_loss_debug/rank_0_call_N.pt."""
    ones = torch.ones(ROWS, LENGTH)
    rows = {
        "train_log_probs": list(d["new"]),
        "old_log_probs": list(d["old"]),
        "rollout_log_probs": list(d["engine"]),
        "advantages": list(d["advantages"]),
        "local_loss_masks": list(ones),
    }
    module = source(monkeypatch, "debug_dump", miles__utils__types={"RolloutBatch": dict})
    lengths = {"total_lengths": [PROMPT + LENGTH] * ROWS, "response_lengths": [LENGTH] * ROWS}
    if module is not None:
        module._POLICY_LOSS_DUMP_COUNTER = call
        args = Namespace(dump_details=str(folder))
        zero = torch.zeros(1)
        module.maybe_dump_policy_loss_debug(args=args, batch=lengths, ppo_kl=zero, pg_loss=zero, **rows)
        return
    path = folder / f"policy_loss_debug/rank_0_call_{call}.pt"
    path.parent.mkdir(exist_ok=True)
    samples = []
    for row in range(ROWS):
        sample = {"index": row, "total_length": PROMPT + LENGTH, "response_length": LENGTH}
        sample |= {name: values[row].clone() for name, values in rows.items() if name != "local_loss_masks"}
        sample["local_loss_mask"] = ones[row].clone()
        sample["train_rollout_abs_diff"] = (d["new"] - d["engine"])[row].abs()
        samples.append(sample)
    torch.save({"rank": 0, "call": call, "samples": samples, "finite": {"ppo_kl": True}}, path)


EXPORTS = [(prime_rl, "token_exports", "prime-rl"), (miles, "policy_loss_debug", "miles")]


@pytest.mark.parametrize(("write", "name", "framework"), EXPORTS)
def test_every_field_is_read(write, name, framework, tmp_path, monkeypatch):
    d = batch(8, moved=0.05)
    for step in (8, 12):
        write(tmp_path, step, d, monkeypatch)
    assert open_run(tmp_path / name).setup.framework == framework
    loss = {"logp": d["new"], "logp_rollout": d["engine"], "advantages": d["advantages"]}
    if framework == "prime-rl":
        # Its ratio refers to the engine.
        loss |= {"logp_old": d["engine"], "tokens": d["ids"], "entropy": d["entropy"], "update": 0}
        loss |= {"group": [row // 4 for row in range(ROWS)]}
    else:
        loss["logp_old"] = d["old"]
    anchor = "rollout" if framework == "prime-rl" else "trainer"
    check_record(tmp_path / name, [loss | {"step": 8}, loss | {"step": 12}], anchor=anchor)
    if framework == "prime-rl":
        (one,) = open_run(tmp_path / name / "step_12").batches()
        assert one.step == 12


@pytest.mark.parametrize(("write", "name", "framework"), EXPORTS)
def test_it_is_diagnosed_and_audited(write, name, framework, tmp_path, monkeypatch):
    for temperature, folder in ((1.0, tmp_path / "well"), (0.7, tmp_path / "cold")):
        folder.mkdir()
        for step in range(8, 12):
            write(folder, step, batch(step, temperature), monkeypatch)
    assert diagnose(tmp_path / "well" / name).healthy
    cold = diagnose(tmp_path / "cold" / name).findings[0]
    assert "temperature" in (cold.code, *cold.or_else), cold
    replayed = replay_record(tmp_path / "cold" / name, {"clip": "FixedClip(0.2)"})
    assert replayed is not None


@pytest.mark.parametrize(("write", "name", "framework"), EXPORTS)
def test_it_has_a_report(write, name, framework, tmp_path, monkeypatch):
    """The page has the diagnosis, the figures of each rule, and the words of prime-rl's token ids."""
    for step in range(8, 12):
        write(tmp_path, step, batch(step, 0.7, moved=0.05), monkeypatch)
    page = write_report([tmp_path / name], tmp_path / "report.html")
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    (run,) = json.loads(text)["runs"]
    cold = diagnose(tmp_path / name).findings[0]
    assert run["findings"][0]["cause"] == cold.cause
    assert "clip 0.2" in run["rules"]
    assert run["tokens"]
    # miles has no token ids.
    assert bool(run["apart"]) == (framework == "prime-rl")
