"""One batch for loss, audit, check and recorder; the signature of the loss; and what a loss costs in eager mode."""

import inspect
import pydoc
import weakref

import pytest
import torch
from core.test_sequences import FORMS, pack, padded_batch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bandpo import Batch, Packed, Rows, certify, linear_logp, parse, policy_loss
from bandpo.audit import Audit, Recorder
from bandpo.core.linear import LinearLogp
from helpers.losses import batch_loss
from rlvet.records.record import read_record

COLUMNS = ("log_ratio", "logp_old", "advantages", "entropy", "mask", "logp_rollout")


@pytest.mark.parametrize("form", ["padded", *FORMS])
def test_a_batch_serves_loss_audit_check_and_recorder(form, tmp_path):
    pytest.importorskip("pyarrow")
    tensors, inside = padded_batch(20)
    tensors["logp_anchor"] = tensors["logp_old"] - 0.1
    packed, where = pack(tensors, inside, form) if form != "padded" else (tensors, {})
    batch = Batch.read(**packed, **where)
    method = parse("BandPO()")
    loss = batch_loss(**packed, **where, method=method).loss
    assert torch.equal(method.loss(batch).loss, loss)
    of_logp = lambda logp: batch_loss(**packed | {"logp": logp}, **where, method=method).loss  # noqa: E731
    assert certify(of_logp, batch, method=method).equal
    assert Audit.from_batch(batch, method=method).metrics()["tokens"] == tensors["mask"].sum()

    # The record is that of the tensors, with the anchor as the engine's log-probabilities.
    given = {name: packed[name] for name in ("logp", "logp_old", "advantages", "mask", "entropy")}
    with Recorder(tmp_path / "batch", method=method, anchor="rollout") as recorder:
        recorder.add(batch, step=1)
    with Recorder(tmp_path / "tensors", method=method, anchor="rollout") as recorder:
        recorder.add(**given, **where, logp_rollout=packed["logp_anchor"], step=1)
    (one,), (other,) = (list(read_record(tmp_path / name)) for name in ("batch", "tensors"))
    for name in COLUMNS:
        assert (getattr(one, name)[one.mask] == getattr(other, name)[other.mask]).all(), name


def test_a_recorder_takes_a_batch_or_tensors(tmp_path):
    pytest.importorskip("pyarrow")
    logp = torch.full((1, 2), -1.0)
    batch = Batch.read(logp, logp, torch.ones(1))
    with Recorder(tmp_path) as recorder:
        with pytest.raises(ValueError, match="the batch has its own mask, layout: leave them out"):
            recorder.add(batch, mask=torch.ones(1, 2), layout=Rows())
        with pytest.raises(ValueError, match="add needs a batch, or logp_old= and advantages="):
            recorder.add(logp=logp)


def test_a_batch_without_log_probabilities_has_no_loss():
    logp = torch.full((1, 2), -1.0)
    batch = Batch.read(logp, logp, torch.ones(1))._replace(logp=None)
    with pytest.raises(ValueError, match="has no loss"):
        parse("GRPO()").loss(batch)
    with pytest.raises(ValueError, match="its gradient cannot be compared"):
        certify(lambda x: x.sum(), batch)


@pytest.mark.parametrize("layout", ["rows", torch.tensor([0, 2]), Rows, {"segments": None}])
def test_what_is_no_layout_is_refused(layout):
    logp = torch.full((1, 2), -1.0)
    with pytest.raises(TypeError, match=r"layout must be Rows\(\), Packed"):
        policy_loss(logp, logp, torch.ones(1), layout=layout)


def test_jagged_tensors_bring_their_own_layout():
    ends = torch.tensor([0, 2, 3])
    logp = torch.nested.nested_tensor_from_jagged(torch.full((3,), -1.0), ends)
    for layout in (Rows(), Packed(cu_seqlens=ends)):
        with pytest.raises(TypeError, match="leave out layout="):
            policy_loss(logp, logp, torch.ones(2), layout=layout)


def test_the_signature_can_be_learned_in_a_minute():
    assert len(inspect.signature(policy_loss).parameters) <= 11
    page = pydoc.plain(pydoc.render_doc(policy_loss))
    assert len(page.splitlines()) <= 100


