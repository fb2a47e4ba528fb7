"""The arguments of pip that install what a command needs, in a clone of bandpo."""

SIBLINGS = "./packages/rlvet ./packages/bandpo"
"""The arguments of pip that install the two packages that this one needs in a clone."""
VERL = (
    "-c packages/bandpo-lab/src/bandpo_lab/recipes/gpu.txt "
    "./packages/rlvet './packages/bandpo[verl]' './packages/bandpo-lab[verl]'"
)
"""The arguments of pip that install verl in a clone."""
OPTIONAL_PACKAGES = {
    **dict.fromkeys(("pyarrow", "numpy"), "'./packages/rlvet[records]'"),
    **dict.fromkeys(
        ("trl", "transformers", "tokenizers", "datasets", "accelerate"), "'./packages/bandpo[trl]'"
    ),
    **dict.fromkeys(("jinja2", "matplotlib", "pydantic"), f"{SIBLINGS} './packages/bandpo-lab[study]'"),
    **dict.fromkeys(("math_verify", "httpx"), f"{SIBLINGS} './packages/bandpo-lab[eval]'"),
    **dict.fromkeys(("verl", "ray", "hydra", "omegaconf"), f"{VERL}  # in Python 3.12"),
}
"""The packages that a command of `bandpo-lab` may need, each with the arguments of pip that install it in a clone."""
