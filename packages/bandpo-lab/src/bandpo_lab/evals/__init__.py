"""Evaluation: sampling, grading, metrics and comparison. Optional libraries are imported when they are first used."""
