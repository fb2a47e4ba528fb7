"""A network of 335k parameters that one process trains in seconds, and comparisons of methods on it.

No trainer of a framework is here: see `bandpo_lab.training`, and `bandpo_lab.study` for comparisons that use it.
"""
