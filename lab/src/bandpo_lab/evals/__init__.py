"""Evaluation: grading, sampling, metrics and comparing. Each file loads its libraries when it is used."""
