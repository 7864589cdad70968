"""Every command of every page runs: in a short form here, and under `-m slow` as a user starts it."""

import json
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks, run_script
from omegaconf import DictConfig
from torch.distributed.run import get_args_parser

from evener.trainer import compose
from evener.trainer.launch.launcher import launch
from evener.trainer.study import compare
from evener.trainer.study.compare import Trial

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "examples/user_project/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

# ---------------------------------------------------------------------------------------------- what the pages hold

_PROGRAM = r"(?:python3?|pip|pytest|torchrun|srun|tensorboard|ruff|basedpyright|evener)"
_SHELL = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(rf"^ {{4}}({_PROGRAM} .*)$", flags=re.MULTILINE)
_INLINE = re.compile(rf"`({_PROGRAM} [^`]+)`")
_COMMAND = re.compile(rf"\b{_PROGRAM} +(?:-\w|--\w|install\b|\S+\.py\b)")
"""What looks like a command wherever it stands."""


def commands_of(text: str) -> list[str]:
    """The commands of a page: lines of shell blocks, indented lines, and code in the text; comments left out."""
    rest = _SHELL.sub("", text)
    lines = [line for block in _SHELL.findall(text) for line in _lines(block)]
    return [*lines, *_INDENTED.findall(rest), *_INLINE.findall(rest)]


def _lines(block: str) -> Iterator[str]:
    for line in block.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s+)#.*$", "", line).strip()
        if command:
            yield re.sub(r"\s+", " ", command)


def overlooked(text: str) -> list[str]:
    """What looks like a command and is none of `commands_of`: it stands in a block of another kind, or bare."""
    rest = _INLINE.sub("", _INDENTED.sub("", _SHELL.sub("", text)))
    return [line for line in rest.splitlines() if _COMMAND.search(line)]


def commands() -> list[tuple[str, str]]:
    """(folder of the project, command), each once; only `examples/user_project` is a project of its own."""
    found = [
        ("examples/user_project" if "user_project" in page.parts else "", command)
        for page in PAGES
        for command in commands_of(page.read_text(encoding="utf-8"))
    ]
    return list(dict.fromkeys(found))


def words_after(command: str, script: str) -> list[str]:
    """The arguments of a script within a command; what the shell would fill in is null."""
    return shlex.split(re.sub(r"\$\([^)]*\)", "null", command.partition(script)[2]))


COMMANDS = commands()

CANNOT_RUN = (
    "pip install", "cyclonedx-py ", "python3 -m venv ", ". .venv/",  # network
    "eval ", "ruff check", "pytest -m slow", "python -m build", "python -m torch.distributed.launch",  # run elsewhere
    "python src/eval.py", "pytest -p evener.trainer", "python tests/",  # others' files and packages
    "srun ", "[ $? -eq 138 ]", "python train.py -m hydra/launcher=submitit_slurm",  # SLURM: launch/test_slurm.py
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun", "torchrun --nnodes=2 ",  # machines: launch/test_membership.py
    "python train.py hparams_search=optuna",  # study/test_search.py
)  # fmt: skip
"""Beginnings of commands that can't run here, and why; they are composed or parsed instead."""

ELSEWHERE = [command for _, command in COMMANDS if command.startswith(CANNOT_RUN)]
RUNNABLE = [case for case in COMMANDS if case[1] not in ELSEWHERE]
TRAINING = [case for case in RUNNABLE if case[1].startswith("python train.py")]
OTHER = [command for _, command in RUNNABLE if not command.startswith("python train.py")]

MY_PROJECT = """
from evener.examples.digits import DigitsClassifier, DigitsDataModule


class MyModule(DigitsClassifier):
    def __init__(self):
        super().__init__()


class MyData(DigitsDataModule):
    pass
"""
WORKED_EXAMPLE = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "adding_a_strategy.md").read_text(encoding="utf-8"), flags=re.DOTALL
)[0]

SHORT = [
    "trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1", "trainer.num_sanity_val_steps=0",
    "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false",
]  # fmt: skip
SHORT_COMPARISON = ["compare.strategies=[dp]", "compare.steps=6", "compare.warmup_steps=1"]
SHOWS = ("--help", "--cfg", "mode=compare", "mode=plan")
"""Words of commands that train nothing, and leave no result."""


