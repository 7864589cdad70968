"""Print `--help`: every group with its files, and every key with its type, value and meaning."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..config.descriptions import Option, all_options, as_given, first_sentence, group_notes, kind_of, leaves, options
from ..config.group_files import Source

INDENT = 34
"""Characters of the column of names."""


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
    """One entry per key: its value, its type and its meaning."""
    meanings = comments(source, choices)
    for key, value in values(cfg):
        kind = kind_of(value)
        yield from entry(f"  {key}={as_given(value)}", f"{kind and f'({kind}) '}{meanings.get(key, '')}")


def comments(source: Source, choices: dict[str, Any]) -> dict[str, str]:
    """The comment of every key that has one: those of the root, and of the chosen files."""
    found: dict[str, str] = {}

    def add(named: Iterable[Option], before: str = "") -> None:
        for option in named:
            found[before + option.name] = found.get(before + option.name) or option.comment

    for root in (source.config_name, "train"):
        add(options(source.text(root)))
    for group, name in choices.items():
        add(all_options(source, f"{group}/{name}"), f"{group}.")
    return found


def values(cfg: DictConfig) -> Iterator[tuple[str, Any]]:
    """Every key and its value, interpolations unresolved; without Hydra's own and `_target_`."""
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    for key, value in leaves({key: value for key, value in plain.items() if key != "hydra"}):
        if key.rpartition(".")[2] != "_target_":
            yield key, value


def entry(name: str, meaning: str) -> list[str]:
    """A name and its meaning in two columns, the meaning wrapped."""
    width = max(shutil.get_terminal_size((100, 24)).columns, 60)
    wrapped = textwrap.wrap(meaning.strip(), width - INDENT - 1) or [""]
    first = f"{name:<{INDENT}} {wrapped[0]}".rstrip() if len(name) <= INDENT else name
    rest = wrapped[1:] if len(name) <= INDENT else wrapped
    return [first, *(" " * (INDENT + 1) + line for line in rest if line)]
