"""Train any method with TRL's GRPOTrainer, and audit any GRPOTrainer."""

from bandpo.integrations.trl.audit import AuditedGRPOTrainer, AuditMixin
from bandpo.integrations.trl.config import BandGRPOConfig
from bandpo.integrations.trl.trainer import BandGRPOTrainer

__all__ = ["AuditMixin", "AuditedGRPOTrainer", "BandGRPOConfig", "BandGRPOTrainer"]
