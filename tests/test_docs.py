"""What the docs say is true: examples run, references are current."""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Case, baseline, run

from evener.strategies import STRATEGIES, ConfigError
from evener.strategies.batch.policies import Even, FirstChunk, Weighted
from evener.trainer import Trainer

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONF = DOCS.parent / "conf"


def code_of(page: str) -> dict[str, Any]:
    """Run a page's one block of Python, and give the names it defines."""
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, page, "exec"), names)
    return names


def test_the_worked_example_equals_one_device() -> None:
    case, strategy = Case(num=11), code_of("adding_a_strategy.md")["MicroBatchStrategy"]  # batches of 4, 4 and 3
    torch.testing.assert_close(run(case, strategy(3), devices=1).weights, baseline(case).weights, rtol=0, atol=1e-10)


def test_the_worked_example_refuses_no_parts() -> None:
    with pytest.raises(ConfigError, match="num_microbatches=0 is not positive"):
        code_of("adding_a_strategy.md")["MicroBatchStrategy"](0)


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
    project = DOCS.parent / "examples" / "user_project"
    monkeypatch.syspath_prepend(str(project))
    spirals = importlib.import_module("spirals")
    trainer = Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
                      limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(spirals.SpiralClassifier(), datamodule=spirals.SpiralData())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_EVENER, str(DOCS / "inference.md")]
    env = {**os.environ, "PYTHONPATH": str(project)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch.Size([5, 3])" in done.stdout


def program(name: str) -> Any:
    """A program beside the pages."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def test_the_sites_reference_has_the_options_of_every_file_with_their_meaning() -> None:
    page = program("reference").files()
    assert "# Number of machines." in page.partition("## callbacks")[0]
    ddp = page.partition("### `strategy=ddp`")[2].partition("### ")[0]
    assert "# Seconds that a rank waits for the others before it fails.\ntimeout_s: 1800\n" in ddp
    assert [f"### `{file.parent.name}={file.stem}`" in page for file in CONF.glob("*/*.yaml")].count(False) == 0


LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("page", [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert broken == []


PROSE = [*DOCS.rglob("*.md"), *(DOCS.parent / "examples").rglob("*.md"), *DOCS.parent.glob("[!C]*.md")]
PATH = re.compile(r"(?<![\w./-])(?:trainer|strategies|conf|examples|tests|benchmarks|docs)/[\w./*<>-]*\w")
NOT_OURS = {
    "conf/module/mine.yaml",
    "conf/project.yaml",
    "conf/module/spirals.yaml",
    "conf/data/spirals.yaml",
    "tests/tests_pytorch",
    "docs/gpu_table.md",
}
"""A user's own file, Lightning's tests, and what is written on a machine with a GPU."""


@pytest.mark.parametrize("page", [*PROSE, DOCS.parent / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(PATH.findall(page.read_text(encoding="utf-8"))) - NOT_OURS
    roots = (DOCS.parent, page.parent)
    missing = [path for path in named if "<" not in path and not any(list(root.glob(path)) for root in roots)]
    assert missing == []


STEP = re.compile(r"^\| \d+\w? \| [^|]+ \| `([^`]+)` \| `([^`]+)` \|$", flags=re.MULTILINE)


def test_the_functions_on_a_batch_s_way_are_in_their_files() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    steps = STEP.findall(page)
    assert len(steps) == len(re.findall(r"^\| \d", page, flags=re.MULTILINE)) > 30
    assert [f"{file}: {name}" for file, name in steps if name not in defined_in(DOCS.parent / file)] == []


def test_the_code_on_the_page_of_architecture_is_the_product_s() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    [(file, code)] = re.findall(r"```python\n# (\S+)\n(.*?)```", page, flags=re.DOTALL)
    assert textwrap.indent(code, "    ") in (DOCS.parent / file).read_text(encoding="utf-8")


def defined_in(file: Path) -> set[str]:
    """Names of a file's functions, and of its classes' methods as `Class.method`."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    kinds = (ast.FunctionDef, ast.ClassDef)
    methods = [(cls, item) for cls in body if isinstance(cls, ast.ClassDef) for item in cls.body]
    named = {f"{cls.name}.{item.name}" for cls, item in methods if isinstance(item, ast.FunctionDef)}
    return named | {item.name for item in body if isinstance(item, kinds)}


ROW = re.compile(r"^\| (\d+) \|", flags=re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]*test_\w+\.py)::(test_\w+)`")


def test_every_pain_has_one_row_with_tests_that_exist() -> None:
    page = (DOCS / "dev" / "pains.md").read_text(encoding="utf-8")
    assert [int(number) for number in ROW.findall(page)] == list(range(1, 43))
    assert [line for line in page.splitlines() if ROW.match(line) and not TEST.search(line)] == []
    missing = [
        f"{file}::{test}"
        for file, test in TEST.findall(page)
        if not re.search(rf"^def {test}\(", (DOCS.parent / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    assert missing == []


SENTENCE = re.compile(r"^\| `([^`]+)` \|", flags=re.MULTILINE)


def sentence_of(node: ast.AST) -> str | None:
    """The text of a string in the source, `…` standing for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[a-z]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]
    return None


def sentences_in_source() -> list[str]:
    files = [file for room in ("trainer", "strategies", "examples") for file in (DOCS.parent / room).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    return [text for text in map(sentence_of, nodes) if text is not None]


def test_every_quoted_sentence_is_in_the_source() -> None:
    quoted = SENTENCE.findall((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(quoted) > 50
    source = sentences_in_source()
    missing = []
    for sentence in quoted:
        parts = [re.escape(part.strip()) for part in sentence.split("…") if part.strip()]
        pattern = re.compile(".*?".join(parts), flags=re.DOTALL)
        if not any(pattern.search(text) for text in source):
            missing.append(sentence)
    assert missing == []


def test_the_site_and_the_index_name_every_page() -> None:
    site, index = (page.read_text(encoding="utf-8") for page in (ROOT / "mkdocs.yml", DOCS / "README.md"))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert [page for page in pages if f"]({page})" not in index] == []
    assert [page for page in pages | {"index.md", "pages.md"} if f": {page}\n" not in site] == []


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocstrings") is None, reason="mkdocs is not installed; pip install evener[docs]"
)
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = {
        "index.html": "the bar that shares a load evenly", "pages/index.html": "to understand",
        "api/index.html": "DDPStrategy", "about.zh/index.html": "策略", "configuration/index.html": "&lt;name&gt;",
        "strategies/index.html": "images/drawings/",
    }  # fmt: skip
    for page, text in shown.items():
        assert text in (tmp_path / page).read_text(encoding="utf-8"), page
    index = (tmp_path / "search" / "search_index.json").read_text(encoding="utf-8").lower()
    assert all(words in index for words in ("load a checkpoint", "inference", "class weights"))


def test_every_drawing_of_the_pages_is_current() -> None:
    drawn = {file.stem for file in (DOCS / "images" / "drawings").glob("*.svg")}
    assert drawn == set(program("drawings").blocks()), "run `python docs/drawings.py <mermaid.min.js>`"


SECTION = re.compile(r"^## `(\w+)`([^\n]*)\n(.*?)(?=^## |\Z)", flags=re.MULTILINE | re.DOTALL)
DRAWN = {
    f"{name}{rest}": text for name, rest, text in SECTION.findall((DOCS / "strategies.md").read_text(encoding="utf-8"))
}
FIVE_EACH = [Even().sizes(10, 2), Even().sizes(5, 2), Even().sizes(5, 2)]
CUTS = {
    "single_device": [],
    "dp": [Even().sizes(10, 3)],
    "balanced_dp": [FirstChunk(2).sizes(10, 3)],
    "ddp": [Even().sizes(10, 2)],
    "ddp with `devices_per_process`": FIVE_EACH,
    "balanced_ddp": [Weighted((3, 1)).sizes(10, 2)],
    "model_parallel": [Even().sizes(10, 4)],
    "ddp_model_parallel": FIVE_EACH,
    "balanced_ddp_model_parallel": [Weighted((3, 1)).sizes(10, 2), Even().sizes(8, 2), Even().sizes(2, 2)],
    "fsdp": [Even().sizes(10, 2)],
}


@pytest.mark.parametrize("strategy", CUTS)
def test_a_batch_is_drawn_as_the_strategy_cuts_it(strategy: str) -> None:
    """In a drawing, or in words where a strategy has another one's drawing."""
    drawn = [
        [int(size) for size in cut.split(" + ")] for cut in re.findall(r'["`](\d+(?: \+ \d+)+)[",`]', DRAWN[strategy])
    ]
    assert drawn == CUTS[strategy]


def test_every_strategy_is_drawn_and_indexed() -> None:
    assert set(DRAWN) == set(CUTS)
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert [name for name in STRATEGIES if name not in DRAWN or f"](strategies.md#{name})" not in index] == []
