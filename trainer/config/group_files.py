"""Read configuration groups: this package's and those of a project, with the options that their files inherit."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # since Python 3.11

CONFIG_MODULE = "evener.conf"


@dataclass(frozen=True)
class Source:
    """Where a command's configuration comes from.

    Args:
        config_dir: a project's own configuration directory, absolute; None: this package's only.
        more: directories that the command line adds with `--config-dir`.
    """

    config_dir: str | None = None
    config_name: str = "train"
    more: tuple[str, ...] = ()

    def compose(self, overrides: Sequence[str] = (), return_hydra: bool = False) -> DictConfig:
        """Compose the root configuration, as the command line does; `return_hydra` keeps the node `hydra`."""
        given = list(overrides)
        if self.more:
            given.append(f"hydra.searchpath=[{','.join([*self.more, *self._search_path()])}]")
        with _no_other_hydra(), self._initialized():
            return compose(self.config_name, overrides=given, return_hydra_config=return_hydra)

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
            return [*map(Path, self.more), resources.files(CONFIG_MODULE)]
        return [Path(self.config_dir), *map(Path, self.more), *map(_opened, self._search_path())]

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

    def options(self, group: str, name: str) -> DictConfig:
        """Compose one file of a group, with the bases in its defaults list; interpolations stay unresolved."""
        cfg = self.compose([f"{group}={name}"])
        options = OmegaConf.create(OmegaConf.to_container(cfg[group], resolve=False) or {})
        assert isinstance(options, DictConfig)
        return options

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


@contextmanager
def _no_other_hydra() -> Generator[None]:
    """Put the command line's Hydra aside inside the block: there can be only one at a time."""
    current = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = current
