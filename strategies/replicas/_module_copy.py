"""Copy one module to a device, module by module, with its own parameters and buffers; everything else is shared.

`copy.deepcopy` would fail on a lock or an open file that a module holds; here the copy shares such attributes.
References to the module itself (layers in plain lists, bound methods, hooks, closures) become references to the copy.
"""

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from ..core.module_checks import is_compiler
from ..core.patching import HOOKS, Replacement
from ._parameter_copies import Gate, copied


class ModuleCopy:
    """A copy of a module on a device.

    Args:
        gate: of the copies of its parameters.

    Attributes:
        module: the copy. Metrics and collections of torchmetrics in it are the root's, see `batch/part_metrics.py`.
    """

    def __init__(
        self,
        root: nn.Module,
        root_device: torch.device,
        device: torch.device,
        gate: Gate,
    ) -> None:
        self.device, self._root_device, self._gate = device, root_device, gate
        self._copies: dict[int, tuple[Any, Any]] = {}  # keeps the originals alive, so that no id is reused
        self._open: set[int] = set()
        with torch.inference_mode(False), torch.no_grad():
            self.module = self._copy_module(root)

    def counterpart(self, value: Any) -> Any:
        """The copy of a module, parameter or buffer of the root; None for anything else."""
        found = self._copies.get(id(value))
        return None if found is None else found[1]

    def set_attribute(self, replica: nn.Module, key: str, value: Any) -> None:
        """Set an attribute of the original on a copied module, with references to the root replaced."""
        if key in HOOKS:
            return  # the copy has its own
        if key == "_device" and isinstance(value, torch.device):
            replica.__dict__[key] = self.device
        elif key not in ("_parameters", "_buffers", "_modules") and not isinstance(value, Replacement):
            replica.__dict__[key] = self._translated(value)

    def update(self, original: nn.Module, keys: Iterable[str]) -> None:
        """Bring over attributes of a module of the root."""
        replica = self.counterpart(original)
        for key in keys:
            if key in original.__dict__:
                self.set_attribute(replica, key, original.__dict__[key])
            else:
                replica.__dict__.pop(key, None)

    def copy_tensor(self, original: Tensor) -> Tensor:
        """Copy a parameter or buffer to the device; the same tensor always gets the same copy."""
        if id(original) not in self._copies:
            if isinstance(original, nn.Parameter):
                made = copied(original, self.device, self._gate)
            else:
                made = original.detach().to(self.device, copy=True)
            self._copies[id(original)] = original, made
        return self._copies[id(original)][1]

    def _copy_module(self, root: nn.Module) -> nn.Module:
        """Copy a module and those in it: first all of them, to which their attributes may then refer."""
        found = [module for module in plain_modules(root) if id(module) not in self._copies]
        originals = [module for module in found if not is_compiler(module)]
        for original in originals:
            replica = original._replicate_for_data_parallel()
            del replica.__dict__["_is_replica"]  # replicas here have their own parameters
            for key in [key for key, value in replica.__dict__.items() if isinstance(value, Replacement)]:
                del replica.__dict__[key]
            self._copies[id(original)] = original, replica
        for compiled in [module for module in found if is_compiler(module)]:
            made = type(compiled)(self.counterpart(compiled._orig_mod), compiled.dynamo_ctx)
            self._copies[id(compiled)] = compiled, made
        for original in originals:
            replica = self.counterpart(original)
            replica._parameters = self._copy_tensors(original._parameters)
            replica._buffers = self._copy_tensors(original._buffers)
            children = original._modules.items()
            replica._modules = {key: self._copies.get(id(child), (child, child))[1] for key, child in children}
        for original in originals:
            replica = self.counterpart(original)
            for key, value in original.__dict__.items():
                self.set_attribute(replica, key, value)
            for key in HOOKS:  # with the same numbers
                hooks = original.__dict__[key].items()
                replica.__dict__[key] = OrderedDict((number, self._translated(hook)) for number, hook in hooks)
        return self.counterpart(root)

    def _copy_tensors(self, tensors: Any) -> dict[str, Any]:
        return {key: None if tensor is None else self.copy_tensor(tensor) for key, tensor in tensors.items()}

    def _translated(self, value: Any) -> Any:
        """A value with references to the copy instead of the root; the same object where there are none."""
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, nn.Module) and self._is_of_root(value):
            return self._copy_module(value)
        if isinstance(value, Tensor):
            stays = value.device != self._root_device or value.device == self.device
            return value if stays else value.detach().to(self.device)
        translate = _TRANSLATORS.get(type(value))
        if translate is None or id(value) in self._open:
            return value
        self._open.add(id(value))
        translated = translate(self, value)
        self._open.discard(id(value))
        return translated

    def _is_of_root(self, module: nn.Module) -> bool:
        """Whether all tensors of a module are the root's: a wrapper may have taken over its layers and forward."""
        tensors = [*module.parameters(), *module.buffers()]
        return bool(tensors) and all(id(tensor) in self._copies for tensor in tensors)

    def _sequence(self, value: Any) -> Any:
        items = [self._translated(item) for item in value]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return type(value)(items) if changed else value

    def _mapping(self, value: Any) -> Any:
        items = {key: self._translated(item) for key, item in value.items()}
        changed = any(items[key] is not item for key, item in value.items())
        return type(value)(items) if changed else value

    def _method(self, value: types.MethodType) -> Any:
        owner: Any = value.__self__
        other = self._translated(owner) if isinstance(owner, nn.Module) else self.counterpart(owner)
        return value if other is None or other is owner else types.MethodType(value.__func__, other)

    def _partial(self, value: Any) -> Any:
        own = value.func, value.args, value.keywords
        func, args, keywords = translated = self._translated(own)
        return value if translated is own else functools.partial(func, *args, **keywords)

    def _reference(self, value: Any) -> Any:
        target = self.counterpart(value())
        return value if target is None else weakref.ref(target)

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            content = cell.cell_contents
        except ValueError:
            return cell  # an empty one
        translated = self._translated(content)
        return cell if translated is content else types.CellType(translated)

    def _function(self, value: types.FunctionType) -> Any:
        """Rebind a closure over the module, such as a wrapper around one of its methods."""
        cells = value.__closure__ or ()
        closure = tuple(self._cell(cell) for cell in cells)
        if all(map(is_, closure, cells)):
            return value
        function = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
        function.__kwdefaults__ = value.__kwdefaults__
        function.__dict__.update(value.__dict__)
        return function


def plain_modules(root: nn.Module) -> list[Any]:
    """The modules that are copied one by one, root first, each once."""
    found: dict[int, nn.Module] = {}
    left: list[nn.Module | None] = [root]
    while left:
        module = left.pop()
        if module is not None and id(module) not in found and not isinstance(module, (Metric, MetricCollection)):
            found[id(module)] = module
            left += reversed(module._modules.values())
    return list(found.values())


_TRANSLATORS: dict[type, Any] = {
    list: ModuleCopy._sequence,
    tuple: ModuleCopy._sequence,
    dict: ModuleCopy._mapping,
    OrderedDict: ModuleCopy._mapping,
    types.MethodType: ModuleCopy._method,
    types.FunctionType: ModuleCopy._function,
    functools.partial: ModuleCopy._partial,
    weakref.ref: ModuleCopy._reference,
}
