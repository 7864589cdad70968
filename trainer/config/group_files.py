"""Read the files of this package's configuration groups, with the options that they inherit."""

from collections.abc import Generator
from contextlib import contextmanager
from importlib import resources

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from ... import conf


def file_names(group: str) -> list[str]:
    """List the files of a group by the names that choose them, sorted; empty for an unknown group."""
    folder = resources.files(conf) / group
    files = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


def file_options(group: str, name: str) -> DictConfig:
    """Compose one file of a group, with the bases in its defaults list.

    Args:
        group: such as `strategy`.
        name: one of `file_names(group)`.

    Returns:
        Its options, interpolations unresolved.
    """
    with _no_other_hydra(), initialize_config_module("evener.conf", version_base="1.3"):
        cfg = compose("train", overrides=[f"{group}={name}"])
    options = OmegaConf.create(OmegaConf.to_container(cfg[group], resolve=False) or {})
    assert isinstance(options, DictConfig)
    return options


@contextmanager
def _no_other_hydra() -> Generator[None]:
    """Put the command line's Hydra aside inside the block: there can be only one at a time."""
    current = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = current
