"""The two READMEs say the same; tests/trainer/cli/test_commands.py runs their commands."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh.md").read_text(encoding="utf-8")
VERSIONS = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")


def test_readme_has_exactly_two_set_up_commands() -> None:
    assert re.findall(r"<!-- (\w+) -->\n```bash\npython3 -m venv", README) == ["train", "test"]
    assert README.count("python3 -m venv") == 2


def test_readme_has_at_most_100_lines_and_says_early_what_it_has_not_run_on() -> None:
    assert len(README.splitlines()) <= 100
    assert "It has run on one GPU, and not yet on several" in "\n".join(README.splitlines()[:20])


def test_both_sides_of_the_difference_from_lightning_compile() -> None:
    (block,) = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)
    for sign in "+-":
        lines = [line[1:] for line in block.splitlines() if line[:1] in ("", " ", sign)]
        compile("\n".join(lines), "README.md", "exec")


def commands_of(page: str) -> list[str]:
    """Blocks of bash and Python, and commands in the text, as they stand, without comments."""
    found = re.findall(r"^```(?:bash|diff)\n[\s\S]*?^```|^ {4}python .*$|`python [^`]+`", page, flags=re.MULTILINE)
    return [re.sub(r" +# .*", "", block) for block in found]


def test_the_chinese_readme_has_the_same_commands() -> None:
    assert len(commands_of(README)) > 4
    assert commands_of(CHINESE) == commands_of(README)


def test_the_chinese_readme_has_the_same_sections_and_tables() -> None:
    def shape(page: str) -> list[str]:
        """Levels of headings, and the number of columns of each row of a table."""
        found = re.findall(r"^(#+) |^(\|.*\|)$", page, flags=re.MULTILINE)
        return [heading or str(row.count("|")) for heading, row in found]

    assert shape(CHINESE) == shape(README)


def test_the_readmes_link_to_each_other() -> None:
    assert "](README.zh.md)" in README
    assert "](README.md)" in CHINESE


PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PYTHONS = SpecifierSet(re.findall(r'^requires-python = "(.*?)"', PYPROJECT, flags=re.MULTILINE)[0])
MINORS = [f"3.{minor}" for minor in range(7, 30) if f"3.{minor}" in PYTHONS]


@pytest.mark.parametrize("python", MINORS)
def test_every_requirement_is_pinned_once_for_each_python(python: str) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    machine = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    applying = [pin.name for pin in pins if pin.marker is None or pin.marker.evaluate(machine)]
    assert len(applying) == len(set(applying))
    required = re.findall(
        r'^    "([\w-]+)(?:\[\w+\])?[><=]', PYPROJECT.partition("third-party = [")[0], flags=re.MULTILINE
    )
    assert {"torch", "pytorch-lightning", "import-linter"} < set(required)
    assert set(required) <= set(applying)


def test_the_lock_with_hashes_has_the_pins_of_the_constraints() -> None:
    pins, locked = ((ROOT / name).read_text(encoding="utf-8") for name in ("constraints.txt", "requirements.lock"))
    lines = [line.removesuffix(" \\") for line in locked.splitlines() if line[:1] not in (" ", "#")]
    assert lines == [line for line in pins.splitlines() if not line.startswith("#")]


def test_the_table_of_versions_has_what_pyproject_allows() -> None:
    rows = re.findall(r"^\| (3\.\d+)\.\d+ \| (2\.\d+)\.", VERSIONS, flags=re.MULTILINE)
    assert sorted({python for python, _ in rows}) == sorted(MINORS)
    allowed = Requirement(re.findall(r'"(torch[><=].*?)"', PYPROJECT)[0]).specifier
    torches = [f"2.{minor}" for minor in range(40) if f"2.{minor}" in allowed]
    assert sorted({torch for _, torch in rows}) == torches


def test_the_names_of_extras_are_in_normal_form() -> None:
    """Those with an underscore are in the metadata with a hyphen, so that an older pip does not find them."""
    extras = PYPROJECT.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    names = re.findall(r"^([\w.-]+) = \[", extras, flags=re.MULTILINE)
    assert "test" in names
    assert names == [canonicalize_name(name) for name in names]
