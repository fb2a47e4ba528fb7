"""Any method as a policy loss of verl, without changes to verl: install bandpo and add two overrides.

    actor_rollout_ref.actor.policy_loss._target_=bandpo.integrations.verl.BandPolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.method='SAPO(1.0, 1.05)'

verl loads the entry points of the group ``verl.plugins``, of which this module is one, on every ``import verl``, in
Ray's workers too. So bandpo must be installed on every node, and this module imports no more than it needs.

- **What verl computes.** Its workers call ``ppo_loss`` with the output of the model. It calls the policy loss that
  ``loss_mode`` names, from a registry, and adds KL term and entropy bonus.
- **What bandpo adds.** `bandpo.integrations.verl.loss` registers two losses: ``band`` computes a method, ``audited``
  calls a loss of verl's own and reports sums over its tokens. Their settings are two dataclasses, which hydra
  constructs in verl's driver and in each worker.
- **What is wrapped.** verl has no call-back for a whole run's settings, for sums among its metrics, or for a batch
  before its update. `bandpo.integrations.verl.driver` wraps functions for these. The table of what and why is in
  `bandpo.integrations.verl.verl_names`.
- **What a record has.** Each worker writes the tokens of its losses, and finds what only the driver knows of them
  among the driver's batches, see `bandpo.integrations.verl.record`.
- **If verl changes.** A missing name stops the import of this package, with one sentence on stderr, as verl passes over
  the error. Before training, in the driver and in each worker, `bandpo.integrations.verl.probe` compares the gradient
  of ``ppo_loss`` with that of the settings.
"""

import sys

try:
    from bandpo.integrations.verl.verl_names import check_names

    check_names()
    from bandpo.integrations.verl.loss import (
        AuditedPolicyLossConfig,
        BandPolicyLossConfig,
        audited,
        band,
        check_run,
        loss_method,
    )
except Exception as error:
    # verl logs the error of a plug-in at DEBUG only, and hydra leaves out the cause of a _target_ without a class.
    if "verl" in sys.modules:
        sentence = f"bandpo: its plug-in for verl is not loaded: {type(error).__name__}: {error}"
        print(sentence, file=sys.stderr, flush=True)
    raise

__all__ = [
    "AuditedPolicyLossConfig",
    "BandPolicyLossConfig",
    "audited",
    "band",
    "check_run",
    "loss_method",
]
