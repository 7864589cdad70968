"""Provide the Trainer and the command line.

What is named here is imported when it is first used: `main` answers `--help` without torch and Lightning.
"""

from importlib import import_module
from importlib.util import find_spec
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

if find_spec("pytorch_lightning") is None:
    import_module("..strategies", __name__)  # first: it has `lightning` stand for that name, which every room imports


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "main":
        import_module("..strategies", __name__)  # first: it makes both names of Lightning one package
    return getattr(import_module(_PLACES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
