"""`bandpo-lab study`: compare clip rules over seeds and settings, and report the results.

A single training is not here, but in `bandpo_lab.training`.
"""
