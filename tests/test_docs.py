"""What the pages say is true: examples run, references are current, versions are those of pyproject.toml."""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from parity import Case, baseline, run
from tiny import quiet

from evener.strategies import STRATEGIES, ConfigError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def text_of(name: str) -> str:
    """A file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def program(name: str) -> Any:
    """A program beside the pages."""
    spec: Any = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


# ------------------------------------------------------------------------------------------------------------ code


def test_the_worked_example_equals_one_device_and_refuses_no_parts() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", text_of("docs/adding_a_strategy.md"), flags=re.DOTALL)
    exec(compile(block, "adding_a_strategy.md", "exec"), names := {})
    case, strategy = Case(num=11), names["MicroBatchStrategy"]  # batches of 4, 4 and 3
    torch.testing.assert_close(run(case, strategy(3), devices=1).weights, baseline(case).weights, rtol=0, atol=1e-10)
    with pytest.raises(ConfigError, match="num_microbatches=0 is not positive"):
        strategy(0)


WITHOUT_EVENER = """
import re, sys
from importlib.util import find_spec
sys.modules["evener"] = None
for block in re.findall(r"```python\\n(.*?)```", open(sys.argv[1], encoding="utf-8").read(), re.DOTALL):
    if "onnx" not in block or find_spec("onnxscript"):
        exec(compile(block, "inference.md", "exec"), {})
"""


@pytest.mark.long
def test_a_checkpoint_is_used_without_evener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = ROOT / "examples" / "user_project"
    monkeypatch.syspath_prepend(str(project))
    spirals = importlib.import_module("spirals")
    trainer = quiet(max_steps=2, num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(spirals.SpiralClassifier(), datamodule=spirals.SpiralData())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_EVENER, str(DOCS / "inference.md")]
    env = {**os.environ, "PYTHONPATH": str(project)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch.Size([5, 3])" in done.stdout


def defined_in(file: str) -> set[str]:
    """Names of a file's functions, and of its classes' methods as `Class.method`."""
    body = ast.parse(text_of(file)).body
    classes = [cls for cls in body if isinstance(cls, ast.ClassDef)]
    methods = {f"{cls.name}.{item.name}" for cls in classes for item in cls.body if isinstance(item, ast.FunctionDef)}
    return methods | {item.name for item in body if isinstance(item, (ast.FunctionDef, ast.ClassDef))}


def test_the_page_of_architecture_has_functions_as_they_are() -> None:
    page = text_of("docs/architecture.md")
    steps = re.findall(r"^\| \d+\w? \| [^|]+ \| `([^`]+)` \| `([^`]+)` \|$", page, flags=re.MULTILINE)
    assert len(steps) == len(re.findall(r"^\| \d", page, flags=re.MULTILINE)) > 30
    assert [f"{file}: {name}" for file, name in steps if name not in defined_in(file)] == []


def sentence_of(node: ast.AST) -> str | None:
    """The text of a string in the source, `…` standing for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[a-z]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]
    return None


def test_every_quoted_sentence_is_in_the_source() -> None:
    files = [file for room in ("trainer", "strategies", "examples") for file in (ROOT / room).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    source = [text for text in map(sentence_of, nodes) if text is not None]
    quoted = re.findall(r"^\| `([^`]+)` \|", text_of("docs/troubleshooting.md"), flags=re.MULTILINE)
    assert len(quoted) > 30
    missing = []
    for sentence in quoted:
        parts = [re.escape(part.strip()) for part in sentence.split("…") if part.strip()]
        pattern = re.compile(".*?".join(parts), flags=re.DOTALL)
        if not any(pattern.search(text) for text in source):
            missing.append(sentence)
    assert missing == []


# ------------------------------------------------------------------------------------------------------- references

PATH = re.compile(r"(?<![\w./-])(?:trainer|strategies|conf|examples|tests|benchmarks|docs)/[\w./*<>-]*\w")
NOT_OURS = {
    "conf/module/mine.yaml", "conf/project.yaml", "conf/module/spirals.yaml", "conf/data/spirals.yaml",
    "tests/tests_pytorch", "docs/gpu_table.md",
}  # fmt: skip
"""A user's own file, Lightning's tests, and what is written on a machine with a GPU."""


@pytest.mark.parametrize(
    "page", [*DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md"), *ROOT.glob("*.md")], ids=lambda page: page.name
)
def test_links_lead_to_files_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text) if not (page.parent / link).exists()] == []
    named = set() if page.name == "CHANGELOG.md" else set(PATH.findall(text)) - NOT_OURS
    roots = (ROOT, page.parent)
    assert [path for path in named if "<" not in path and not any(list(root.glob(path)) for root in roots)] == []


def test_the_pages_have_at_most_2200_lines() -> None:
    assert sum(len(page.read_text(encoding="utf-8").splitlines()) for page in DOCS.rglob("*.md")) <= 2200


def test_every_pain_has_one_row_with_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)", text_of("docs/dev/pains.md"), flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 43))
    tests = [re.findall(r"`(tests/[\w/]*test_\w+\.py)::(test_\w+)`", row) for _, row in rows]
    assert all(tests)
    missing = [
        f"{file}::{test}"
        for row in tests
        for file, test in row
        if not re.search(rf"^def {test}\(", text_of(file), flags=re.MULTILINE)
    ]
    assert missing == []


