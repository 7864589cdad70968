"""What several files here need of the insides of torch and Lightning."""

import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
from torch import overrides
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The callbacks of a trainer, in the order in which they are called; Lightning does not declare the attribute."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def saved(node: Any, name: str, *default: Any) -> Any:
    """What a node of autograd has saved for its backward pass."""
    return getattr(node, f"_saved_{name}", *default)


def active_modes() -> tuple[list[Any], list[Any]]:
    """The modes of functions and of dispatch (`torch.device(...)`, say) of this thread and its helpers, in order."""
    functions = [mode for mode in overrides._get_current_function_mode_stack() if not getattr(mode, "stays", False)]
    return functions, _python_dispatch._get_current_dispatch_mode_stack()


@contextmanager
def in_modes(modes: tuple[list[Any], list[Any]]) -> Generator[None]:
    """Put this thread in modes that another thread has entered."""
    functions, dispatches = modes
    for mode in functions:
        overrides._push_mode(mode)
    for mode in dispatches:
        _python_dispatch._push_mode(mode)
    try:
        yield
    finally:
        for mode in reversed(dispatches):
            _python_dispatch._pop_mode(getattr(mode, "_mode_key", None))
        for _ in functions:
            overrides._pop_mode()


def parametrizations_are_cached() -> bool:
    """Whether `torch.nn.utils.parametrize.cached()` is open, in any thread."""
    return bool(parametrize._cache_enabled)


def in_dual_level() -> bool:
    """Whether a level of forward differentiation is open, in any thread."""
    return forward_ad._current_level >= 0


def saves_elsewhere() -> bool:
    """Whether what autograd saves goes through hooks (`torch.utils.checkpoint`, for one), in this thread."""
    inside: Any = torch._C
    return inside._autograd._top_saved_tensors_default_hooks(False) is not None


def storage_use_count(storage: Any) -> int:
    """Count what holds a storage.

    Raises:
        AttributeError: this version of torch has no such count.
    """
    return torch._C._storage_Use_Count(storage._cdata)


def dynamo_config() -> Any:
    """The options of torch.compile."""
    from torch._dynamo import config  # takes a second to import, and is there if a module is compiled

    return config


def clear_compile_rules() -> None:
    """Clear what torch.compile knows of functions, as a new process group does, if it was imported."""
    if rules := sys.modules.get("torch._dynamo.trace_rules"):
        rules.clear_lru_cache()


def not_compiling() -> AbstractContextManager[Any]:
    """Run compiled functions uncompiled inside the block; called in a dispatch mode, they would remain so."""
    is_used = "torch._dynamo" in sys.modules  # which takes a second to import
    return torch.compiler.set_stance("force_eager") if is_used else nullcontext()