def name(case: tuple[str, str]) -> str:
    return " ".join(filter(None, [case[0] and "project:", case[1]]))


def test_no_command_stands_where_it_is_not_found() -> None:
    found = {page.name: overlooked(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {page: lines for page, lines in found.items() if lines} == {}, "use a ```bash block"


def test_commands_that_cannot_run_are_on_a_page_and_enough_others_are_found() -> None:
    assert [start for start in CANNOT_RUN if not any(command.startswith(start) for command in ELSEWHERE)] == []
    assert len(TRAINING) > 35
    assert len(OTHER) > 6


def torchrun_options(command: str) -> Any:
    """Parse a `torchrun` command as torchrun does."""
    return get_args_parser().parse_args(shlex.split(command)[1:])


def unknown_extras(command: str) -> list[str]:
    """Extras that a `pip install` names and pyproject.toml lacks, and files that are not there."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    known = re.findall(r"^(\w+) = \[", project.partition("\n[")[0], flags=re.MULTILINE)
    extras = [extra for group in re.findall(r"(?:\.|evener)\[([\w,]+)\]", command) for extra in group.split(",")]
    files = re.findall(r"-[cr] (?:path/to/evener/)?(\S+)", command)
    return [extra for extra in extras if extra not in known] + [file for file in files if not (ROOT / file).exists()]


# ------------------------------------------------------------------------------------- what can't run is looked at


@pytest.mark.parametrize("command", ELSEWHERE)
def test_a_command_that_cannot_run_is_well_formed(command: str) -> None:
    if command.startswith("torchrun"):
        options = torchrun_options(command)
        assert (options.nnodes, options.nproc_per_node, options.training_script) == ("2", "2", "train.py")
    if "train.py" in command and not command.startswith("eval "):
        assert composed(words_after(command, "train.py")).strategy._target_.endswith("Strategy")
    assert unknown_extras(command) == []
    for path in re.findall(r"tests/\S+\.py", command if command.startswith("pytest") else ""):
        assert "pytest.mark.slow" in (ROOT / path).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------- in short, in this process


def shortened(words: list[str], cfg: DictConfig) -> list[str]:
    """What is added to a command so that it is soon over."""
    if "--help" in words or "--cfg" in words:
        return []
    added = [] if cfg.mode == "plan" and cfg.accelerator != "auto" else ["accelerator=cpu"]
    if cfg.mode == "plan":
        return added
    if (num := num_processes(words, cfg)) > 1:
        added.append(f"devices={num * devices_per_process(cfg)}")
    more = SHORT_COMPARISON if cfg.mode == "compare" else []
    if "debug=trace" in words:  # torch's profiler begins with the third step
        more = ["trainer.limit_train_batches=8", "trainer.limit_val_batches=0"]
    return [*added, *SHORT, *more]


def composed(words: list[str]) -> DictConfig:
    """The configuration of a command, the first of a sweep's."""
    given = [re.sub(r"=([^\[,]*),.*", r"=\1", word) for word in words if "=" in word and not word.startswith("hydra")]
    return compose(given)


def devices_per_process(cfg: DictConfig) -> int:
    return cfg.strategy.get("model_parallel_size", cfg.strategy.get("devices_per_process", 1))


def num_processes(words: list[str], cfg: DictConfig) -> int:
    """Processes that a command is run in here: none but this one, or two where it starts some; one for a sweep."""
    if not any(word.startswith("strategy=") and "ddp" in word for word in words) or cfg.mode == "plan":
        return 0
    return 1 if "-m" in words else 2


def in_this_process(cfg: DictConfig, strategy: str, timeout_s: float) -> Trial:
    """As `run_trial`, without a process of its own."""
    Path(cfg.run_dir).mkdir(parents=True)
    launch(cfg)
    return Trial.read(Path(cfg.run_dir), strategy, "")


def train_here(project: str, words: list[str]) -> None:
    """Run a `train.py`, of this repository or of a project, as `python train.py` does."""
    script = ROOT / project / "train.py"
    status: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(script.parent))
        patch.setattr(sys, "argv", [str(script), *words])
        patch.delenv("HYDRA_FULL_ERROR", raising=False)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as exc:
            status = exc.code
    assert status in (None, 0), status


def train_in_rank(home: Path, project: str, words: list[str]) -> None:
    """The same under the environment of torchrun, where `train.py` is a worker and starts nothing."""
    os.chdir(home)
    train_here(project, words)


def filled_in(words: list[str], train: Any) -> list[str]:
    """Words with a real path for a place holder; a run comes first where one is to be resumed."""
    if not any(word.startswith("resume=") for word in words):
        return words
    train()
    (checkpoint,) = Path.cwd().rglob("last.ckpt")
    return [re.sub(r"^resume=(<path>|logs/\.\.\..*)$", f"resume={checkpoint}", word) for word in words]


def verify_results(home: Path, words: list[str]) -> None:
    """A run leaves its metrics, each of them a number."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in home.rglob("result.json")]
    jobs = math.prod(len(word.partition("=")[2].split(",")) for word in words if "-m" in words and "=" in word)
    assert len(results) >= jobs
    for result in results:
        assert result["metrics"] or result["predictions"] or "profile" in str(words) or "debug=fast" in words
        assert all(math.isfinite(value) for value in result["metrics"].values())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:You requested to overfit")  # Lightning's word on debug=overfit
@pytest.mark.parametrize("case", TRAINING, ids=name)
def test_command_runs_in_short(case: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, command = case
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "run_trial", in_this_process)
    (tmp_path / "my_project.py").write_text(MY_PROJECT + WORKED_EXAMPLE, encoding="utf-8")
    words = words_after(command, "train.py")
    if "-m" in words:
        words = [re.sub(r"^([^,\[]+,[^,]+),.*", r"\1", word) for word in words]  # two values are a sweep, too
    words = filled_in(words, lambda: train_here(project, ["accelerator=cpu", *SHORT]))
    cfg = composed(words)
    words += shortened(words, cfg)
    num = num_processes(words, cfg)
    if num and cfg.launcher.survive:  # which needs the command's own launcher
        run_script(train_in_rank, tmp_path, project, words, timeout_s=300)
    elif num:
        run_ranks(train_in_rank, num, tmp_path, project, words, timeout_s=300)
    else:
        train_here(project, words)
    if not any(word in command for word in SHOWS):
        verify_results(tmp_path, words)


# ------------------------------------------------------------------------------------------ as a user starts them

SHORT_BENCHMARKS = {
    "communication.py": ["--devices", "2"],
    "data_parallel.py": ["--rounds", "2", "--layers", "10"],
    "global_view.py": ["--rounds", "1", "--steps", "10"],
    "many_ranks.py": ["--ranks", "4", "--processes", "2", "--seconds", "1"],
    "pipeline.py": ["--rounds", "1", "--steps", "2", "--batch", "64", "--microbatches", "1,4"],
    "real_models.py": ["--models", "GPT", "--ranks", "1", "--rounds", "1", "--steps", "6"],
    "reduction.py": ["--rounds", "1", "--steps", "5", "--microbatches", "2"],
    "resume_table.py": ["--frameworks", "evener", "--loaders", "shuffled", "--strategies", "dp", "--every", "8"],
    "silent_bugs/run.py": ["--frameworks", "evener", "--only", "control"],
    "snapshots.py": ["--rounds", "1", "--steps", "13", "--megabytes", "50", "--every", "2"],
    "step_overhead.py": ["--rounds", "1", "--steps", "80"],
    "uneven_ranks.py": ["--rounds", "1", "--steps", "10"],
}
"""Fewer rounds for measurements that take minutes."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", [c for c in OTHER if "benchmarks/" in c or c.startswith("torchrun")])
def test_other_command_runs(command: str, tmp_path: Path) -> None:
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in shlex.split(command)]
    more = [option for script, options in SHORT_BENCHMARKS.items() if script in command for option in options]
    launcher = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[words[0]]
    done = subprocess.run(
        [*launcher, *words[1:], *more], cwd=tmp_path, capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
