"""What a method did to the tokens of a batch, and records of tokens.

Nothing here reads a record from disk: rlvet does, and `bandpo.replay` has what others would do with one.
"""

from bandpo.audit.metrics import Audit
from bandpo.audit.recorder import Recorder

__all__ = ["Audit", "Recorder"]
