"""The rooms: sizes, doors, and private names of libraries. The arrows between rooms are checked by `lint-imports`."""

import ast
import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401  # private names are looked for in what was imported

import evener.trainer.cli.train  # noqa: F401
from evener.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
PRODUCT = ("trainer", "strategies", "conf", "examples")


def _is_room(path: Path) -> bool:
    return (path / "__init__.py").exists()


ROOMS = [path for name in ("trainer", "strategies") for path in sorted((ROOT / name).iterdir()) if _is_room(path)]
MOST_ENTRIES = 20


@pytest.mark.parametrize("folder", PRODUCT)
def test_no_folder_of_the_product_has_more_than_20_entries(folder: str) -> None:
    folders = [path for path in (ROOT / folder, *(ROOT / folder).rglob("*")) if path.is_dir()]
    folders += [ROOT / "tests", ROOT / "tests" / "support"]
    counts = {str(path): len(_entries(path)) for path in folders if path.name != "__pycache__"}
    assert {path: count for path, count in counts.items() if count > MOST_ENTRIES} == {}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: f"{room.parent.name}/{room.name}")
def test_a_room_says_what_it_is_for_exports_and_may_import(room: Path) -> None:
    lines = (ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or "").splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith(("Exports:", "May import:"))] == [
        "Exports", "May import",
    ]  # fmt: skip
    exported = " ".join(lines)
    for path in room.glob("[!_]*.py"):
        assert path.stem in exported or path.stem in _reexported(room), (
            f"{path} is public, and the room does not say so"
        )


def test_underscored_files_are_imported_in_their_own_room_only() -> None:
    intruders = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((*(ROOT / "trainer").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")))
        for depth, name in _imports(path)
        if any(part.startswith("_") and not part.startswith("__") for part in name.split(".")) and depth != 1
    ]
    assert intruders == []


def test_no_room_has_more_lines_than_its_budget() -> None:
    """Raise a number of budgets.csv by an argument in the commit; lower it with each room that got smaller."""
    with (ROOT / "tests" / "budgets.csv").open(encoding="utf-8", newline="") as file:
        budgets = {row["room"]: int(row["most"]) for row in csv.DictReader(file)}
    lines = {name: _num_lines(ROOT / name) for name in budgets}
    assert {name: num for name, num in lines.items() if num > budgets[name]} == {}
    assert {f"{room.parent.name}/{room.name}" for room in ROOMS} <= budgets.keys()


def _num_lines(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def test_tests_share_code_by_support_modules_only() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    nodes = [(path, node) for path in tests for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    imports = [(path, node.module or "") for path, node in nodes if isinstance(node, ast.ImportFrom)]
    imports += [(path, name.name) for path, node in nodes if isinstance(node, ast.Import) for name in node.names]
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in imports if "test_" in name] == []


def _reexported(room: Path) -> set[str]:
    return {name for _, name in _imports(room / "__init__.py")}


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name not in ("__pycache__", "py.typed")]


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Relative imports of a file: the number of dots, and the module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.level, ".".join([node.module or "", *(name.name for name in node.names if not node.module)])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_composed_of_at_most_three_classes(name: str) -> None:
    """Beside the protocol of a step, which says what a strategy has to do, and what is nothing for most."""
    own = [base for base in STRATEGIES[name].__mro__ if base.__module__.startswith("evener.")]
    assert 1 <= len([base for base in own if not getattr(base, "_is_protocol", False)]) <= 3


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
    """Of torch, Lightning and torchmetrics; a name that is imported, called or overridden fails by itself.

    Overrides fail in the type checker, since they are marked `@override`.
    """
    paths = [*(ROOT / "trainer").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    own = {name for tree in trees for name in _defined(tree)}
    names = {name for tree in trees for name in _silent(tree) if re.fullmatch(r"_[a-z]\w*[a-z]", name)} - own
    imported = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in LIBRARIES]
    files = {Path(getattr(module, "__file__", None) or "") for module in imported}
    sources = [file.read_text("utf-8") for file in files if file.suffix == ".py" and file.is_file()]
    missing = names - {word for source in sources for word in re.findall(r"\w+", source)}
    assert not missing, " ".join(sorted(missing))
