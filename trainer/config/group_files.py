"""Read configuration groups: this package's and those of a project, with the options that their files inherit."""

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # since Python 3.11

CONFIG_MODULE = "evener.conf"

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Source:
    """Where a command's configuration comes from.

    Args:
        config_dir: a project's own configuration directory, absolute; None: this package's only.
    """

    config_dir: str | None = None
    config_name: str = "train"

    def compose(self, overrides: Sequence[str] = (), return_hydra: bool = False) -> DictConfig:
        """Compose the root configuration, as the command line does; `return_hydra` keeps the node `hydra`."""
        with _no_other_hydra(), self._initialized():
            return compose(self.config_name, overrides=list(overrides), return_hydra_config=return_hydra)

    def named(self, overrides: Sequence[str]) -> list[str]:
        """Add the name of a run that has another module than the package's default: `name=`, that of the module."""
        values = {key: value for key, _, value in (word.partition("=") for word in overrides)}
        module = values.get("module", "")
        if module == "custom":
            module = values.get("module._target_", "").rpartition(".")[2]
        given = self.config_dir or "name" in values or "experiment" in values
        return [*overrides, *([] if given or not module.isidentifier() else [f"name={module}"])]

    def folders(self) -> "list[Traversable]":
        """The directories that hold groups, the first one found wins."""
        if self.config_dir is None:
            return [resources.files(CONFIG_MODULE)]
        return [Path(self.config_dir), *map(_opened, self._search_path())]

    def groups(self) -> list[str]:
        """Names of all groups that can be chosen, sorted."""
        names = {entry.name for folder in self.folders() if folder.is_dir() for entry in folder.iterdir()}
        return sorted(name for name in names if self.files(name))

    def files(self, group: str) -> list[str]:
        """List the files of a group by the names that choose them, sorted; empty for an unknown group."""
        inside = [folder / group for folder in self.folders()]
        names = {file.name for folder in inside if folder.is_dir() for file in folder.iterdir()}
        return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))

    def text(self, name: str) -> str:
        """The text of a file, such as `strategy/ddp`; empty if there is none."""
        files = (folder / f"{name}.yaml" for folder in self.folders())
        return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")

    def values(self, name: str) -> dict[str, Any]:
        """The keys of a file, such as `strategy/ddp`, and those that it inherits, with their values as written."""
        own = yaml.load(self.text(name), _Loader) or {}
        found: dict[str, Any] = {}
        for base in own.pop("defaults", []):
            if isinstance(base, str) and base != "_self_":
                found |= self.values(f"{name.rpartition('/')[0]}/{base}")
        return found | own

    def with_option(self, group: str, option: str) -> list[str]:
        """Names of the files of a group that have an option; sorted."""
        return [name for name in self.files(group) if option in self.values(f"{group}/{name}")]

    def _initialized(self) -> Any:
        if self.config_dir is None:
            return initialize_config_module(CONFIG_MODULE, version_base="1.3")
        return initialize_config_dir(self.config_dir, version_base="1.3")

    def _search_path(self) -> list[str]:
        """What the root configuration lists under `hydra.searchpath`."""
        root = None if self.config_dir is None else Path(self.config_dir) / f"{self.config_name}.yaml"
        if root is None or not root.is_file():
            return []
        return [str(entry) for entry in OmegaConf.select(OmegaConf.load(root), "hydra.searchpath") or []]


def _opened(entry: str) -> "Traversable":
    """The directory that an entry of Hydra's search path names."""
    scheme, _, place = entry.rpartition("://")
    return resources.files(place.replace("/", ".")) if scheme == "pkg" else Path(place)


PACKAGE = Source()
"""This package's own configuration."""


def first_sentence(text: str) -> str:
    """The comment that a file opens with, up to its first full stop or command."""
    comment = re.match(r"(?:# @.*\n)*((?:#(?!  ).*\n)*)", text)
    told = " ".join(line.lstrip("# ") for line in (comment[1] if comment else "").splitlines())
    return re.split(r"(?<=[a-z)\]\d])\.(?:\s|$)|: `", told)[0].strip(": ")


@contextmanager
def _no_other_hydra() -> Generator[None]:
    """Put the command line's Hydra aside inside the block: there can be only one at a time."""
    current = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = current


def leaves(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings with their keys joined by dots; an empty mapping is a value."""
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
