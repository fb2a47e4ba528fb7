"""Compile the kernels of the token loss for an H100 without a GPU, and count the instructions of a token.

    PYTHONPATH=packages/bandpo/src python benchmarks/kernel_instructions.py --output FILE

Needs Triton, whose wheel brings NVIDIA's assembler and disassembler. The variant is that which runs on a card, with its
approximate instructions. Instructions are those of the machine, counted once as they stand, and divided by the tokens
of a lane. Those within a loop are counted apart: a pass of the loop solves for 32 roots.
"""

import argparse
import json
import re
import subprocess
import tempfile
from datetime import date
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bandpo.core.kernels import _token_kernels as token_kernels
from bandpo.core.kernels._token_loss import BLOCK_SIZES, CHUNK

TARGET = GPUTarget("cuda", 90, 32)  # H100 and H200
LANES = 32
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TENSORS = {"mask": "*i1", "counts": "*i32"}
NUMBERS = {"time": "i32", "blocks": "i32", "rows": "i32"}
FLOATS = ("lower", "upper", "log_cap", "max_ratio", "normalizer_number")
BOUNDS = {
    "Band(KL())": {"LOWER": "kl", "UPPER": "kl", "DUAL": False},
    "BandPO()": {"LOWER": "kl", "UPPER": "kl", "DUAL": True},
    "BandAbove()": {"LOWER": "fixed", "UPPER": "kl", "DUAL": False},
    "Band(TotalVariation())": {"LOWER": "tv", "UPPER": "tv", "DUAL": False},
    "Band(PearsonChi2())": {"LOWER": "chi2", "UPPER": "chi2", "DUAL": False},
    "FixedClip()": {"LOWER": "fixed", "UPPER": "fixed", "DUAL": False},
}
"""The variants of the forward kernel, by a method that has it."""


class Count(NamedTuple):
    """The instructions of a compiled kernel, without those that do nothing."""

    straight: int
    """Instructions outside of loops."""
    loop: int
    """Instructions within loops."""
    registers: int
    """Registers of a lane."""
    spilled: int
    """Bytes of a lane that did not fit into registers."""


def argument_type(name):
    """Return Triton's type of an argument of the kernels."""
    if name in FLOATS:
        return "fp32"
    return NUMBERS.get(name) or TENSORS.get(name, "*fp32")


def compiled(kernel, constants, warps=1):
    """Return the machine code of a kernel for rows whose length is a multiple of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else argument_type(name) for name in names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name == "time"]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=TARGET, options={"num_warps": warps}).asm["cubin"]


def disassembled(cubin):
    """Return the text of machine code, and that of the resources which it uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return run("nvdisasm", "-c", file.name), run("cuobjdump", "-res-usage", file.name)


def count(cubin):
    """Return the `Count` of machine code."""
    text, usage = disassembled(cubin)
    instructions = []
    labels = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        if instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    in_loop = set()
    for place, instruction in enumerate(instructions):
        jump = re.search(r"BRA `\((\.L_x_\d+)\)", instruction)
        # A jump backward ends a loop. One to itself ends the program.
        if jump and labels[jump[1]] < place:
            in_loop.update(range(labels[jump[1]], place + 1))
    idle = {
        place for place, x in enumerate(instructions) if re.match(r"NOP|BRA `\(", x) and place not in in_loop
    }
    return Count(
        straight=len(instructions) - len(in_loop) - len(idle),
        loop=len(in_loop),
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        spilled=int(re.search(r"STACK:(\d+)", usage)[1]),
    )


def run(tool, *arguments):
    """Return the output of one of NVIDIA's tools."""
    words = [str(TOOLS / tool), *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def forward_row(method, block=BLOCK_SIZES[0]):
    """Return the row of the forward kernel for a method of `BOUNDS`, with a boolean mask and metrics."""
    constants = {
        **BOUNDS[method],
        "HAS_MASK": True,
        "PER_TOKEN": False,
        "METRICS": True,
        "FAST": True,
        "BLOCK": block,
        "CHUNK": CHUNK,
    }
    return row(f"forward, {method}", count(compiled(token_kernels.forward, constants)), block, 13)


def backward_row(block=BLOCK_SIZES[0]):
    """Return the row of the backward kernel."""
    constants = {"PER_SEQUENCE": False, "BLOCK": block}
    return row("backward", count(compiled(token_kernels.backward, constants)), block, 8)


def row(name, counted, block, size):
    """Return a row: of a token its instructions and its bytes, of 32 roots their instructions."""
    return {
        "kernel": name,
        "instructions_per_token": round(counted.straight / (block / LANES), 1),
        "instructions_for_32_roots": counted.loop,
        "registers": counted.registers,
        "spilled_bytes": counted.spilled,
        "bytes_per_token": size,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rows = [*map(forward_row, BOUNDS), backward_row()]
    found = {"date": f"{date.today()}", "triton": triton.__version__, "target": "sm_90", "rows": rows}
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    for x in rows:
        print(*(f"{key}={value}" for key, value in x.items()))


if __name__ == "__main__":
    main()
