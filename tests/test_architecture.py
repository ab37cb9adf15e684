"""Tests of the architecture: imports run downward, and importing has no side effects."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitrail

PACKAGE = Path(vitrail.__file__).parent
LAYERS = (
    ("__main__",),
    ("cli", "testing"),
    ("studies",),
    ("recipes",),
    ("transfer", "analysis", "serving"),
    ("export",),
    ("experiments",),
    ("bench",),
    ("training",),
    ("tasks",),
    ("evaluation",),
    ("weights",),
    ("models", "data"),
    ("report", "hub"),
    ("cores", "files", "machine", "processes", "registry", "settings"),
    ("errors",),
)
"""Subpackages and modules from the top layer to the bottom one, as in docs/design.md. A module imports only from lower
layers and from its own subpackage."""

LAYER = {part: level for level, parts in enumerate(LAYERS) for part in parts}
MODULES = [PACKAGE / "__init__.py", *sorted({*PACKAGE.rglob("*.py")} - {PACKAGE / "__init__.py"})]
"""All modules. `vitrail/__init__.py` may import from any layer, because it imports names only when they are used."""


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in MODULES}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return the lines and parts of all imports of the package, also those in functions and in tables of parts."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names = [node.module or ""]
            if node.module == "vitrail":
                names = [f"vitrail.{alias.name}" for alias in node.names if alias.name != "__version__"]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"vitrail(\.\w+)+:\w+", str(node.value)):
            names = [node.value]  # a row of a `Registry`
        for name in names:
            if name.startswith("vitrail."):
                yield node.lineno, name.split(".")[1]


def test_imports_run_downward(trees: dict[Path, ast.Module]) -> None:
    faults = []
    for path in MODULES[1:]:
        part = part_of(path)
        for line, target in imported_parts(trees[path]):
            if target not in LAYER:
                faults.append(f"{path}:{line} imports {target}, which is in no layer")
            elif target != part and LAYER[target] <= LAYER[part]:
                faults.append(f"{path}:{line}: {part} imports {target}")
    assert not faults, "\n".join(faults)


def test_a_module_only_defines(trees: dict[Path, ast.Module]) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, *functions, ast.ClassDef)
    guards = ("TYPE_CHECKING", "not __debug__", "__name__ == '__main__'", "'--multiprocessing-fork' in sys.orig_argv")
    faults = []
    for path, tree in trees.items():
        for node in tree.body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_guard = isinstance(node, ast.If) and ast.unparse(node.test) in guards
            if not (isinstance(node, allowed) or is_text or is_guard):
                faults.append(f"{path}:{node.lineno}: {ast.unparse(node)[:60]}")
    assert not faults, "\n".join(faults)


@pytest.mark.slow
def test_importing_everything_touches_nothing() -> None:
    script = """
import importlib, pkgutil, sys
import torch, rich.console, rich.progress, safetensors.torch, PIL.Image
import torch.distributed.checkpoint.state_dict_saver, torch.distributed.checkpoint.state_dict_loader
def watch(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        if "__pycache__" not in str(arguments[0]):
            raise SystemExit(f"opened {arguments[0]} for writing")
    if event.startswith(("socket.", "subprocess.", "os.system", "os.mkdir", "urllib")):
        raise SystemExit(event)
sys.addaudithook(watch)
import vitrail
for module in pkgutil.walk_packages(vitrail.__path__, "vitrail."):
    importlib.import_module(module.name)
"""
    finished = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_help_does_not_import_torch() -> None:
    script = "import sys; from vitrail.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_run_from_scratch_imports_no_part_of_other_runs() -> None:
    script = """
import re, sys
from vitrail.cli import command_of
from vitrail.recipes import RECIPES
command, _ = command_of("train")
RECIPES["demo"]().override(**{name: value for name, value in command.parse(["--steps", "2"]).items()})
other = (
    r"vitrail\\.(tasks\\.(mae|dino|contrast|vqvae|distillation)|weights\\.layouts\\.\\w+"
    r"|data\\.formats\\.(tar|hub|parquet|table)|models\\.attention\\.(lsh|linformer|sparse)"
    r"|recipes\\.self_supervised|analysis|transfer|evaluation\\.(frozen|classifiers))"
)
sys.exit(", ".join(name for name in sys.modules if re.fullmatch(other, name)) or 0)
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_the_front_offers_what_it_says() -> None:
    assert set(vitrail.__all__) == set(vitrail._HOMES)
    for name in vitrail.__all__:
        assert getattr(vitrail, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = vitrail.trian
