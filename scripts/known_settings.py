"""Write the names of all settings of a framework, from its own code: `packages/rlvet/src/rlvet/data/known`.

    python scripts/known_settings.py verl --clones FOLDER --wheels FOLDER

No code of a framework is imported: Python is parsed, and YAML and lists of arguments are read. The newest version is
the installed one, or else the newest commit of the clone. Earlier versions are the tags of the clone and the wheels.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

DATA = Path(__file__).parents[1] / "packages/rlvet/src/rlvet/data/known"
OPEN = "*"
"""The last part of the path of a group that may have settings of the user's own beside those that are listed."""
DEEPEST = 12


# Sources


class Tree:
    """The files of one version of a package.

    Args:
        version: Its version, as it is printed.
        paths: The paths of its files.
        read: A function that returns the text of a path.
    """

    def __init__(self, version: str, paths: list[str], read: Callable[[str], str], commit: str = ""):
        self.version = version
        self.paths = paths
        self.commit = commit
        self._read = read

    def read(self, path: str) -> str:
        """Return the text of a file; an empty text if there is none."""
        return self._read(path) if path in self.paths else ""

    def matching(self, pattern: str) -> list[str]:
        """Return the paths that match a pattern of `pathlib`, sorted."""
        return sorted(path for path in self.paths if PurePosixPath(path).match(pattern))


def installed(name: str) -> Tree:
    """Return an installed package."""
    distribution = metadata.distribution(name)
    files = {str(file): file for file in distribution.files or []}
    return Tree(distribution.version, [*files], lambda path: files[path].read_text(encoding="utf-8"))


