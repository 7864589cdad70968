"""Read what the comments in configuration files say about groups, files and options."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from .group_files import Source

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
    """The files that a file, such as `strategy/ddp`, inherits by its defaults list, and those that they inherit."""
    listed = (yaml.load(source.text(name), _Loader) or {}).get("defaults", [])
    named = (entry for entry in listed if isinstance(entry, str) and entry != "_self_")
    direct = [f"{name.rpartition('/')[0]}/{entry}" for entry in named]
    return [found for base in direct for found in (base, *bases(source, base))]


def options(text: str) -> list[Option]:
    """List a file's own options, with the comments above or beside them."""
    root: Any = yaml.compose(text, _Loader)
    found = [] if root is None else _options(root, text, text.splitlines())
    return [option for option in found if not option.name.startswith(("defaults", "help", "hydra"))]


def _options(node: Any, text: str, lines: list[str], before: str = "") -> Iterator[Option]:
    for key, value in node.value:
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _options(value, text, lines, f"{before}{key.value}.")
        elif (default := text[value.start_mark.index : value.end_mark.index]) and key.value != "_target_":
            beside = lines[key.start_mark.line].partition(" # ")[2]
            yield Option(f"{before}{key.value}", default, beside or _above(lines, key.start_mark.line))


def _above(lines: list[str], number: int) -> str:
    """The comment that ends above a line."""
    first = number
    while first and lines[first - 1].strip().startswith("#"):
        first -= 1
    return " ".join(line.strip().lstrip("# ") for line in lines[first:number])


def all_options(source: Source, name: str) -> list[Option]:
    """List a file's own options, then those that it inherits; each name once."""
    found: dict[str, Option] = {}
    for file in (name, *bases(source, name)):
        for option in options(source.text(file)):
            found.setdefault(option.name, option)
    return list(found.values())


def choices_with(source: Source, group: str, option: str) -> list[str]:
    """Names of the files of a group that have an option; sorted."""
    files = {name: all_options(source, f"{group}/{name}") for name in source.files(group)}
    return [name for name, found in files.items() if any(one.name.partition(".")[0] == option for one in found)]
