"""What a method did to the tokens of a batch, and records of tokens."""

from bandpo.audit.metrics import Audit
from bandpo.audit.recorder import Recorder

__all__ = ["Audit", "Recorder"]
