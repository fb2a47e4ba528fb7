"""What docs/frameworks.md states about rLLM's main branch, whose losses are those of verl's registry.

rLLM constructs verl's settings of the actor in its driver, and sends them to verl's workers with a loss that calls
verl's `ppo_loss`. Its main branch needs verl 0.8.0, which does not load bandpo by itself. So the tests do the same in
two processes, the second of which imports verl without its plugins.
"""

import importlib.metadata
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.frameworks import CLONES, needs

needs("verl", oldest="0.8.0")  # what rLLM's main branch needs

from verl.workers.config import ActorConfig

from bandpo import parse, policy_loss
from bandpo.integrations.verl import BandPolicyLossConfig
from contract import make_batch
from pages import section

TEXT = section("rLLM")

WORKER = """
import pickle, sys, torch
from functools import partial
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils
from verl.workers.utils.losses import ppo_loss

assert "band" not in POLICY_LOSS_REGISTRY
assert not [name for name in sys.modules if name.partition(".")[0] == "bandpo"]
config, lengths, logp, logp_old, advantages = pickle.load(open(sys.argv[1], "rb"))
assert "band" in POLICY_LOSS_REGISTRY

def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

def cut(tensor):
    return nested(row[:n] for row, n in zip(tensor, lengths, strict=True))

leaf = logp.clone().requires_grad_()
data = TensorDict(
    {
        "prompts": nested(torch.ones(2, dtype=torch.long) for _ in lengths),
        "responses": nested(torch.ones(n, dtype=torch.long) for n in lengths),
        "response_mask": cut(torch.ones_like(logp)),
        "old_log_probs": cut(logp_old),
        "advantages": cut(advantages),
    },
    batch_size=[len(lengths)],
)
counts = {"batch_num_tokens": sum(lengths), "global_batch_size": len(lengths)}
tensordict_utils.assign_non_tensor(data, dp_size=1, **counts)
# The model's log-probability of a token is at the position before the token; a prompt has two tokens.
zero = torch.zeros(1, dtype=logp.dtype)
rows = [torch.cat([zero, row[:n], zero]) for row, n in zip(leaf, lengths, strict=True)]
loss, metrics = ppo_loss(config, {"log_probs": torch.cat(rows)}, data)
loss.backward()
pickle.dump((loss.item(), leaf.grad, sorted(metrics)), open(sys.argv[2], "wb"))
"""


def evaluate_in_worker(folder, config, batch):
    """Return the loss, its gradient and the names of its metrics, from a process that got the settings by pickle."""
    request, answer = folder / "request.pkl", folder / "answer.pkl"
    advantages = batch.advantages[:, None].expand_as(batch.mask).contiguous()
    tensors = (batch.logp.detach(), batch.logp_old, advantages)
    request.write_bytes(pickle.dumps((config, batch.lengths, *tensors)))
    environment = os.environ | {"VERL_USE_EXTERNAL_PLUGINS": "none"}
    subprocess.run([sys.executable, "-c", WORKER, request, answer], env=environment, check=True, cwd=folder)
    return pickle.loads(answer.read_bytes())  # noqa: S301  (of the process above)


def test_the_settings_bring_the_loss_into_a_worker_that_loads_no_plugins(tmp_path):
    # As the page has them: both settings, and no audit.
    overrides = dict(re.findall(r"policy_loss\.(\w+)=('.*?'|[\w.]+)", TEXT))
    assert overrides["_target_"] == "bandpo.integrations.verl.BandPolicyLossConfig"
    assert overrides["audit"] == "false"
    method = overrides["method"].strip("'")
    loss = BandPolicyLossConfig(method=method, audit=False)
    config = ActorConfig(strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, policy_loss=loss)

    batch = make_batch(31, spread=1.0, dtype=torch.float64)
    value, gradient, metrics = evaluate_in_worker(tmp_path, config, batch)

    expected = policy_loss(batch.logp, batch.logp_old, batch.advantages, batch.mask, method=method)
    [expected_gradient] = torch.autograd.grad(expected.loss, batch.logp)
    assert value == pytest.approx(expected.loss.item())
    torch.testing.assert_close(gradient, expected_gradient)
    assert (gradient == 0)[batch.mask > 0].any()
    assert "actor/clip_high" in metrics
    assert not [name for name in metrics if "audit" in name]


def test_the_method_of_the_page_is_one():
    [method] = set(re.findall(r"policy_loss\.method='(.*?)'", TEXT))
    assert parse(method).aggregation


CLONE = Path(os.environ.get(CLONES, "unset")) / "rllm-main"
needs_clone = pytest.mark.skipif(
    not CLONE.is_dir(), reason=f"needs a clone of rLLM's main branch called rllm-main in ${CLONES}"
)

DRIVER = """
import sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rllm.trainer.verl.utils import sync_config
from verl.utils.config import omega_conf_to_dataclass

overrides = sys.argv[2:]
with initialize_config_dir(sys.argv[1], version_base=None):
    config = compose("unified", ["rllm/backend=verl", *overrides])
sync_config(config, hydra_overrides=overrides)
OmegaConf.resolve(config)
loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss
print(type(loss).__name__, loss.loss_mode, loss.method, loss.audit)
"""


def run(*command, **kwargs):
    """Run Python with these arguments, and return what it prints last."""
    process = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True, **kwargs)
    return process.stdout.splitlines()[-1]


@needs_clone
@pytest.mark.skipif(
    not importlib.metadata.version("verl").startswith("0.8."), reason="rLLM's configuration is of verl 0.8"
)
def test_the_overrides_reach_verls_settings():
    overrides = re.findall(r'"?(\+?actor_rollout_ref\.actor\.policy_loss\.[^"\\\n]+)', TEXT)
    overrides = [override.strip() for override in overrides][:3]
    # verl requires a size of the micro-batches.
    overrides.append("actor_rollout_ref.actor.use_dynamic_bsz=true")
    environment = os.environ | {"PYTHONPATH": f"{CLONE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    text = run("-c", DRIVER, CLONE / "rllm/trainer/config", *overrides, env=environment)
    assert text == "BandPolicyLossConfig band BandAbove() False"
