"""Prepare problem sets from public hubs, local files or generators for trainers and `bandpo-lab eval`.

How answers are graded is not here, but in `bandpo_lab.evals`.
"""
