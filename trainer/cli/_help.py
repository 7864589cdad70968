"""Print `--help`: every group with its files, and every key with its type, value and meaning."""

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...strategies.core.options import as_given
from ..config.descriptions import all_options, first_sentence, group_notes, leaves, options
from ..config.group_files import Source

INDENT = 34
"""Characters of the column of names."""

KINDS = {bool: "true or false", int: "int", float: "float", str: "text", list: "list", dict: "mapping"}


def show_help(source: Source, overrides: Sequence[str]) -> None:
    """Print groups, keys and examples for a configuration; overrides decide which files' keys are listed."""
    cfg = source.compose([*overrides, "hydra.runtime.output_dir=''"], return_hydra=True)
    choices: dict[str, Any] = {str(k): v for k, v in cfg.hydra.runtime.choices.items()}
    lines = [
        str(cfg.hydra.help.header), "",
        "== Groups ==  choose a file with group=file, such as strategy=ddp; * is chosen now",
        *group_lines(source, choices), "",
        "== Keys ==  set a value with key=value, such as module.lr=0.1; the keys of other files: --help strategy=ddp",
        *key_lines(source, cfg, choices), "",
        "== Examples ==", str(cfg.hydra.help.footer),
    ]  # fmt: skip
    sys.stdout.write("\n".join(lines) + "\n")


def group_lines(source: Source, choices: dict[str, Any]) -> Iterator[str]:
    """One line per group, with what it is for, and one per file, with its first sentence."""
    notes = group_notes(source)
    for group in source.groups():
        if group != "hydra":
            yield f"{group}: {notes[group]}" if group in notes else group
            for name in source.files(group):
                mark = "*" if choices.get(group) == name else " "
                yield from entry(f"{mark} {name}", first_sentence(source.text(f"{group}/{name}")))


def key_lines(source: Source, cfg: DictConfig, choices: dict[str, Any]) -> Iterator[str]:
    """One entry per key: its value, its type and its meaning; without Hydra's own and `_target_`."""
    meanings = comments(source, choices)
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    for key, value in leaves({key: value for key, value in plain.items() if key != "hydra"}):
        if key.rpartition(".")[2] != "_target_":
            refers = isinstance(value, str) and ("${" in value or value == "???")
            kind = "" if refers or value is None else f"({KINDS[type(value)]}) "
            yield from entry(f"  {key}={as_given(value)}", f"{kind}{meanings.get(key, '')}")


def comments(source: Source, choices: dict[str, Any]) -> dict[str, str]:
    """The comment of every key that has one: those of the root, and of the chosen files."""
    roots = [option for root in (source.config_name, "train") for option in options(source.text(root))]
    named = [(option.name, option) for option in roots]
    named += [
        (f"{group}.{o.name}", o) for group, name in choices.items() for o in all_options(source, f"{group}/{name}")
    ]
    return {name: option.comment for name, option in reversed(named) if option.comment}


def entry(name: str, meaning: str) -> list[str]:
    """A name and its meaning in two columns, the meaning wrapped."""
    width = max(shutil.get_terminal_size((100, 24)).columns, 60)
    wrapped = textwrap.wrap(meaning.strip(), width - INDENT - 1) or [""]
    first = f"{name:<{INDENT}} {wrapped[0]}".rstrip() if len(name) <= INDENT else name
    rest = wrapped[1:] if len(name) <= INDENT else wrapped
    return [first, *(" " * (INDENT + 1) + line for line in rest if line)]
