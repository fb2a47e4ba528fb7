"""Compile the kernels of `bandpo.linear_logp` for a card without one, and count instructions, registers and bytes.

    PYTHONPATH=packages/bandpo/src python benchmarks/linear_logp_kernels.py [--output FILE]

Needs Triton, whose wheel contains ptxas and nvdisasm. Nothing runs on a device. Each row is a variant of a kernel: the
instructions of one thread, divided by the logits that it reads (the kernels have no loops), its registers, and the
bytes that the kernel moves for each logit. The last row is the time that this predicts for a forward and backward pass,
calculated from the times that `gpu_check.py` measured on the card without the kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource

from bandpo.core.kernels import _linear_logp_kernels as kernels
from kernel_instructions import TARGET, disassembled

RESULTS = Path(__file__).parent / "results" / "linear_logp_kernels.json"
GPU_CHECK = Path(__file__).parent / "results" / "gpu_check.json"
FLOATS = "*fp32"
STATISTICS_TYPES = {
    "products": FLOATS,
    "bias": "*bf16",
    "id_column": "*i64",
    "maximum": FLOATS,
    "exp_sum": FLOATS,
    "weighted_sum": FLOATS,
    "id_logit": FLOATS,
    "tokens": "i32",
    "width": "i32",
    "inverse_cap": "fp32",
    "scale": "fp32",
}
GRADIENT_TYPES = {
    "products": FLOATS,
    "bias": "*bf16",
    "id_column": "*i64",
    "logsumexp": FLOATS,
    "mean_logit": FLOATS,
    "grad_logp": FLOATS,
    "grad_entropy": FLOATS,
    "gradient": "*bf16",
    "width": "i32",
    "inverse_cap": "fp32",
    "scale": "fp32",
    "inverse_temperature": "fp32",
}
PASSES = {
    "forward": (kernels._statistics_kernel, STATISTICS_TYPES, 4),
    "backward": (kernels._gradient_kernel, GRADIENT_TYPES, 6),
}
"""For each pass its kernel, the types of its arguments, and the bytes that it moves for each logit in bfloat16."""
BYTES_WITHOUT = {"forward": 24, "backward": 30}
"""The bytes for each logit that the passes without kernels move, beside the matrix products.

Forward: amax and sum read 4, sub_ and exp_ read and write 4. Backward: sub_, exp_ and mul_ read and write 4, and the
conversion to bfloat16 reads 4 and writes 2.
"""


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> dict[str, Any]:
    """Compile a kernel for the target, and return its instructions and registers a thread.

    Args:
        kernel: A function of `triton.jit`.
        types: The type of each argument that is not a constant. Pointers and integers are multiples of 16, as they are
            for the default chunks.
        constants: The values of the constants.
    """
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in types if types[name].startswith("*") or types[name] == "i32"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=TARGET, options=kernels.COMPILATION)
    text, usage = disassembled(compiled.asm["cubin"])
    instruction = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
    matches = (instruction.match(line) for line in text.splitlines())
    # NOP fills the end of the code.
    instructions = [match[1] for match in matches if match is not None and match[1] != "NOP"]
    resources = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "instructions": len(instructions),
        "registers": resources["REG"],
        "spilled_bytes": resources["STACK"] + resources["LOCAL"],
    }


def count_rows() -> list[dict[str, Any]]:
    """Return a row for each variant of each kernel."""
    logits = kernels.BLOCK // (32 * kernels.COMPILATION["num_warps"])
    rows = []
    for name, (kernel, types, size) in PASSES.items():
        for cap, entropy, bias in itertools.product((False, True), repeat=3):
            constants = {
                "HAS_BIAS": bias,
                "HAS_CAP": cap,
                "HAS_SCALE": cap,
                "HAS_ENTROPY": entropy,
                "BLOCK": kernels.BLOCK,
            }
            counts = compile_kernel(kernel, types, constants)
            row = {"pass": name, "cap": cap, "entropy": entropy, "bias": bias}
            per_logit = round(counts["instructions"] / logits, 1)
            rows.append(row | counts | {"instructions_per_logit": per_logit, "bytes_per_logit": size})
    return rows


def estimate() -> dict[str, Any]:
    """Return the time with kernels that the measured times predict, in ms, as a range.

    The lower end takes away the bytes that the kernels save, at the share of a copy's speed at which the passes
    without kernels would explain all of the measured time but the matrix products. The upper end takes them away at the
    speed of a copy, and so leaves the rest of the measured time as it is.
    """
    rows = json.loads(GPU_CHECK.read_text())["head"]["rows"]
    measured = {row["variant"]: row for row in rows}
    row = measured["linear_logp"]
    logits = row["vocabulary"] * row["tokens"]
    copy = 4.1e12  # bytes a second, read and written, on the card of these rows
    products = 4 * 2 * logits * row["width"] / 700e12
    bytes_without = sum(BYTES_WITHOUT.values()) * logits
    bytes_with = sum(size for _, _, size in PASSES.values()) * logits
    upper = row["seconds"] - (bytes_without - bytes_with) / copy
    lower = products + (row["seconds"] - products) * bytes_with / bytes_without
    full = measured["full logits"]["seconds"]
    return {
        "pass": "both, calculated",
        "full_logits_ms": round(full * 1e3, 1),
        "without_kernels_ms": round(row["seconds"] * 1e3, 1),
        "matrix_products_ms": round(products * 1e3, 1),
        "with_kernels_ms": [round(lower * 1e3, 1), round(upper * 1e3, 1)],
        "times_full_logits": [round(lower / full, 2), round(upper / full, 2)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = {"triton": triton.__version__, "target": "sm_90", "rows": [*count_rows(), estimate()]}
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(*(f"{name}={value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
