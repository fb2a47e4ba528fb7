"""Triton interprets the kernels on the CPU. It reads the variable when it is imported, so it is set before any test."""

import os

os.environ["TRITON_INTERPRET"] = "1"
