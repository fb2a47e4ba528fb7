"""An HTML report on runs: their diagnosis, their curves, and the effect of clip rules on recorded tokens.

Nothing is judged here: findings come from `rlvet.checks` and `rlvet.records`.
"""

from rlvet.report.page import write_report

__all__ = ["write_report"]
