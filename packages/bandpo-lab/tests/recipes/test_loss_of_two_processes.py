"""FSDP2 over two processes (gloo): a method's gradient is that of one process with the whole batch."""

import os
import subprocess
import sys

import pytest

from helpers.frameworks import needs
from helpers.ports import free_port

needs("verl")

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig
from bandpo.integrations.verl import BandPolicyLossConfig
from bandpo_lab.rehearsal.inputs import write_model

folder, method, mode = sys.argv[1:]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

# Eight sequences with ragged lengths, of which each process has its part, the second one the longer ones.
generator = torch.Generator().manual_seed(1)
tokens = torch.randint(0, 250, (8, 13), generator=generator)
lengths = torch.tensor([1, 2, 3, 4, 9, 10, 11, 12]).unsqueeze(1)
mask = torch.arange(12) < lengths
advantages = torch.randn(8, 1, generator=generator).expand(8, 12)
noise = 1.5 * torch.randn(8, 12, generator=generator)
sizes = {"dp_size": world, "batch_num_tokens": int(mask.sum()), "global_batch_size": 8, "loss_scale_factor": 12}
config = ActorConfig(
    strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=BandPolicyLossConfig(method=method)
)
config.global_batch_info.update(sizes)
loss_of = get_policy_loss_fn("band")

def log_probs(model, rows):
    logits = model(rows[:, :-1]).logits.float()
    return logits.log_softmax(-1).gather(-1, rows[:, 1:, None]).squeeze(-1)

def gradient(model, rows):
    new = log_probs(model, tokens[rows])
    loss, metrics = loss_of(
        old_log_prob=(new.detach() + noise[rows]).clamp(max=-1e-6), log_prob=new, advantages=advantages[rows],
        response_mask=mask[rows], loss_agg_mode=mode, config=config,
    )
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        full = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        found[name] = full
    return found, metrics

whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
config.global_batch_info["dp_size"] = 1
expected, metrics = gradient(whole, slice(None))
# The method stops tokens of either sign.
assert metrics["actor/clip_high"] > 0.005, metrics["actor/clip_high"]
assert metrics["actor/clip_low"] > 0.005, metrics["actor/clip_low"]

config.global_batch_info["dp_size"] = world
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
mesh = init_device_mesh("cpu", (world,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
rows = slice(4 * rank, 4 * rank + 4)
found, _ = gradient(model, rows)
largest = max(value.abs().max() for value in expected.values())
assert largest > 0
for name, value in expected.items():
    torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6 * largest.item(), msg=lambda text: name + text)
print(f"rank {rank}: {len(expected)} gradients agree")
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("FixedClip(0.2, 0.2)", "token-mean"),
        ("BandAbove()", "seq-mean-token-mean"),
        ("DAPO()", "token-mean"),
    ],
)
def test_a_gradient_over_two_processes_is_that_of_one(method, mode, tmp_path):
    from bandpo_lab.rehearsal.inputs import write_model

    write_model("Qwen/Qwen2.5-3B-Instruct", tmp_path / "model")
    port = free_port()
    processes = []
    for rank in range(2):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment["MASTER_PORT"] = port
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "model"), method, mode]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, output[-3000:]
        assert f"rank {rank}: " in output
        assert "gradients agree" in output
