"""Kernels in Triton for what costs most on a GPU; only ``kernels=True`` of a public function imports them.

They are in this folder, and not beside it, so that a copy of the folder has them too. No module imports triton when it
is imported, except for the files of the kernels, which the functions that launch them import. `_trial` decides whether
a kernel runs: its first results on a device are compared with those of the path without kernels.
"""

__all__: list[str] = []
