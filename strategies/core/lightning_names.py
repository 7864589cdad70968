"""Make both published names of Lightning mean one package, by an import hook.

`evener.trainer` loads this file without the rest of `strategies`, which imports torch: it must not import anything of
this project.
"""

import importlib.util
import logging
import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from typing_extensions import override

STANDALONE = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
"""The packages of `pytorch-lightning`, and what the distribution `lightning` calls them."""

SUPPORTED = ("2.6.6", "2.7")
"""The first supported version of Lightning, and the first that is not, as in pyproject.toml."""


def unify() -> None:
    """Install the import hook, once, unless both were imported before; it imports nothing until it is asked."""
    standalone, unified = (not sys.modules.keys().isdisjoint(names) for names in (STANDALONE, STANDALONE.values()))
    if (standalone and unified) or any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        return
    aliases = {alias: real for real, alias in STANDALONE.items()}
    if unified or (not standalone and PathFinder.find_spec("pytorch_lightning") is None):
        aliases = STANDALONE
    sys.meta_path.insert(0, _AliasFinder(aliases))
    for alias, real in aliases.items():
        logging.Logger.manager.loggerDict[alias] = logging.getLogger(real)


def verify_version(installed: str | None = None) -> None:
    """Refuse, by an ImportError, a version of Lightning whose Trainer this project can't extend."""
    version: str = installed or importlib.import_module("pytorch_lightning").__version__
    low, high = SUPPORTED
    least, found, most = ([*map(int, re.findall(r"\d+", text)[:3])] for text in (low, version, high))
    if not least <= found < most:
        raise ImportError(
            f"Evener runs on pytorch-lightning (or lightning) >= {low} and < {high}, but {version} is installed. Run "
            f"pip install 'pytorch-lightning>={low},<{high}', in an environment of its own if another package requires "
            "that version."
        )


def verify_family(*objects: object) -> None:
    """Refuse, by a ConfigError, objects or classes that derive from the package that this process does not use."""
    from .errors import ConfigError

    running: str = importlib.import_module("pytorch_lightning").__name__
    others = tuple(f"{name}." for name in (STANDALONE if running.startswith("lightning.") else STANDALONE.values()))
    for cls in (value if isinstance(value, type) else type(value) for value in objects):
        for foreign in (base for base in cls.__mro__ if base.__module__.startswith(others)):
            raise ConfigError(
                f"{cls.__name__} derives from {foreign.__module__.partition('.')[0]}'s {foreign.__name__}, and Evener "
                f"runs {running} here, which is a different package. Import evener before either of them: then both "
                "names mean the same package."
            )


class _AliasFinder(MetaPathFinder, Loader):
    """Finds and loads modules of an alias as those of the real package, and `lightning` where it is not installed."""

    def __init__(self, aliases: dict[str, str]) -> None:
        self._aliases = aliases

    def _real_name(self, name: str) -> str | None:
        """The name of a module in the real package; None if it belongs to no alias."""
        found = (alias for alias in self._aliases if f"{name}.".startswith(f"{alias}."))
        return next((self._aliases[alias] + name[len(alias) :] for alias in found), None)

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if real := self._real_name(fullname):
            is_there = fullname in self._aliases or real in sys.modules or importlib.util.find_spec(real) is not None
        else:
            is_missing = fullname == "lightning" and PathFinder.find_spec(fullname) is None
            is_there = is_missing and "lightning.pytorch" in self._aliases
        return ModuleSpec(fullname, self, is_package=True) if is_there else None

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if (real := self._real_name(spec.name)) is None:
            return None
        module = importlib.import_module(real)
        spec.loader_state = module.__spec__
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__  # the import system has set the alias's
        if spec.loader_state is not None:
            module.__spec__ = spec.loader_state
            return

        def exported(name: str) -> Any:
            return getattr(
                importlib.import_module("lightning_fabric" if name == "Fabric" else "pytorch_lightning"), name
            )

        vars(module)["__getattr__"] = exported
        importlib.import_module("lightning.fabric")  # as `import lightning` makes both available
        importlib.import_module("lightning.pytorch")