def commit(clone: Path, name: str, version: str = "") -> Tree:
    """Return a commit or a tag of a clone."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(clone), *words], check=True, capture_output=True, text=True
        ).stdout

    paths = git("ls-tree", "-r", "--name-only", name).splitlines()
    full = git("rev-parse", f"{name}^{{commit}}").strip()
    return Tree(version or name.lstrip("v"), paths, lambda path: git("show", f"{name}:{path}"), full[:12])


def wheel(file: Path) -> Tree:
    """Return the files of a wheel."""
    archive = zipfile.ZipFile(file)
    version = file.name.split("-")[1]
    return Tree(version, archive.namelist(), lambda path: archive.read(path).decode())


def earlier(clone: Path, wheels: Path, name: str, tags: str, newest: str) -> Iterator[Tree]:
    """Yield the versions before the newest one, the oldest first.

    Args:
        clone: The clone.
        wheels: The folder of wheels.
        name: The name of the package, which begins the names of its wheels.
        tags: A pattern of the tags that are versions.
        newest: The newest version.
    """
    trees: dict[tuple[int, ...], Callable[[], Tree]] = {}
    if clone.exists():
        text = subprocess.run(
            ["git", "-C", str(clone), "tag"], check=True, capture_output=True, text=True
        ).stdout
        for tag in text.split():
            match = re.fullmatch(tags, tag)
            if match is not None:
                trees[_numbers(match[1])] = lambda tag=tag, version=match[1]: commit(clone, tag, version)
    for file in wheels.glob(f"{name}-*.whl"):
        trees.setdefault(_numbers(file.name.split("-")[1]), lambda file=file: wheel(file))
    for numbers in sorted(trees):
        if numbers < _numbers(newest):
            yield trees[numbers]()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("post")[0])[:3])


# Classes with fields


@dataclass(frozen=True)
class Class:
    """A class of a module."""

    module: str
    node: ast.ClassDef


class Classes:
    """The classes of some modules, whose fields are settings.

    Args:
        texts: The source of each module, by its dotted name.
    """

    def __init__(self, texts: Mapping[str, str]):
        self._trees = {module: ast.parse(text) for module, text in texts.items()}

    @cached_property
    def _names(self) -> dict[str, dict[str, ast.AST | tuple[str, str]]]:
        """What each name at the top of each module is: a class, an expression, or a name of another module."""
        names: dict[str, dict[str, ast.AST | tuple[str, str]]] = {}
        for module, tree in self._trees.items():
            found = names.setdefault(module, {})
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name] = node
                elif isinstance(node, ast.ImportFrom):
                    parent = module.rsplit(".", node.level)[0] if node.level else ""
                    origin = ".".join(part for part in (parent, node.module or "") if part)
                    for alias in node.names:
                        found.setdefault(alias.asname or alias.name, (origin, alias.name))
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    found.setdefault(node.targets[0].id, node.value)
                elif isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation):
                    found[ast.unparse(node.target)] = node.value or node
        return names

    def resolve(self, module: str, name: str, depth: int = 0) -> tuple[str, ast.AST] | None:
        """Return the class or expression that a name of a module stands for, with its module."""
        found = self._names.get(module, {}).get(name)
        if depth > DEEPEST:
            return None
        if found is None:
            # A package may export the names of its modules.
            below = [one for one in self._names if one.startswith(f"{module}.") and name in self._names[one]]
            found = (below[0], name) if below and depth else None
        if isinstance(found, tuple):
            return self.resolve(*found, depth=depth + 1)
        return None if found is None else (module, found)

    def fields(self, module: str, node: ast.ClassDef) -> dict[str, tuple[str, ast.expr]]:
        """Return the annotation of each field, with its module; those of base classes too."""
        fields: dict[str, tuple[str, ast.expr]] = {}
        for base in node.bases:
            resolved = self.resolve(module, ast.unparse(base).rpartition(".")[2])
            if resolved is not None and isinstance(resolved[1], ast.ClassDef) and resolved[1] is not node:
                fields |= self.fields(resolved[0], resolved[1])
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if statement.target.id.startswith("_") or "ClassVar" in ast.unparse(statement.annotation):
                continue
            fields[statement.target.id] = (module, statement.annotation)
            for name in _aliases(statement.value):
                fields[name] = (module, statement.annotation)
        return fields

    def paths(self, module: str, name: str, prefix: str = "") -> Iterator[str]:
        """Yield the dotted names of all settings of a class, those of its fields' classes too."""
        resolved = self.resolve(module, name)
        if resolved is not None and isinstance(resolved[1], ast.ClassDef):
            yield from self._walk(resolved[0], resolved[1], prefix, ())

    def _walk(
        self, module: str, node: ast.ClassDef, prefix: str, above: tuple[ast.ClassDef, ...]
    ) -> Iterator[str]:
        if node in above or len(above) > DEEPEST:
            return
        for name, (origin, annotation) in self.fields(module, node).items():
            yield f"{prefix}{name}"
            classes, is_open = self._classes_of(origin, annotation)
            if classes and is_open:
                yield f"{prefix}{name}.{OPEN}"
            for one in classes:
                yield from self._walk(one.module, one.node, f"{prefix}{name}.", (*above, node))

    def _classes_of(self, module: str, annotation: ast.AST, depth: int = 0) -> tuple[list[Class], bool]:
        """Return the classes of a field's value, and whether it may have names of the user's own."""
        classes: list[Class] = []
        is_open = False
        for node in ast.walk(annotation):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable():
                try:
                    inner = ast.parse(node.value, mode="eval").body
                except SyntaxError:
                    continue
                if isinstance(inner, ast.Constant) or depth > DEEPEST:
                    continue
                found, opened = self._classes_of(module, inner, depth + 1)
                classes += found
                is_open |= opened
            elif isinstance(node, ast.Attribute):
                is_open = True  # a class of another package
            elif isinstance(node, ast.Name):
                if node.id in ("dict", "Dict", "Mapping", "Any", "DictConfig", "object"):
                    is_open = True
                    continue
                resolved = self.resolve(module, node.id)
                if resolved is None:
                    is_open |= node.id[:1].isupper() and node.id not in PLAIN
                elif isinstance(resolved[1], ast.ClassDef):
                    classes.append(Class(*resolved))  # type: ignore[arg-type]
                elif depth <= DEEPEST:
                    found, opened = self._classes_of(resolved[0], resolved[1], depth + 1)
                    classes += found
                    is_open |= opened
        return classes, is_open


PLAIN = {
    "Path",
    "Literal",
    "Annotated",
    "Optional",
    "Union",
    "List",
    "Sequence",
    "Tuple",
    "None",
    "Field",
    "Enum",
}
"""Names in annotations whose values have no settings."""


def _aliases(value: ast.expr | None) -> list[str]:
    """Return the other names of a field of pydantic."""
    names: list[str] = []
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.keyword) and node.arg in ("alias", "validation_alias"):
            names += [
                inner.value
                for inner in ast.walk(node.value)
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
            ]
    return names


def modules(tree: Tree, *patterns: str, root: str = "") -> dict[str, str]:
    """Return the sources of the modules whose paths match, by their dotted names."""
    texts: dict[str, str] = {}
    for path in {path for pattern in patterns for path in tree.matching(pattern)}:
        name = path.removeprefix(root).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        texts[name] = tree.read(path)
    return texts


# YAML and arguments


