"""The two READMEs say the same; tests/trainer/cli/test_commands.py runs their commands."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_has_exactly_two_set_up_commands() -> None:
    assert re.findall(r"<!-- (\w+) -->\n```bash\npython3 -m venv", README) == ["train", "test"]
    assert README.count("python3 -m venv") == 2


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
