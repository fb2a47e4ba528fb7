"""`Trial`: a kernel runs if its first results agree, and otherwise one warning names the difference."""

import sys

import pytest
import torch

from bandpo.core.errors import BandWarning
from bandpo.core.kernels import _trial
from bandpo.core.kernels._trial import Trial, describe_difference, reason_against

EXPECTED = {"loss": torch.tensor(2.0), "clip decisions": torch.tensor([[True, False], [False, False]])}
TOLERANCES = {"loss": 1e-5}


def verdict(results, variant="float32 on cuda:0"):
    trial = Trial("compile_loss(…, kernels=True)")
    return trial.passed(variant, lambda: results, lambda: EXPECTED, TOLERANCES)


def test_equal_results_pass():
    assert verdict(EXPECTED)
    assert verdict(EXPECTED | {"loss": torch.tensor(2.00001)})


@pytest.mark.parametrize(
    ("results", "difference"),
    [
        ({"loss": torch.tensor(2.5)}, "loss differs by 0.5, and the tolerance is 1e-05 of 2"),
        ({"loss": torch.tensor(float("nan"))}, "loss is NaN at 1 of 1 places"),
        ({"loss": torch.tensor([2.0])}, r"loss has the shape \(1,\), and without kernels \(\)"),
        (
            {"clip decisions": torch.tensor([[True, False], [True, False]])},
            "clip decisions differ at 1 of 4 tokens, first at 2",
        ),
    ],
)
def test_a_difference_is_named_and_the_kernel_does_not_run(results, difference):
    message = rf"compile_loss\(…, kernels=True\) takes the path without kernels: {difference}"
    with pytest.warns(BandWarning, match=message):
        assert not verdict(EXPECTED | results)


def test_an_error_of_the_kernel_is_named():
    def fail():
        raise RuntimeError("ptxas: no such target")

    with pytest.warns(BandWarning, match="failed in its first call: RuntimeError: ptxas: no such target"):
        assert not Trial("x").passed("a", fail, lambda: EXPECTED, TOLERANCES)


def test_an_error_without_kernels_is_raised():
    def fail():
        raise ValueError("advantages hold nan")

    with pytest.raises(ValueError, match="advantages hold nan"):
        Trial("x").passed("a", lambda: EXPECTED, fail, TOLERANCES)


def test_each_variant_is_tried_once_and_warns_once():
    trial = Trial("x")
    calls = []

    def results():
        calls.append(1)
        return EXPECTED | {"loss": torch.tensor(3.0)}

    with pytest.warns(BandWarning):
        assert not trial.passed("a", results, lambda: EXPECTED, TOLERANCES)
    # A further warning would be an error.
    assert not trial.passed("a", results, lambda: EXPECTED, TOLERANCES)
    assert len(calls) == 1
    assert trial.verdict("a") is False
    assert trial.verdict("b") is None
    assert trial.passed("b", lambda: EXPECTED, lambda: EXPECTED, TOLERANCES)


def test_a_reason_is_given_once():
    trial = Trial("x")
    with pytest.warns(BandWarning, match="^x takes the path without kernels: a$"):
        trial.refuse("a")
    trial.refuse("a")
    with pytest.warns(BandWarning, match="^x takes the path without kernels: b$"):
        trial.refuse("b")


def test_nothing_runs_without_triton(monkeypatch):
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(_trial, "find_spec", lambda _: None)
    assert reason_against(torch.ones(1)) == "triton is not installed (pip install 'bandpo[kernels]')"


def test_other_devices_are_outside(monkeypatch):
    monkeypatch.setattr(_trial, "find_spec", lambda _: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert reason_against(torch.ones(1), None) == "kernels are for CUDA, and the tensors are on cpu"
    assert reason_against(torch.ones(1, device="meta")) == "kernels are for CUDA, and the tensors are on meta"
    assert "several devices: cpu, meta" in reason_against(torch.ones(1), torch.ones(1, device="meta"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert reason_against(torch.ones(1)) is None


def test_a_batch_with_nan_decides_nothing():
    trial = Trial("x")
    broken = EXPECTED | {"loss": torch.tensor(float("nan"))}
    assert not trial.passed("a", lambda: broken, lambda: broken, TOLERANCES)
    assert trial.passed("a", lambda: EXPECTED, lambda: EXPECTED, TOLERANCES)


def test_equal_infinities_do_not_differ():
    infinite = torch.tensor([1.0, -torch.inf])
    assert describe_difference("logp", infinite, infinite, 1e-5) is None
    assert describe_difference("logp", torch.tensor([1.0, 2.0]), infinite, 1e-5).startswith(
        "logp differs by inf"
    )


def test_a_result_may_be_empty():
    assert describe_difference("gradient", torch.empty(0), torch.empty(0), 0.0) is None


def test_the_warning_is_about_the_line_that_called():
    with pytest.warns(BandWarning) as caught:
        Trial("x").refuse("a")
    assert caught[0].filename == __file__
