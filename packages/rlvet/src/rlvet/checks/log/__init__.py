"""Checks of the metrics in a run's log, a file for each subject. Only the standard library is needed."""