def test_the_sites_reference_has_the_options_of_every_file_with_their_meaning() -> None:
    page = program("reference").files()
    assert "# Number of machines." in page.partition("## callbacks")[0]
    ddp = page.partition("### `strategy=ddp`")[2].partition("### ")[0]
    assert "# Seconds that a rank waits for the others before it fails.\ntimeout_s: 1800\n" in ddp
    files = (ROOT / "conf").glob("*/*.yaml")
    assert [file for file in files if f"### `{file.parent.name}={file.stem}`" not in page] == []


def test_the_site_and_the_index_name_every_page_and_every_drawing_is_current() -> None:
    site, index = text_of("mkdocs.yml"), text_of("docs/README.md")
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert [page for page in pages if f"]({page})" not in index] == []
    assert [page for page in pages | {"index.md", "pages.md"} if f": {page}\n" not in site] == []
    drawn = {file.stem for file in (DOCS / "images" / "drawings").glob("*.svg")}
    assert drawn == set(program("drawings").blocks()), "run `python docs/drawings.py <mermaid.min.js>`"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocstrings") is None, reason="mkdocs is not installed; pip install evener[docs]"
)
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_strategy_has_its_section_and_is_indexed() -> None:
    sections, index = text_of("docs/strategies.md"), text_of("docs/README.md")
    found = [f"\n## `{name}`" in sections and f"](strategies.md#{name})" in index for name in STRATEGIES]
    assert all(found)


# ------------------------------------------------------------------------------------------- the READMEs and versions


def test_readme_has_at_most_100_lines_and_says_early_what_it_has_not_run_on() -> None:
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 100
    assert "It has run on one GPU, and not yet on several" in "\n".join(lines[:20])
    assert sum("python3 -m venv" in line for line in lines) == 2, "two set-up commands: to train, and to test"


def test_both_sides_of_the_difference_from_lightning_compile() -> None:
    (block,) = re.findall(r"```diff\n(.*?)```", text_of("README.md"), flags=re.DOTALL)
    for sign in "+-":
        lines = [line[1:] for line in block.splitlines() if line[:1] in ("", " ", sign)]
        compile("\n".join(lines), "README.md", "exec")


def test_the_chinese_readme_has_the_same_commands_sections_and_tables() -> None:
    def commands(page: str) -> list[str]:
        """Blocks of bash and Python, and commands in the text, as they stand, without comments."""
        found = re.findall(r"^```(?:bash|diff)\n[\s\S]*?^```|^ {4}python .*$|`python [^`]+`", page, flags=re.MULTILINE)
        return [re.sub(r" +# .*", "", block) for block in found]

    def shape(page: str) -> list[str]:
        """Levels of headings, and the number of columns of each row of a table."""
        found = re.findall(r"^(#+) |^(\|.*\|)$", page, flags=re.MULTILINE)
        return [heading or str(row.count("|")) for heading, row in found]

    english, chinese = text_of("README.md"), text_of("README.zh.md")
    assert "](README.zh.md)" in english
    assert "](README.md)" in chinese
    assert len(commands(english)) > 4
    assert commands(chinese) == commands(english)
    assert shape(chinese) == shape(english)


PYPROJECT = text_of("pyproject.toml")
PYTHONS = SpecifierSet(re.findall(r'^requires-python = "(.*?)"', PYPROJECT, flags=re.MULTILINE)[0])
MINORS = [f"3.{minor}" for minor in range(7, 30) if f"3.{minor}" in PYTHONS]


@pytest.mark.parametrize("python", MINORS)
def test_every_requirement_is_pinned_once_for_each_python(python: str) -> None:
    pins = [Requirement(line) for line in text_of("constraints.txt").splitlines() if not line.startswith("#")]
    machine = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    applying = [pin.name for pin in pins if pin.marker is None or pin.marker.evaluate(machine)]
    assert len(applying) == len(set(applying))
    ours = PYPROJECT.partition("third-party = [")[0]
    required = set(re.findall(r'^    "([\w-]+)(?:\[\w+\])?[><=]', ours, flags=re.MULTILINE))
    assert {"torch", "pytorch-lightning", "import-linter"} < required <= set(applying)


def test_the_lock_with_hashes_has_the_pins_of_the_constraints() -> None:
    locked = [
        line.removesuffix(" \\") for line in text_of("requirements.lock").splitlines() if line[:1] not in (" ", "#")
    ]
    assert locked == [line for line in text_of("constraints.txt").splitlines() if not line.startswith("#")]


def test_the_table_of_versions_has_what_pyproject_allows() -> None:
    rows = re.findall(r"^\| (3\.\d+)\.\d+ \| (2\.\d+)\.", text_of("docs/versions.md"), flags=re.MULTILINE)
    assert sorted({python for python, _ in rows}) == sorted(MINORS)
    allowed = Requirement(re.findall(r'"(torch[><=].*?)"', PYPROJECT)[0]).specifier
    assert sorted({torch for _, torch in rows}) == [f"2.{minor}" for minor in range(40) if f"2.{minor}" in allowed]
