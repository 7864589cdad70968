"""Provide the Trainer and the command line.

What is named here is imported when it is first used: `main` answers `--help` without torch and Lightning.
"""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..strategies import ConfigError
    from .cli.main import main
    from .cli.train import compose, train
    from .job.result import Result
    from .trainer import Trainer

__all__ = ["ConfigError", "Result", "Trainer", "compose", "main", "train"]

_PLACES = {
    "ConfigError": "..strategies",
    "Result": ".job.result",
    "Trainer": ".trainer",
    "compose": ".cli.train",
    "main": ".cli.main",
    "train": ".cli.train",
}


def _load_alone(module: str) -> Any:
    """Import a module of `strategies.core` without the rest of `strategies`, which needs torch."""
    name = __name__.replace("trainer", f"strategies.core.{module}")
    if name not in sys.modules:
        found: Any = spec_from_file_location(name, Path(__file__).parents[1] / f"strategies/core/{module}.py")
        sys.modules[name] = module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_load_alone("lightning_names").unify()  # before anything imports either of Lightning's names
_load_alone("errors")
_load_alone("options")


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "main":
        import_module("..strategies", __name__)  # first: it verifies Lightning's version
    return getattr(import_module(_PLACES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
