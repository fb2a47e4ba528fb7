"""The folder core, copied alone into another codebase: it works under the other name, with the same numbers."""

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bandpo

CORE = Path(bandpo.__file__).parent / "core"


def results(package):
    """Return losses, gradients, bounds, text forms and messages of the core that is imported as ``package``."""
    import importlib
    import warnings

    import torch

    def module(name):
        return importlib.import_module(f"{package}.{name}")

    rules, text, methods = module("rules"), module("text"), module("methods")
    generator = torch.Generator().manual_seed(0)
    logp_old = -5 * torch.rand(4, 7, generator=generator) - 0.01
    logp = (logp_old + 0.4 * torch.randn(4, 7, generator=generator)).clamp(max=-1e-3)
    advantages = torch.randn(4, generator=generator)
    mask = (torch.arange(7) < torch.tensor([[7], [3], [1], [5]])).float()

    def bits(tensor):
        return [x.hex() for x in tensor.flatten().tolist()]

    def loss_of(method):
        leaf = logp.clone().requires_grad_()
        outputs = module("loss").policy_loss(leaf, logp_old, advantages, mask, method=method)
        (gradient,) = torch.autograd.grad(outputs.loss, leaf)
        return [bits(outputs.loss), bits(gradient), {k: bits(v) for k, v in outputs.metrics.items()}]

    class Mine(rules.ClipRule):
        def bounds(self, logp):
            return module("bounds").RatioBounds(torch.full_like(logp, -0.2), 3 - logp)

    Mine.__module__ = "mine"
    Mine.__qualname__ = "Mine"
    found = {"BandPO": loss_of(methods.BandPO())}
    found["text"] = loss_of("Method(Band(PearsonChi2, 0.02, inf), DualClip(3))")
    found["bounds"] = bits(module("bounds").ratio_bounds(logp_old, module("divergences").KL(), 0.05).upper)
    found["texts"] = {name: text.as_text(paper.method()) for name, paper in methods.METHODS.items()}
    found["parsed"] = [str(text.parse(form, imports=False)) for form in found["texts"].values()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for paper in methods.METHODS.values():
            module("rule_check").check(paper.method())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module("rule_check").check(Mine())
    found["warned"] = [str(warning.message).partition(">")[2] for warning in caught]
    found["own class"] = text.as_text(Mine())
    try:
        text.parse("Bnad(KL())")
    except module("errors").InvalidValue as error:
        found["error"] = str(error)
    return found


PACKAGES = ["theirs.clip", "clip", "theirs._vendor.clip"]
"""As a package, at the top, and within a folder whose name begins with an underscore."""


@pytest.fixture(scope="module")
def in_their_process(tmp_path_factory):
    """Return the results of each copy, in a process that cannot import bandpo."""
    folder = tmp_path_factory.mktemp("copies")
    for package in PACKAGES:
        copy = folder / package.replace(".", "/")
        shutil.copytree(CORE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    script = f"""
import json, sys
sys.path.insert(0, {str(folder)!r})
sys.modules.update(dict.fromkeys(["bandpo", "rlvet", "bandpo_lab"]))
{inspect.getsource(results)}
print(json.dumps({{package: results(package) for package in {PACKAGES}}}))
"""
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow  # a process imports torch
@pytest.mark.parametrize("package", PACKAGES)
def test_the_folder_alone_has_the_same_numbers(package, in_their_process):
    expected = results("bandpo.core")
    assert len(expected["warned"]) == 1
    assert expected["own class"] == "mine.Mine()"
    assert in_their_process[package] == expected
