"""Clip rules, methods and their loss. This folder imports torch and nothing of the others;
the files of `kernels` import triton too, and are imported by ``kernels=True`` alone.

It works under any name: copied into another codebase, it needs no change.
"""