def yaml_paths(content: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of a YAML mapping."""
    for name, value in content.items():
        path = f"{prefix}{name}"
        if str(name).startswith("_") or name in ("hydra", "defaults"):
            continue
        yield path
        if isinstance(value, dict) and value:
            yield from yaml_paths(value, f"{path}.")


def targets(content: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the group and the class of each ``_target_`` of a YAML mapping."""
    for name, value in content.items():
        if isinstance(value, dict):
            if isinstance(value.get("_target_"), str):
                yield f"{prefix}{name}", value["_target_"]
            yield from targets(value, f"{prefix}{name}.")


def arguments(text: str) -> Iterator[str]:
    """Yield the names of the long arguments of a parser, those of a loop over names too."""
    tree = ast.parse(text)
    yield from _arguments_of(tree, {})
    for loop in ast.walk(tree):
        if (
            isinstance(loop, ast.For)
            and isinstance(loop.target, ast.Name)
            and isinstance(loop.iter, ast.Tuple)
        ):
            for value in ast.literal_eval(loop.iter):
                yield from _arguments_of(loop, {loop.target.id: str(value)})


def _arguments_of(tree: ast.AST, values: Mapping[str, str]) -> Iterator[str]:
    """Yield the long arguments in a part of a program, with the values of some names."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("add_argument"):
            continue
        for argument in node.args:
            parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
            texts = [_text_of(part, values) for part in parts]
            if None not in texts and str(texts[0]).startswith("--"):
                yield "".join(map(str, texts))[2:].replace("-", "_")


def _text_of(node: ast.expr, values: Mapping[str, str]) -> str | None:
    """Return the text of a part of a text; None if it is not known."""
    if isinstance(node, ast.FormattedValue):
        return values.get(ast.unparse(node.value))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


# Frameworks


def trl_names(tree: Tree, library: Tree) -> set[str]:
    """Return the arguments of GRPOConfig, and of the command ``trl grpo``."""
    texts = modules(tree, "trl/trainer/*config.py", "trl/scripts/utils.py", "trl/scripts/grpo.py")
    texts |= modules(tree, "trl/trainer/utils.py") if "trl.trainer.model_config" not in texts else {}
    texts["transformers"] = library.read("transformers/training_args.py")
    classes = Classes(texts)
    names = set(classes.paths("trl.trainer.grpo_config", "GRPOConfig"))
    for module, name in (
        ("trl.trainer.model_config", "ModelConfig"),
        ("trl.scripts.utils", "ScriptArguments"),
        ("trl.scripts.utils", "DatasetMixtureConfig"),
        ("trl.scripts.grpo", "GRPOScriptArguments"),
    ):
        names |= set(classes.paths(module, name))
    return names


def verl_names(tree: Tree) -> set[str]:
    """Return the settings of verl's files of PPO, and those of the classes that it makes of their groups."""
    names: set[str] = set()
    texts = modules(tree, "verl/workers/config/*.py", "verl/trainer/config/*.py", "verl/utils/*/config.py")
    texts |= modules(tree, "verl/base_config.py", "verl/utils/profiler/*.py", "verl/workers/config/*/*.py")
    classes = Classes(texts)
    generated = tree.matching("verl/trainer/config/_generated_ppo*.yaml")
    files = generated or tree.matching("verl/trainer/config/ppo*.yaml")
    files += tree.matching("verl/experimental/*/config/*.yaml") + tree.matching("recipe/*/config/*.yaml")
    for file in files:
        content = yaml.safe_load(tree.read(file))
        if not isinstance(content, dict):
            continue
        names |= set(yaml_paths(content))
        for group, target in targets(content):
            module, _, name = target.rpartition(".")
            found = set(classes.paths(module, name, f"{group}."))
            names |= found
    return names


def openrlhf_names(tree: Tree) -> set[str]:
    """Return the arguments of the program that trains by PPO and its kin."""
    return set(arguments(tree.read("openrlhf/cli/train_ppo_ray.py")))


def skyrl_names(tree: Tree) -> set[str]:
    """Return the settings of SkyRL's classes, and of its YAML in earlier versions."""
    names: set[str] = set()
    classes = Classes(modules(tree, "skyrl/train/config/*.py"))
    names |= set(classes.paths("skyrl.train.config.config", "SkyRLTrainConfig"))
    for file in tree.matching("skyrl-train/skyrl_train/config/ppo_base_config.yaml"):
        names |= set(yaml_paths(yaml.safe_load(tree.read(file))))
    return names


def prime_rl_names(tree: Tree) -> set[str]:
    """Return the settings of ``rl``."""
    root = "packages/prime-rl-configs/src/"
    texts = modules(tree, f"{root}prime_rl/configs/*.py", f"{root}prime_rl/utils/*.py", root=root)
    texts |= modules(
        tree,
        "src/prime_rl/configs/*.py",
        "src/prime_rl/*/config.py",
        "src/prime_rl/*/*/config.py",
        root="src/",
    )
    texts |= modules(tree, "src/prime_rl/utils/*.py", root="src/")
    classes = Classes(texts)
    names: set[str] = set()
    for module in ("prime_rl.configs.rl", "prime_rl.rl_config", "prime_rl.rl.config"):
        names |= set(classes.paths(module, "RLConfig"))
    return names


def write(key: str, newest: Tree, names: set[str], earlier_names: Mapping[str, str]) -> Path:
    """Write the names of a framework, by the group that contains them.

    Args:
        key: The key of the framework.
        newest: The version that the names are of.
        names: Their dotted names.
        earlier_names: The last version of each name that only earlier versions have.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        group, _, last = name.rpartition(".")
        groups.setdefault(group, []).append(last)
    last_versions: dict[str, list[str]] = {}
    for name, version in sorted(earlier_names.items()):
        last_versions.setdefault(version, []).append(name)
    content = {
        "version": newest.version,
        "commit": newest.commit or "installed",
        "date": datetime.date.today().isoformat(),
        "settings": {group: " ".join(members) for group, members in sorted(groups.items())},
        "earlier": {version: " ".join(members) for version, members in last_versions.items()},
    }
    DATA.mkdir(exist_ok=True)
    file = DATA / f"{key.replace('-', '_')}.json"
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return file


def main() -> None:
    """Write the names of the frameworks that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("keys", nargs="*", default=["trl", "verl", "openrlhf", "skyrl", "prime-rl"])
    parser.add_argument("--clones", type=Path, required=True)
    parser.add_argument("--wheels", type=Path, default=Path("no wheels"))
    options = parser.parse_args()
    for key in options.keys:
        newest, now, before = READERS[key](options.clones, options.wheels)
        last: dict[str, str] = {}
        for version, names in before:
            last |= dict.fromkeys(names, version)
        only_earlier = {name: version for name, version in last.items() if name not in now}
        file = write(key, newest, now, only_earlier)
        print(f"{file.name}: {len(now)} names of {newest.version}, {len(only_earlier)} of earlier versions")


Reading = tuple[Tree, set[str], Iterator[tuple[str, set[str]]]]


def _trl(clones: Path, wheels: Path) -> Reading:
    newest, library = installed("trl"), installed("transformers")
    newest.commit = f"installed, with transformers {library.version}"

    def before() -> Iterator[tuple[str, set[str]]]:
        for file in sorted(
            wheels.glob("transformers-*.whl"), key=lambda file: _numbers(file.name.split("-")[1])
        ):
            older = wheel(file)
            yield f"transformers {older.version}", trl_names(newest, older)
        for tree in earlier(clones / "trl", wheels, "trl", r"v(\d[\d.]*)", newest.version):
            if tree.read("trl/trainer/grpo_config.py"):
                yield f"TRL {tree.version}", trl_names(tree, library)

    return newest, trl_names(newest, library), before()


def _verl(clones: Path, wheels: Path) -> Reading:
    newest = installed("verl")
    trees = earlier(clones / "verl", wheels, "verl", r"v(\d[\d.]*)(?:\.post\d+)?", newest.version)
    return newest, verl_names(newest), ((f"verl {tree.version}", verl_names(tree)) for tree in trees)


def _of_clone(
    title: str, folder: str, tags: str, names: Callable[[Tree], set[str]]
) -> Callable[[Path, Path], Reading]:
    def read(clones: Path, wheels: Path) -> Reading:
        clone = clones / folder
        head = commit(clone, "HEAD")
        trees = earlier(clone, wheels, folder.lower(), tags, "9999")
        described = subprocess.run(
            ["git", "-C", str(clone), "log", "-1", "--format=%cs"], check=True, capture_output=True, text=True
        ).stdout.strip()
        head.version = f"of {described}"
        return head, names(head), ((f"{title} {tree.version}", names(tree)) for tree in trees)

    return read


READERS: Mapping[str, Callable[[Path, Path], Reading]] = {
    "trl": _trl,
    "verl": _verl,
    "openrlhf": _of_clone("OpenRLHF", "OpenRLHF", r"v(\d[\d.]*)(?:\.post\d+)?", openrlhf_names),
    "skyrl": _of_clone("SkyRL", "SkyRL", r"skyrl(?:_train)?-v(\d[\d.]*)", skyrl_names),
    "prime-rl": _of_clone("prime-rl", "prime-rl", r"v(\d+\.\d+(?:\.\d+)?)", prime_rl_names),
}


if __name__ == "__main__":
    sys.exit(main())
