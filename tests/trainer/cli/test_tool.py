"""The command `evener`, in this process."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from evener.strategies import STRATEGIES
from evener.trainer.cli import main as command
from evener.trainer.cli import tool


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "only_check", False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("HYDRA_FULL_ERROR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def evener(monkeypatch: pytest.MonkeyPatch, *words: str) -> str | int | None:
    """Run the command; what it exits with."""
    monkeypatch.setattr(sys, "argv", ["evener", *words])
    try:
        tool.main()
    except SystemExit as exc:
        return exc.code
    return None


def test_without_a_word_the_commands_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evener(monkeypatch) is None
    told = capsys.readouterr().out
    assert [word for word in tool.WORDS if f"    {word}" not in told] == []


@pytest.mark.parametrize("words", [["--version"], ["train", "--version"]])
def test_the_version_is_the_distributions(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evener(monkeypatch, *words) in (0, None)
    assert capsys.readouterr().out.strip() == f"evener {version('evener')}"


@pytest.mark.parametrize("word", ["--help", *(f"{word} --help" for word in tool.WORDS)])
def test_every_command_has_help(word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert evener(monkeypatch, *word.split()) in (0, None)
    assert len(capsys.readouterr().out) > 60


def test_strategies_lists_all_of_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert evener(monkeypatch, "strategies") is None
    told = capsys.readouterr().out
    assert [name for name in STRATEGIES if not re.search(rf"│ {name} +│ [A-Z]", told)] == []


def test_env_shows_versions_and_cluster_variables_but_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_API_KEY", "hush")
    assert evener(monkeypatch, "env") is None
    told = capsys.readouterr().out
    assert re.search(rf"^evener +{re.escape(version('evener'))}$", told, re.MULTILINE)
    assert re.search(r"^NCCL_DEBUG +INFO$", told, re.MULTILINE)
    assert "hush" not in told


def test_a_new_project_is_whole_and_valid_and_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evener(monkeypatch, "new", "mine") is None
    files = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    assert {"train.py", "README.md", "spirals.py", "test_spirals.py", "conf/project.yaml"} <= files
    assert "name: mine" in (tmp_path / "mine" / "conf" / "project.yaml").read_text()
    again = evener(monkeypatch, "new", "mine")
    assert again == "Error: mine exists already. Give the name of a new folder, such as evener new mine_2."
    monkeypatch.chdir(tmp_path / "mine")
    assert evener(monkeypatch, "config", "validate", "strategy=ddp", "devices=2", "accelerator=cpu") is None
    told = capsys.readouterr().out
    assert "The configuration is valid: module=spirals.SpiralClassifier, data=spirals.SpiralData, " in told
    assert not (tmp_path / "mine" / "logs").exists()
    wrong = evener(monkeypatch, "config", "validate", "devices=0")
    assert str(wrong).startswith("Error: devices=0: at least one device is needed.")
    assert evener(monkeypatch, "config", "validate", "module.hiden=3") == (
        "Error: module.hiden is unknown. Did you mean module.hidden?"
    )
    assert not (tmp_path / "mine" / "logs").exists()


def test_a_project_shows_every_group_with_what_each_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evener(monkeypatch, "new", "mine") is None
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setenv("COLUMNS", "200")
    capsys.readouterr()
    assert evener(monkeypatch, "train", "--help", "strategy=ddp") is None
    told = capsys.readouterr().out
    for group in ("strategy", "callbacks", "checkpoint", "logger", "trainer", "launcher", "debug"):
        assert re.search(rf"^{group}(: |$)", told, re.MULTILINE), group
    assert re.search(r"^\* ddp +One process per device", told, re.MULTILINE)
    assert re.search(r"^\* spirals +A small network", told, re.MULTILINE)
    assert "\n# Units of each hidden layer.\nhidden: 64\n" in told
    assert "\n# Seconds that a rank waits for the others before it fails.\ntimeout_s: 1800\n" in told
    assert "\nname: mine\n" in told


@pytest.mark.parametrize(
    ("line", "answers"),
    [("evener st", ["strategies"]), ("evener train strategy=balanced_dp", ["strategy=balanced_dp"])],
)
def test_the_shell_completes_commands_and_the_words_of_train(
    line: str, answers: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert evener(monkeypatch, "-sc", "query=bash") in (0, None)
    assert set(answers) <= set(capsys.readouterr().out.split())


def test_a_project_s_name_is_quoted_for_the_shell_and_its_logs_are_ignored_by_git(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evener(monkeypatch, "new", "my project") is None
    assert "cd 'my project'\n" in capsys.readouterr().out
    assert "logs/" in Path("my project/.gitignore").read_text(encoding="utf-8").splitlines()
