"""Train any LightningModule on any devices: the words that a module says to Evener.

    loss = evener.mean(values, weight=mask)           # a mean that names what it divides by
    loss = evener.over_batch(info_nce)(z1, z2)        # a loss of the global batch, however it is cut

The trainer and the strategies are in `evener.trainer` and `evener.strategies`. What is named here is imported when it
is first used, so that `import evener` loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .strategies.batch.over_batch import mean, over_batch

    __version__: str

__all__ = ["__version__", "mean", "over_batch"]

_PLACES = {"mean": ".strategies.batch.over_batch", "over_batch": ".strategies.batch.over_batch"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("evener")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
