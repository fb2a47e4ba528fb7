"""Evaluation: sampling, grading, metrics and comparison. Optional libraries are imported when they are first used.

No model is trained here, and nothing is prepared: see `bandpo_lab.training` and `bandpo_lab.data`.
"""
