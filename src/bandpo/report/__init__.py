"""One page on one run or several: what is wrong, the curves, and what rules do to the recorded tokens."""

from bandpo.report.page import write_report

__all__ = ["write_report"]
