"""The private names of torch, Lightning and torchmetrics that we rely on exist.

A name that is imported, called or overridden fails by itself where a library has renamed it (overrides by the type
checker, since they are marked `@override`). One that is set, or asked for with a default, would fail in silence.
What they do is tested where it is used: against Lightning's own loop, and against one device.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch._dynamo  # noqa: F401  # the names are looked for in what was imported

import evener.trainer.cli.train  # noqa: F401

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "pytorch_lightning", "lightning_fabric", "torchmetrics", "multiprocessing", "collections",
             "typing")  # fmt: skip


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names that this project's own classes define or set on themselves."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _is_own(owner: ast.expr) -> bool:
    return ast.unparse(owner) in ("self", "cls", "super()")


def _silent(tree: ast.Module) -> Iterator[str]:
    """Names that are set on others' objects, or asked for with a default."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not _is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield ast.unparse(node.args[1]).strip("'")


def test_private_names_that_are_set_or_asked_for_exist() -> None:
    paths = [*(ROOT / "trainer").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    own = {name for tree in trees for name in _defined(tree)}
    names = {name for tree in trees for name in _silent(tree) if re.fullmatch(r"_[a-z]\w*[a-z]", name)} - own
    imported = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in LIBRARIES]
    files = {Path(getattr(module, "__file__", None) or "") for module in imported}
    sources = [file.read_text("utf-8") for file in files if file.suffix == ".py" and file.is_file()]
    missing = names - {word for source in sources for word in re.findall(r"\w+", source)}
    assert not missing, " ".join(sorted(missing))
