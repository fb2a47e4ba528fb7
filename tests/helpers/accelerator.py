"""Run losses on an accelerator that is not there, and print what would copy from or to the host, or wait for it.

    python tests/helpers/accelerator.py

Tensors are fake: they have shapes and a device, and no values. An operation that needs values raises. It is a program
of its own, since a process can register such a device once.
"""

import os
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from bandpo import Batch, Packed, linear_logp, parse, policy_loss, rollout_weights
from bandpo.audit import Audit
from bandpo.core.methods import METHODS
from bandpo.core.text import as_method

DEVICE = "absent"
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")
"""Operations whose result depends on values, so that the host waits for the device."""


class HostTraffic(TorchDispatchMode):
    """Collects the operations that copy between host and device, or wait for values."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if str(operation).startswith(WAITS):
            self.operations.append(str(operation))
        results = operation(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, results)) if isinstance(x, torch.Tensor)]
        # A number as a tensor without dimensions is an argument of a kernel, and not copied.
        devices = {x.device.type for x in tensors if x.dim() or x.device.type == DEVICE}
        if len(devices) > 1:
            self.operations.append(str(operation))
        return results


def empty(*shape, dtype=torch.float32, **settings):
    return torch.empty(*shape, dtype=dtype, device=DEVICE, **settings)


def loss_of(method):
    logp = empty(4, 6, requires_grad=True)
    tensors = empty(4, 6), empty(4), empty(4, 6)
    loss, metrics = as_method(method).loss(
        Batch.read(logp, *tensors, entropy=empty(4, 6), weights=empty(4, 6), logp_anchor=empty(4, 6))
    )
    loss.backward()
    assert {x.device.type for x in (logp.grad, *metrics.values())} == {DEVICE}


def audit_of(method):
    Audit.from_batch(
        Batch.read(empty(4, 6), empty(4, 6), empty(4), empty(4, 6), entropy=empty(4, 6)), method=method
    )


def packed_loss_of(method):
    logp = empty(1, 24, requires_grad=True)
    ends = empty(5, dtype=torch.int64)
    policy_loss(logp, empty(1, 24), empty(4), method=method, layout=Packed(cu_seqlens=ends)).loss.backward()
    segments = empty(1, 24, dtype=torch.int64)
    policy_loss(
        logp, empty(1, 24), empty(1, 24), method=method, layout=Packed(segments=segments)
    ).loss.backward()


def log_probabilities():
    linear_logp(empty(2, 3, 8), empty(50, 8), empty(2, 3, dtype=torch.int64), entropy=True, top=4)


def weights_of_a_rollout():
    for mode in ("token_truncate", "sequence_mask"):
        rollout_weights(empty(4, 6), empty(4, 6), empty(4, 6), mode=mode)
        rollout_weights(
            empty(1, 24), empty(1, 24), mode=mode, layout=Packed(cu_seqlens=empty(5, dtype=torch.int64))
        )


def planted_copy():
    empty(4, 6) + empty(4, 6).new_tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def planted_wait():
    (empty(4, 6) > 0).nonzero()


def main():
    _setup_privateuseone_for_python_backend(DEVICE)
    cases = {"planted copy": planted_copy, "planted wait": planted_wait, "linear_logp": log_probabilities}
    cases["rollout_weights"] = weights_of_a_rollout
    methods = [f"{name}()" for name in METHODS] + [
        "Band(TotalVariation(), 0.1)",
        "Band(JensenShannon(), 0.02)",
        "Method(TwoSided(BalancedBounds(), Band()), ClippedWeight())",
        "Loosest(PrefixBudget(Band(KL(), 0.05)), SecondMoment())",
    ]
    for text in methods:
        method = parse(text)
        cases[f"loss {text}"] = lambda method=method: loss_of(method)
        cases[f"audit {text}"] = lambda method=method: audit_of(method)
        cases[f"packed loss {text}"] = lambda method=method: packed_loss_of(method)
    for name, run in cases.items():
        with FakeTensorMode(), HostTraffic() as traffic:
            try:
                run()
            except Exception as error:
                traffic.operations.append(f"{type(error).__name__} {str(error).partition(chr(10))[0]}")
        print(f"{name}: {', '.join(traffic.operations) or 'nothing'}")


if __name__ == "__main__":
    main()
    # The thread that autograd keeps for the made-up device can abort the interpreter's shutdown.
    sys.stdout.flush()
    os._exit(0)
