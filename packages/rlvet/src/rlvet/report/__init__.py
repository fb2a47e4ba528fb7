"""An HTML report on runs: their diagnosis, their curves, and the effect of clip rules on recorded tokens."""

from rlvet.report.page import write_report

__all__ = ["write_report"]
