"""Check, without accelerators, that every operation of a module has its tensors on one device.

Repeated CPU devices can't reveal a wrong placement: a tensor on `cpu:1` reports `cpu`. So the forward pass runs on fake
devices `cuda:0`, `cuda:1`, …: shapes and devices are computed, values are not, and the devices need not exist.
Gradients are off: with them, a torch built without CUDA would abort the process.

Source: `torch._subclasses.FakeTensorMode` (PyTorch 2.13).
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from evener.strategies.core.errors import ConfigError
from evener.strategies.pipeline.stages import Stages


class FakeDevices:
    """Fake devices inside a `with` block: `with FakeDevices(2) as fake: ...`.

    Inside, modules are created and moved as usual: `nn.Linear(4, 4).to(fake.devices[1])`. `fake.run` calls them.

    Args:
        num_devices: number of devices.

    Attributes:
        devices: `cuda:0`, `cuda:1`, …; they need not exist.
    """

    def __init__(self, num_devices: int) -> None:
        if 0 < torch.cuda.device_count() < num_devices:
            pytest.skip(f"fakes {num_devices} GPUs: this machine has {torch.cuda.device_count()}, so fakes are refused")
        self.devices = [torch.device("cuda", index) for index in range(num_devices)]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._stack = ExitStack()

    def __enter__(self) -> "FakeDevices":
        self._stack.enter_context(torch.no_grad())
        self._stack.enter_context(_MoveToFake(self._fake))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def to_fake(self, value: Any, device: torch.device) -> Any:
        """Replace each tensor inside a value by a fake on a fake device."""
        return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), value)

    def run(self, module: nn.Module, *args: Any, state: dict[str, Tensor] | None = None) -> Any:
        """Call a module on fake tensors, in eval mode.

        Args:
            module: the module.
            args: its inputs.
            state: replacements of its parameters and buffers.

        Returns:
            Its output, of fake tensors.

        Raises:
            ConfigError: an operation had tensors on different devices; the message names its module.
        """
        training = {child: child.training for child in module.modules()}
        path = _Path(module)
        try:
            with self._fake, path.recorded(), torch.backends.cudnn.flags(enabled=False):
                return functional_call(module.eval(), state or {}, args)
        except RuntimeError as exc:
            if "device" not in str(exc) or "not linked with support" in str(exc):
                raise
            raise ConfigError(
                f"Module {path.name()} uses tensors on different devices: {str(exc).splitlines()[0]} "
                "Move its inputs to its device, or place all that it uses on one device."
            ) from exc
        finally:
            for child, mode in training.items():
                child.training = mode


class _MoveToFake(TorchFunctionMode):
    """Replaces tensors that are moved to, or created on, cuda devices by fakes; initial values don't matter there."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init" and kwargs["tensor"].device.type == "cuda":
            return kwargs["tensor"]
        if any(_is_fake_device(value) for value in (*args, *kwargs.values())):
            with self._fake:
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_fake_device(value: Any) -> bool:
    return isinstance(value, (torch.device, str)) and str(value).startswith("cuda")


class _Path:
    """Tracks the innermost running module."""

    def __init__(self, root: nn.Module) -> None:
        self._names = {child: name or f"{type(root).__name__} (the root)" for name, child in root.named_modules()}
        self._running: list[nn.Module] = []

    @contextmanager
    def recorded(self) -> Generator[None]:
        """Track the modules that are called inside the block."""
        hooks = (register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def name(self) -> str:
        """Name of the innermost running module in the root."""
        return next((self._names[module] for module in reversed(self._running) if module in self._names), "(unknown)")

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._running.append(module)

    def _leave(self, *_: Any) -> None:
        self._running.pop()


def prove_placement(module: nn.Module, layout: Stages, args: Sequence[Any]) -> Any:
    """Run a placed module's forward pass on one fake device per stage; the module itself is not touched.

    Args:
        module: the module, placed by `layout`.
        layout: its stages.
        args: inputs of `forward`, real tensors on any device.

    Returns:
        The output, as fake tensors on the fake meeting device.

    Raises:
        ConfigError: an operation would see tensors on different devices; the message names the module.
    """
    assert layout.plan is not None, "call place first"
    with FakeDevices(layout.num_stages) as fake:
        state = {name: fake.to_fake(t, fake.devices[stage]) for name, t, stage in layout.tensors(module)}
        inputs = fake.to_fake(tuple(args), fake.devices[layout.meeting_stage])
        with layout.on_devices(fake.devices):
            return fake.run(module, *inputs, state=state)
