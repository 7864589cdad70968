"""The commands of the pages: found, shortened, and looked at without being run."""

import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "user_project" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

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


def torchrun_options(command: str) -> Namespace:
    """Parse a `torchrun` command as torchrun does."""
    return get_args_parser().parse_args(shlex.split(command)[1:])


def unknown_extras(command: str) -> list[str]:
    """Extras that a `pip install` names and pyproject.toml lacks, and files that are not there."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    known = re.findall(r"^(\w+) = \[", project.partition("\n[")[0], flags=re.MULTILINE)
    extras = [extra for group in re.findall(r"(?:\.|evener)\[([\w,]+)\]", command) for extra in group.split(",")]
    files = re.findall(r"-[cr] (?:path/to/evener/)?(\S+)", command)
    return [extra for extra in extras if extra not in known] + [file for file in files if not (ROOT / file).exists()]
