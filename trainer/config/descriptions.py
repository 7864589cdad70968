"""Read what the comments in configuration files say about groups, files and options."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .group_files import Source

_LINE = re.compile(r"( *)(?:- )?([\w/]+):(?: +([^#]*?))?(?: +# (.*))?$")
_BASE = re.compile(r"^  - ([a-z]\w*)$", flags=re.MULTILINE)


@dataclass(frozen=True)
class Option:
    """One option of a file.

    Args:
        name: dotted if it is nested.
        comment: what stands above or beside it.
    """

    name: str
    default: str
    comment: str


def leaves(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings with their keys joined by dots; an empty mapping is a value."""
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def as_given(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(as_given, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def kind_of(value: Any) -> str:
    """The type of a value in a word; empty if it is null or refers to another option."""
    words = {bool: "true or false", int: "int", float: "float", str: "text", list: "list", dict: "mapping"}
    return "" if isinstance(value, str) and ("${" in value or value == "???") else words.get(type(value), "")


def summary(text: str) -> str:
    """The comment that a file opens with."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("# @"):
            continue
        if not line.startswith("#"):
            break
        comment = line.lstrip("# ")
        lines.append(f"`{comment}`." if line.startswith("#   ") else comment)  # indented: a command
    return " ".join(lines)


def first_sentence(text: str) -> str:
    """The opening comment up to its first full stop or command."""
    return re.split(r"(?<=[a-z)\]\d])\.(?:\s|$)|: `|; `", summary(text) + " ")[0].strip()


def group_notes(source: Source) -> dict[str, str]:
    """What the root configuration's defaults list says beside each group."""
    found: dict[str, str] = {}
    for line in (source.text(source.config_name) + "\n" + source.text("train")).splitlines():
        if match := re.match(r"  - (?:override |optional )?/?(\w+): \w+ +# (.*)$", line):
            found.setdefault(match[1], match[2])
    return found


def bases(source: Source, name: str) -> list[str]:
    """The files that a file inherits by its defaults list, and those that they inherit.

    Args:
        source: where the configuration comes from.
        name: such as `strategy/ddp`.
    """
    _, _, rest = source.text(name).partition("defaults:\n")
    direct = [f"{name.rpartition('/')[0]}/{entry}" for entry in _BASE.findall(rest.partition("\n\n")[0])]
    return [found for base in direct for found in (base, *bases(source, base))]


def options(text: str) -> list[Option]:
    """List a file's own options, with the comments above or beside them."""
    found: list[Option] = []
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
            continue
        match = _LINE.match(line)
        if match:
            indent, key, value, beside = len(match[1]), match[2], match[3], match[4]
            path = [(i, k) for i, k in path if i < indent]
            if value and key != "_target_":
                name = ".".join([*(k for _, k in path), key])
                found.append(Option(name, value.strip(), beside or " ".join(comment)))
            path.append((indent, key))
        if not stripped or match:
            comment = []
    return [option for option in found if not option.name.startswith(("defaults", "help", "hydra"))]


def all_options(source: Source, name: str) -> Iterator[Option]:
    """List a file's own options, then those that it inherits; each name once.

    Args:
        source: where the configuration comes from.
        name: such as `strategy/ddp`.
    """
    seen: set[str] = set()
    for file in (name, *bases(source, name)):
        for option in options(source.text(file)):
            if option.name not in seen:
                seen.add(option.name)
                yield option


def choices_with(source: Source, group: str, option: str) -> list[str]:
    """Names of the files of a group that have an option; sorted."""
    return [
        name for name in source.files(group)
        if any(found.name.partition(".")[0] == option for found in all_options(source, f"{group}/{name}"))
    ]  # fmt: skip
