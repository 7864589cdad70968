"""An installed wheel finds its configuration and runs from an empty directory."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import warm_python

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's files and nothing else of this project."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=False
    )
    names = listed.stdout.decode().split() or [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]
    for name in names:
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(home), str(source)]
    built = subprocess.run(build, check=True, timeout=300, capture_output=True, text=True)
    told = [
        line for line in (built.stdout + built.stderr).splitlines() if re.search("warn|absent", line, re.IGNORECASE)
    ]
    assert [line for line in told if "byte-compiling is disabled" not in line] == []
    (wheel,) = home.glob("evener-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home / "site")
    return home / "site"


def test_wheel_holds_the_files_of_the_checkout_and_no_others(installed: Path) -> None:
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {"evener"}
    for package in ("", "trainer", "strategies", "conf", "examples"):
        assert (installed / "evener" / package / "py.typed").exists()
    folders = ("src/evener/*.*", "trainer", "strategies", "conf", "examples")
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout, to know which files belong to it")
    here = set(listed.stdout.split())
    packed = {str(path.relative_to(installed / "evener")) for path in (installed / "evener").rglob("*.*")}
    assert packed == {name.removeprefix("src/evener/") for name in here if (ROOT / name).exists()}


def test_importing_evener_loads_no_torch_and_its_words_work(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys, evener; assert 'torch' not in sys.modules; print(evener.__file__); import torch;"
        "print(float(evener.mean(torch.tensor([1.0, 3.0]))), evener.over_batch(torch.mean)(torch.ones(2)).item());"
        "import evener.trainer as t; print(t.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
        check=True,
    )  # fmt: skip
    package, words, trainer = told.stdout.splitlines()
    assert package == str(installed / "evener" / "__init__.py")
    assert words == "2.0 1.0"
    assert trainer.startswith(str(installed)), "not the checkout's own files"


@pytest.mark.long
def test_wheel_runs_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    options = ["accelerator=cpu", "trainer.max_epochs=1", "trainer.limit_train_batches=2"]
    run = warm_python.run("-m", "evener.trainer", *options, cwd=tmp_path, env=environment, without_lightning=True)
    assert run.returncode == 0, run.stderr
    assert "fit finished" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


@pytest.mark.long
def test_a_new_project_runs_on_the_wheel(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    words = ["-c", "from evener.trainer.cli.tool import main; main()", "new", "project"]
    new = warm_python.run(*words, cwd=tmp_path, env=environment, without_lightning=True)
    assert new.returncode == 0, new.stderr
    options = ["strategy=ddp", "devices=2", "accelerator=cpu", "trainer.enable_progress_bar=false"]
    run = warm_python.run(
        tmp_path / "project" / "train.py", *options, cwd=tmp_path / "elsewhere", env=environment, without_lightning=True
    )
    assert run.returncode == 0, run.stderr
    (written,) = (tmp_path / "elsewhere" / "logs" / "project" / "ddp").rglob("result.json")
    result = json.loads(written.read_text())
    assert result["metrics"]["test/acc"] > 0.85
    assert result["num_processes"] == 2


@pytest.mark.long
def test_the_installed_command_starts() -> None:
    command = Path(sys.executable).with_name("evener")
    if not command.exists():
        pytest.skip("evener is not installed in this environment")
    shown = subprocess.run(
        [str(command), "train", "--cfg", "job"], capture_output=True, text=True, timeout=300, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "evener.trainer.Trainer" in shown.stdout
