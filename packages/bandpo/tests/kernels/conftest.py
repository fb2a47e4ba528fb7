"""Triton interprets the kernels on the CPU."""

import os

# Triton reads it when it is imported, which torch and test modules may do. So it is set before they are collected.
os.environ["TRITON_INTERPRET"] = "1"
