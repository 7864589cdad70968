"""Bring back to a script what rank 0 has done to its trainer, module and callbacks, so that it goes on from there.

Objects that the script has (the trainer, the module's layers and parameters, callbacks, loggers) are *known*: each side
makes the same list of them by name. Rank 0 pickles their attributes; where an attribute refers to a known object, its
name travels instead of the object, and the script's own object takes its place.
"""

import io
import marshal
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.loggers import Logger
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.loops.progress import _BaseProgress
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from ...core import rng
from ...core.module_checks import callbacks_of

_CHILDREN = ("_parameters", "_buffers", "_modules")
_INTERNAL = frozenset(vars(pl.LightningModule())) - {*_CHILDREN, "_non_persistent_buffers_set", "training", "_hparams"}
_BATCHES = ("max_batches", "_max_batches")
"""Attributes of a loop: how many batches it takes, where that is a list of one number per loader."""
_LOADER_BYTES = 2**24
"""Bytes of a loop's loaders at most, without the loaders and datasets that the script has given."""

_LIBRARIES = ("pytorch_lightning", "lightning", "lightning_fabric", "evener", "torch", "torchmetrics")


def known_objects(trainer: pl.Trainer, given: Any) -> dict[str, Any]:
    """List by name what a script has before its ranks start, in the script and in each rank alike.

    Args:
        given: what `fit` and the like were given, loaders among it.
    """
    module = trainer.lightning_module
    known: dict[str, Any] = {
        "trainer": trainer,
        "strategy": trainer.strategy,
        "precision": trainer.precision_plugin,
        "data": getattr(trainer, "datamodule", None),
        **{f"loop {name}": loop for name, loop in _loops(trainer)},
        **{f"module {name}": child for name, child in module.named_modules()},
        **{f"parameter {name}": parameter for name, parameter in module.named_parameters()},
        **{f"callback {i}": callback for i, callback in enumerate(callbacks_of(trainer))},
        **{f"logger {i}": logger for i, logger in enumerate(trainer.loggers)},
        **dict(_given_loaders(given)),
    }
    return {name: value for name, value in known.items() if value is not None}


def pack(trainer: pl.Trainer, known: Mapping[str, Any], results: Any) -> bytes:
    """Write down, in rank 0, what its run has changed of known objects, and what it has returned."""
    ids = {id(value): name for name, value in known.items()}
    attributes = {name: found for name, value in known.items() if (found := dict(_attributes(value)))}
    _ = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics  # which collects them
    state = {
        "attributes": attributes,
        "names": {name: list(vars(known[name])) for name in attributes},
        "parameters": {
            name: (value.detach(), value.grad, value.requires_grad)
            for name, value in known.items()
            if isinstance(value, nn.Parameter)
        },
        **{key: getattr(owner, key) for owner, key in _changed(trainer)},
        "scaler": trainer.strategy.precision_plugin.state_dict(),
        "random": rng.random_state(),
        "results": move_data_to_device(results, torch.device("cpu")),
        "loaders": dict(_loaders(trainer, ids)),
    }
    lost = _leave_out(state, known, ids)
    return _dumps({**state, "lost": lost}, ids)


def pack_callbacks(known: Mapping[str, Any], returned: Any) -> bytes:
    """Write down, in rank 0, what callbacks hold when a run has stopped or failed."""
    held = {name: dict(vars(value)) for name, value in known.items() if isinstance(value, pl.Callback)}
    state = {"attributes": held, "names": {name: list(found) for name, found in held.items()}, "results": returned}
    ids = {id(value): name for name, value in known.items()}
    _leave_out(state, known, ids)
    return _dumps(state, ids)


def unpack(trainer: pl.Trainer, known: Mapping[str, Any], packed: bytes) -> Any:
    """Bring a script's known objects to the state of rank 0's; returns what the trainer returned there."""
    state = _Unpickler(packed, known).load()
    for name, (data, gradient, requires_grad) in state.get("parameters", {}).items():
        parameter: nn.Parameter = known[name]
        parameter.grad = None
        parameter.data = data
        parameter.requires_grad_(requires_grad)
        parameter.grad = gradient
    for name, attributes in state["attributes"].items():
        namespace = vars(known[name])
        for key in set(namespace).difference(state["names"].get(name, namespace)):
            del namespace[key]  # a layer has taken the place of an attribute that was None, say
        _update(namespace, attributes)
    if "parameters" not in state:  # see `pack_callbacks`
        return state["results"]
    module = trainer.lightning_module
    module.trainer = trainer
    trainer.strategy.connect(module)
    trainer.strategy.precision_plugin.load_state_dict(state["scaler"])
    for owner, key in _changed(trainer):
        setattr(owner, key, state[key])
    for name, loop in _loops(trainer):
        if "_combined_loader" in vars(loop):
            read = state["loaders"].get(name)
            vars(loop)["_combined_loader"] = None if read is None else CombinedLoader(*read)
    rng.set_random_state(state["random"])
    if state["lost"]:
        rank_zero_warn(
            f"{', '.join(state['lost'])}: can't be brought back from the processes that trained, because it can't be "
            "pickled; here it is as it was before. Keep what the script needs in plain attributes."
        )
    return state["results"]


