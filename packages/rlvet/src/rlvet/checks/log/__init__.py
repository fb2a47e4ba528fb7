"""Checks of the metrics in a run's log, a file for each subject. Only the standard library is needed.

What runs the checks, and the statistics of a course, are not here, but in the folder above.
"""