def test_linear_logp_returns_names():
    hidden, head, ids = torch.randn(2, 3, 4), torch.randn(9, 4), torch.zeros(2, 3, dtype=torch.long)
    plain = linear_logp(hidden, head, ids)
    full = linear_logp(hidden, head, ids, entropy=True, top=2)
    assert (type(plain), plain.entropy, plain.top) == (LinearLogp, None, None)
    assert torch.equal(plain.logp, full.logp)
    assert full.entropy.shape == full.top.shape == ids.shape


# Eager mode, as on an accelerator: values are not read.

VIEWS = ("view", "expand", "unsqueeze", "squeeze", "detach", "alias", "select", "unbind", "_unsafe_view")
"""Beginnings of the names of operations that launch nothing."""
NO_LAUNCH = (*VIEWS, "scalar_tensor", "is_same_size", "_local_scalar_dense")


class Cost(TorchDispatchMode):
    """Counts operations that are no views, and the largest size of the storage that lives at once."""

    def __init__(self, inputs):
        super().__init__()
        self.launches = 0
        self.peak = 0
        self._now = 0
        self._sizes = {x.untyped_storage().data_ptr(): 0 for x in inputs}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.launches += not str(operation).removeprefix("aten.").startswith(NO_LAUNCH)
        for x in tree_leaves(result):
            if not isinstance(x, torch.Tensor):
                continue
            storage = x.untyped_storage()
            pointer = storage.data_ptr()
            if pointer not in self._sizes:
                self._sizes[pointer] = storage.nbytes()
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, pointer)
        self.peak = max(self.peak, self._now)
        return result

    def _free(self, pointer):
        self._now -= self._sizes.pop(pointer)


def textbook(logp, logp_old, advantages, mask):
    """Compute PPO's clip as textbooks do, with the five metrics of `bandpo.policy_loss`."""
    ratio = torch.exp(logp - logp_old)
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    count = mask.sum()
    loss = -(surrogate * mask).sum() / count
    with torch.no_grad():
        shares = (
            (ratio > 1.2) & (advantages > 0),
            (ratio < 0.8) & (advantages < 0),
            (ratio > 10) & (advantages < 0),
        )
        metrics = [(share.float() * mask).sum() / count for share in shares]
        metrics.append((ratio * mask).sum() / count)
        metrics.append(((ratio - 1 - (logp - logp_old)) * mask).sum() / count)
    return loss, metrics


def cost_of(loss):
    random = torch.Generator().manual_seed(0)
    old = -torch.empty(64, 1024).exponential_(0.5, generator=random)
    new = (old + 0.3 * torch.randn(old.shape, generator=random)).clamp(max=-1e-6)
    rest = (
        old,
        torch.randn(old.shape, generator=random),
        (torch.rand(old.shape, generator=random) > 0.1).float(),
    )
    leaf = new.requires_grad_()
    with Cost([leaf, *rest]) as cost:
        loss(leaf, *rest)[0].backward()
    return cost.launches, cost.peak / (4 * old.numel())


@pytest.mark.parametrize(
    ("text", "metrics", "launches", "peak"),
    [
        ("FixedClip(0.2)", True, 0.95, 9.0),
        ("GRPO()", True, 1.05, 9.0),
        ("Band(KL(), 0.05)", True, 1.9, 13.0),
        ("BandPO()", True, 2.05, 13.0),
        ("BandPO()", False, 0.95, 9.0),
        ("Band(TotalVariation(), 0.05)", True, 1.5, 13.0),
    ],
)
def test_launches_and_memory_against_the_textbook_s(text, metrics, launches, peak, monkeypatch):
    monkeypatch.setattr("bandpo.core._checks.values_can_be_read", lambda x: False)
    expected, _ = cost_of(textbook)
    method = parse(text)
    found, tensors = cost_of(
        lambda *tensors: policy_loss(*tensors, method=method, layout=Rows(), metrics=metrics)
    )
    assert found <= launches * expected
    assert tensors <= peak


def test_transforms_of_torch_func_are_refused():
    logp, old = torch.full((1, 2), -1.0), torch.full((1, 2), -1.2)

    def loss(x):
        return policy_loss(x, old, torch.ones(1), method="GRPO()").loss

    with pytest.raises(ValueError, match=r"no transforms of torch.func, .* use loss.backward\(\)"):
        torch.func.grad(loss)(logp)


def test_on_a_cpu_only_tokens_beyond_a_bound_are_solved_for():
    _, tensors = cost_of(lambda *tensors: policy_loss(*tensors, method="BandPO()", layout=Rows()))
    assert tensors <= 9.1