def _changed(trainer: pl.Trainer) -> Iterator[tuple[Any, str]]:
    """What a run changes of Lightning's own objects: the object, and its attribute."""
    metrics = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter")
    yield from ((trainer._logger_connector, key) for key in metrics)
    yield from ((trainer.strategy, key) for key in ("optimizers", "lr_scheduler_configs"))
    yield from ((trainer, key) for key in ("callbacks", "state", "should_stop", "val_check_batch"))


def _update(namespace: dict[str, Any], attributes: Mapping[str, Any]) -> None:
    """Set attributes; a list, dict or set stays the object that the script may hold by another name."""
    for key, value in attributes.items():
        old: Any = namespace.get(key)
        if type(value) is list and type(old) is list:
            old[:] = value
        elif type(value) in (dict, set) and type(old) is type(value):
            old.clear()
            old.update(value)
        else:
            namespace[key] = value


def _loops(owner: object, before: str = "") -> Iterator[tuple[str, _Loop]]:
    for name, loop in vars(owner).items():
        if isinstance(loop, _Loop):
            yield before + name, loop
            yield from _loops(loop, f"{before}{name}.")


def _given_loaders(given: Any) -> Iterator[tuple[str, Any]]:
    """The loaders that a script has given, and their datasets."""
    for i, one in enumerate(tree_leaves(given)):
        for j, loader in enumerate(one.flattened if isinstance(one, CombinedLoader) else [one]):
            if isinstance(loader, Iterable) and not isinstance(loader, (str, nn.Module)):
                yield f"loader {i} {j}", loader
                yield f"dataset {i} {j}", getattr(loader, "dataset", None)


def _loaders(trainer: pl.Trainer, ids: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """The user's loaders that each loop has read, and how, where they can be pickled and are small."""
    for name, loop in _loops(trainer):
        if (read := getattr(loop, "_combined_loader", None)) is not None:
            given = [getattr(one, "evener_original", one) for one in read.flattened]
            own = tree_unflatten(given, read._spec)
            with suppress(Exception):  # anything that a user's __reduce__ raises
                _dumps(own, ids, _LOADER_BYTES)
                yield name, (own, read._mode)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of a known object that a run may have changed."""
    if isinstance(value, _Loop):
        plain, named = (_BaseProgress, bool, int, float), (*_BATCHES, *getattr(value, "brought_back", ()))
        yield from ((key, item) for key, item in vars(value).items() if isinstance(item, plain) or key in named)
    elif isinstance(value, nn.Module):
        yield from ((key, item) for key, item in vars(value).items() if key not in _INTERNAL)
    elif isinstance(value, (pl.Callback, Logger)):
        yield from vars(value).items()


def _leave_out(state: dict[str, Any], known: Mapping[str, Any], ids: Mapping[int, str]) -> list[str]:
    """Take out of the state what can't be pickled; name it where it is the user's."""
    if _pickles(state, ids):
        return []
    lost: list[str] = []
    for name, attributes in state["attributes"].items():
        for key in [key for key, item in attributes.items() if not _pickles(item, ids)]:
            del attributes[key]
            if type(known[name]).__module__.partition(".")[0] not in _LIBRARIES:
                lost.append(f"{type(known[name]).__name__}.{key}")
    for key in [key for key, item in state.items() if not _pickles(item, ids)]:
        state[key] = [] if isinstance(state[key], list) else None
        lost.append(key)
    return lost


def _pickles(value: Any, ids: Mapping[int, str]) -> bool:
    try:
        _dumps(value, ids)
    except Exception:  # noqa: BLE001  # anything that a user's __reduce__ raises
        return False
    return True


def _dumps(value: Any, ids: Mapping[int, str], most_bytes: int | None = None) -> bytes:
    file = io.BytesIO()
    _Pickler(file, ids, most_bytes).dump(value)
    return file.getvalue()


def reduce_method(method: MethodType) -> tuple[Any, tuple[Any, Any]]:
    """How to pickle a method: by name, or as its function and object if the object does not have it by that name."""
    owner, name = method.__self__, method.__name__
    if getattr(owner, name, None) == method:
        return getattr, (owner, name)
    return _bound, (method.__func__, owner)


def _bound(function: Any, owner: Any) -> MethodType:
    return MethodType(function, owner)


def _function(code: bytes, module: str, name: str, defaults: Any, keywords: Any, values: tuple[Any, ...]) -> Any:
    closure = tuple(map(CellType, values))
    function = FunctionType(marshal.loads(code), vars(import_module(module)), name, defaults, closure)
    function.__kwdefaults__ = keywords
    return function


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, ids: Mapping[int, str], most_bytes: int | None) -> None:
        super().__init__(file)
        self._file, self._ids, self._most_bytes = file, ids, most_bytes

    def persistent_id(self, obj: Any) -> Any:
        if self._most_bytes is not None:
            size = obj.nbytes if isinstance(obj, (torch.Tensor, np.ndarray)) else 0  # before it is copied
            if self._file.tell() + size > self._most_bytes:
                raise ValueError
        return self._ids.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and "<" in obj.__qualname__:  # a lambda, as a LambdaLR has, or a nested one
            values = tuple(cell.cell_contents for cell in obj.__closure__ or ())
            code = marshal.dumps(obj.__code__)  # for a process of the same Python
            return _function, (code, obj.__module__, obj.__name__, obj.__defaults__, obj.__kwdefaults__, values)
        return reduce_method(obj) if isinstance(obj, MethodType) else NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: bytes, known: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(packed))
        self._known = known

    def persistent_load(self, pid: Any) -> Any:
        return self._known[pid]
