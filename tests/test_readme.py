"""The README's commands are real: each composes, and the slow suite runs each as it stands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"^ *(python train\.py[^#\n]*?) *(?:#.*)?$", README, flags=re.MULTILINE)))


def run(command: str, home: Path, *more: str) -> subprocess.CompletedProcess[str]:
    _, _, *arguments = shlex.split(command)
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments, *more],
        cwd=home, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_readme_has_exactly_two_set_up_commands() -> None:
    assert re.findall(r"<!-- (\w+) -->\n```bash\npython3 -m venv", README) == ["train", "test"]
    assert README.count("python3 -m venv") == 2


def test_every_command_is_found() -> None:
    assert {"python train.py", "python train.py --help", "python train.py experiment=char_lm"} <= set(COMMANDS)


def runnable(command: str) -> bool:
    """Commands with eight devices or a placeholder class show the form; their strategies are run with two."""
    return "my_project" not in command and "devices=8" not in command and "…" not in command


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", [command for command in COMMANDS if runnable(command)])
def test_command_runs(command: str, tmp_path: Path) -> None:
    if "resume=last" in command:
        assert run("python train.py", tmp_path, "trainer.max_epochs=1").returncode == 0
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    shows = any(word in command for word in ("--help", "--cfg", "mode=compare", "mode=plan"))
    assert shows or "run directory" in done.stdout


def test_python_blocks_compile() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "README.md", "exec")


def commands_of(page: str) -> list[str]:
    """Blocks of bash and Python, and commands in the text, as they stand."""
    return re.findall(r"^```(?:bash|python)\n[\s\S]*?^```|^ {4}python .*$|`python [^`]+`", page, flags=re.MULTILINE)


def test_the_chinese_readme_has_the_same_commands() -> None:
    chinese = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    assert len(commands_of(README)) > 5
    assert commands_of(chinese) == commands_of(README)


def test_the_readmes_link_to_each_other() -> None:
    assert "](README.zh.md)" in README
    assert "](README.md)" in (ROOT / "README.zh.md").read_text(encoding="utf-8")
