"""The names of verl on which the integration depends: those that it calls, and those that it wraps.

A name may change in any version of verl. If one of `CALLED` is gone, importing the integration ends with an error that
names it, and so does wrapping one of `WRAPPED`. verl itself passes over the error of a plug-in, so the package
`bandpo.integrations.verl` prints it. What the names mean is compared by `bandpo.integrations.verl.probe`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from bandpo.core.errors import MissingPackage

TESTED = "0.9.0 and 0.9.1"
"""The versions of verl with which bandpo was tested."""

CALLED = {
    "verl.trainer.ppo.core_algos.register_policy_loss": "registers a policy loss by its name",
    "verl.trainer.ppo.core_algos.get_policy_loss_fn": "returns the policy loss of a name",
    "verl.trainer.ppo.core_algos.POLICY_LOSS_REGISTRY": "has all policy losses",
    "verl.trainer.ppo.core_algos.agg_loss": "averages a loss over tokens by loss_agg_mode",
    "verl.utils.config.omega_conf_to_dataclass": "constructs the settings of the actor",
    "verl.utils.metric.Metric": "has the values of a metric before they are reduced",
    "verl.utils.torch_functional.masked_mean": "averages the metrics of a loss",
    "verl.workers.config.PolicyLossConfig": "has the settings of a policy loss",
}
"""The names that the integration calls when it is imported or in each loss, each with its purpose.

Imported later, where they are called: ``verl.workers.utils.losses.ppo_loss`` and
``verl.utils.tensordict_utils.assign_non_tensor`` for the probe,
``verl.trainer.ppo.v1.trainer_base.tq.kv_batch_get`` for the ids of a recorded batch, and
``verl.trainer.ppo.rollout_corr_helper.compute_rollout_correction_and_rejection_mask`` for the check of a correction.
"""

WRAPPED = {
    "verl.utils.device.auto_set_device": "is called with the config at the start of each main, before Ray starts; "
    "the settings are then checked and announced",
    "verl.utils.metric.reduce_metrics": "averages the metrics of a step; the sums of the audit are taken out before, "
    "as a mean of rates is not the rate over all tokens",
    "verl.utils.tracking.Tracking.__init__": "opens the logs in the process that trains; they then go to the folder of "
    "the leg, and the check and the record of batches start",
    "verl.utils.tracking.Tracking.log": "logs the metrics of a step; they are then checked",
    "verl.trainer.ppo.ray_trainer.compute_advantage": "computes the advantages of a batch; it is then recorded and "
    "checked, in runs with one of bandpo's config classes alone",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage": "has the versions of the weights that sampled a "
    "batch; they are recorded with it, in the same runs",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.step": "makes a step; faults of the reward function in it are said, "
    "in the same runs",
    "verl.experimental.separation.ray_trainer.SeparateRayPPOTrainer._fit_compute_advantage": "has them in the "
    "one-step-off trainer",
}
"""The names that the integration wraps, each with verl's purpose and bandpo's addition.

verl has no call-back for any of these. All but the last four are wrapped on every ``import verl``, and return at once
in a run without bandpo. Each wrapper calls verl's function with the arguments that it got. If verl renames one, the
plug-in is not loaded, with a message on stderr, and a run with one of bandpo's config classes ends before Ray starts.
"""


def check_names() -> None:
    """Check that verl has every name of `CALLED`.

    Raises:
        ImportError: one is missing. The message has the version of verl and the name.
    """
    for name, meaning in CALLED.items():
        _owner(name, meaning)


def wrap(name: str) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator that puts a function in the place of one of `WRAPPED`, in all modules that have imported it.

    The decorated function gets verl's function as its first argument.

    Args:
        name: The name in `WRAPPED`.

    Raises:
        ImportError: verl has no such function. The message has the version of verl and the name.
    """
    owner, attribute = _owner(name, WRAPPED[name])
    original = getattr(owner, attribute)

    def replace(function: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def replacement(*arguments: Any, **named: Any) -> Any:
            return function(original, *arguments, **named)

        setattr(owner, attribute, replacement)
        for module in [*sys.modules.values()]:
            if getattr(module, "__dict__", {}).get(attribute) is original:
                module.__dict__[attribute] = replacement

    return replace


def _owner(name: str, meaning: str) -> tuple[Any, str]:
    """Return the module or class that has a name, and the last part of the name.

    Raises:
        ImportError: there is no such name. The message has the version of verl and the name.
    """
    path, _, attribute = name.rpartition(".")
    parent, _, cls = path.rpartition(".")
    is_method = cls[0].isupper()
    try:
        owner = import_module(parent if is_method else path)
        owner = getattr(owner, cls) if is_method else owner
        getattr(owner, attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        package = (error.name or "") if isinstance(error, ModuleNotFoundError) else "verl"
        if package.partition(".")[0] != "verl":
            raise
        # Not at the top: importing verl loads other plug-ins, which may need this module.
        import verl

        raise MissingPackage(
            f"verl {verl.__version__} has no {name}, which in verl {TESTED} {meaning}; install one of these versions"
        ) from error
    return owner, attribute
