"""`bandpo-lab train` with vLLM in the process, started without compilation and CUDA graphs.

    python scripts/train_eagerly.py --config recipes/small/one-card-trl.yaml --method 'BandPO()'

TRL 1.16 has no option for it: its call of ``vllm.LLM`` does not set ``enforce_eager``. A short run is over before
compiling has paid off.
"""

from __future__ import annotations

import functools
import importlib.util
import sys

from bandpo_lab.cli import main
from bandpo_lab.errors import MissingPackage


def start_eagerly() -> None:
    """Let TRL start vLLM with ``enforce_eager=True``.

    Raises:
        ImportError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingPackage(
            "vLLM is not installed, and TRL generates with it in this process: pip install vllm==0.24.0"
        )
    from trl.generation import vllm_generation

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, enforce_eager=True)


if __name__ == "__main__":
    try:
        start_eagerly()
    except MissingPackage as error:
        sys.exit(str(error))
    sys.argv = ["bandpo-lab", "train", *sys.argv[1:]]
    main()
