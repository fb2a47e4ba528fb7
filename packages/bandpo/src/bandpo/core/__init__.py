"""Clip rules, methods and their loss. This folder imports torch and nothing of the others.

It works under any name: copied into another codebase, it needs no change. The files of `kernels` import triton too, and
``kernels=True`` alone imports them.
"""
