"""Bring back to a script what rank 0 has done to its trainer, module and callbacks, so that it goes on from there.

Objects that the script has (the trainer, the module's layers and parameters, callbacks, loggers) are *known*: each side
makes the same list of them by name. Rank 0 pickles their attributes; where an attribute refers to a known object, its
name travels instead of the object, and the script's own object takes its place.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.loggers import Logger
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.loops.progress import _BaseProgress
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.utils._pytree import tree_leaves

from ..core import rng
from ..core.module_checks import callbacks_of

_OF_LIGHTNING = {
    "trainer": ("callbacks", "state", "should_stop"),
    "metrics": ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter"),
    "strategy": ("optimizers", "lr_scheduler_configs"),
    "precision": ("scaler",),
}
"""Known objects of Lightning, and their attributes that a run changes."""

_INTERNAL = frozenset(vars(pl.LightningModule())) - {
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training", "_hparams"
}  # fmt: skip
"""Attributes of modules that stay the script's."""
_REGISTERED = ("_parameters", "_buffers", "_modules")
_LIBRARIES = ("pytorch_lightning", "lightning", "lightning_fabric", "evener", "torch", "torchmetrics")


def known_objects(trainer: pl.Trainer, given: Any) -> dict[str, Any]:
    """List by name, the last of those below, what a script has before its ranks start, and has `given` to `fit`."""
    module = trainer.lightning_module
    named: dict[str, Any] = {
        **{f"given {i}": one for i, one in enumerate(tree_leaves(given)) if hasattr(one, "__dict__")},
        "trainer": trainer,
        "metrics": trainer._logger_connector,
        "strategy": trainer.strategy,
        "precision": trainer.precision_plugin,
        **{f"loop {name}": loop for name, loop in _loops(trainer)},
        **{f"module {name}": child for name, child in module.named_modules()},
        **{f"parameter {name}": parameter for name, parameter in module.named_parameters()},
        **{f"callback {i}": callback for i, callback in enumerate(callbacks_of(trainer))},
        **{f"logger {i}": logger for i, logger in enumerate(trainer.loggers)},
    }
    names = {id(value): name for name, value in named.items()}
    return {name: named[name] for name in names.values()}


def _loops(owner: object, before: str = "") -> Iterator[tuple[str, _Loop]]:
    for name, loop in vars(owner).items():
        if isinstance(loop, _Loop):
            yield before + name, loop
            yield from _loops(loop, f"{before}{name}.")


def pack(trainer: pl.Trainer, known: Mapping[str, Any], results: Any, is_whole: bool) -> bytes:
    """Write down, in rank 0, what its run has changed of known objects, of callbacks only if it was not `is_whole`."""
    ids = {id(value): name for name, value in known.items()}
    if is_whole:
        _ = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics  # which collects them
    changed = {name: value for name, value in known.items() if is_whole or isinstance(value, pl.Callback)}
    attributes = {name: found for name, value in changed.items() if (found := _attributes(name, value))}
    weights = {name: value for name, value in changed.items() if isinstance(value, nn.Parameter)}
    parameters = {name: (weight.detach(), weight.requires_grad) for name, weight in weights.items()}
    lost = list[str]()
    for name, found in {} if _pickles(attributes, ids) else attributes.items():
        for key in [key for key, item in found.items() if not _pickles(item, ids)]:
            del found[key]
            package = type(known[name]).__module__.partition(".")[0]
            if name in _OF_LIGHTNING or package not in _LIBRARIES:  # the user's, or Lightning's state of the run
                lost.append(f"{type(known[name]).__name__}.{key}")
    results = move_data_to_device(results, torch.device("cpu"))
    return _dumps((attributes, parameters, rng.random_state(), results, lost if is_whole else []), ids)


def _attributes(name: str, value: Any) -> dict[str, Any]:
    """The attributes of a known object that a run may have changed."""
    if name in _OF_LIGHTNING:
        return {key: getattr(value, key) for key in _OF_LIGHTNING[name] if hasattr(value, key)}
    if isinstance(value, _Loop):
        plain, named = (_BaseProgress, bool, int, float), getattr(value, "brought_back", ())
        return {key: item for key, item in vars(value).items() if isinstance(item, plain) or key in named}
    if isinstance(value, (nn.Module, pl.Callback, Logger)):
        return {key: item for key, item in vars(value).items() if key not in _INTERNAL}
    return {}


def _pickles(value: Any, ids: Mapping[int, str]) -> bool:
    try:
        _dumps(value, ids)
    except Exception:  # noqa: BLE001  # anything that a user's __reduce__ raises
        return False
    return True


def unpack(trainer: pl.Trainer, known: Mapping[str, Any], packed: bytes) -> Any:
    """Bring a script's known objects to the state of rank 0's; returns what the trainer returned there."""
    unpickler = pickle.Unpickler(io.BytesIO(packed))
    unpickler.persistent_load = known.__getitem__
    attributes, parameters, random_state, results, lost = unpickler.load()
    for name, (data, requires_grad) in parameters.items():
        known[name].grad = None
        known[name].data = data
        known[name].requires_grad_(requires_grad)
    module = trainer.lightning_module
    module.trainer = trainer
    trainer.strategy.connect(module)
    for name, found in attributes.items():
        owner = known[name]
        if name in _OF_LIGHTNING:  # some are properties
            for key, value in found.items():
                setattr(owner, key, value)
            continue
        for key in (key for space in _REGISTERED for key in found.get(space, ())):
            vars(owner).pop(key, None)  # a layer has taken the place of an attribute that was None, say
        vars(owner).update(found)
    rng.set_random_state(random_state)
    if lost:
        rank_zero_warn(
            f"{', '.join(lost)}: can't be brought back from the processes that trained, because it can't be pickled; "
            "here it is as it was before. Keep what the script needs in plain attributes."
        )
    return results


def _dumps(value: Any, ids: Mapping[int, str]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, ids).dump(value)
    return file.getvalue()


def reduce_method(method: MethodType) -> tuple[Any, tuple[Any, Any]]:
    """How to pickle a method: as its function and object, which may have it by another name."""
    return _bound, (method.__func__, method.__self__)


def _bound(function: Any, owner: Any) -> MethodType:
    return MethodType(function, owner)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, ids: Mapping[int, str]) -> None:
        super().__init__(file)
        self._ids = ids

    def persistent_id(self, obj: Any) -> Any:
        return self._ids.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        return reduce_method(obj) if isinstance(obj, MethodType) else NotImplemented
