"""Any method as a policy loss of verl, without changes to verl: install bandpo and add two overrides.

    actor_rollout_ref.actor.policy_loss._target_=bandpo.integrations.verl.BandPolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.method='SAPO(1.0, 1.05)'

verl loads the entry points of the group ``verl.plugins``, of which this module is one, on every ``import verl``, in
Ray's workers too. So bandpo must be installed on every node, and this module imports no more than it needs.
"""

from bandpo.integrations.verl.loss import (
    AuditedPolicyLossConfig,
    BandPolicyLossConfig,
    audited,
    band,
    loss_method,
)

__all__ = ["AuditedPolicyLossConfig", "BandPolicyLossConfig", "audited", "band", "loss_method"]
