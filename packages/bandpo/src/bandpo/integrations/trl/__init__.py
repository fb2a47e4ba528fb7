"""Train any method with TRL's GRPOTrainer or AsyncGRPOTrainer, and audit any GRPOTrainer.

What another framework needs too is not here, but in the folder above.
"""

from typing import TYPE_CHECKING, Any

from bandpo.integrations.trl.audit import AuditedGRPOTrainer, AuditMixin
from bandpo.integrations.trl.config import BandGRPOConfig
from bandpo.integrations.trl.trainer import BandGRPOTrainer

if TYPE_CHECKING:
    from bandpo.integrations.trl.async_config import BandAsyncGRPOConfig
    from bandpo.integrations.trl.async_trainer import BandAsyncGRPOTrainer

__all__ = [
    "AuditMixin",
    "AuditedGRPOTrainer",
    "BandAsyncGRPOConfig",
    "BandAsyncGRPOTrainer",
    "BandGRPOConfig",
    "BandGRPOTrainer",
]


def __getattr__(name: str) -> Any:
    # TRL warns when its experimental part is imported, and older versions have none of the classes.
    if name == "BandAsyncGRPOConfig":
        from bandpo.integrations.trl.async_config import BandAsyncGRPOConfig

        return BandAsyncGRPOConfig
    if name == "BandAsyncGRPOTrainer":
        from bandpo.integrations.trl.async_trainer import BandAsyncGRPOTrainer

        return BandAsyncGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
