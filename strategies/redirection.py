"""Run a module's step inside the forward of its wrapper, where DDP does its bookkeeping."""

from collections.abc import Callable
from typing import Any

from torch import nn

_NOTHING = object()


def forward_through(wrapper: nn.Module, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a step of a module as if it were the module's `forward`, once; the step itself may call the real one.

    Args:
        wrapper: whose forward calls the module's.
        module: whose forward is replaced until it is called.
        step: what is called instead.
        *args: for the step, by way of the wrapper.
        **kwargs: likewise.

    Returns:
        What the wrapper's forward returned.
    """
    # nn.Module's own way to set an attribute asks first if it is a parameter, a buffer or a child
    state = vars(module)
    before = state.get("forward", _NOTHING)

    def put_back() -> None:
        if before is _NOTHING:
            state.pop("forward", None)
        else:
            state["forward"] = before

    def step_instead(*inner: Any, **named: Any) -> Any:
        put_back()
        return step(*inner, **named)

    state["forward"] = step_instead
    try:
        return wrapper(*args, **kwargs)
    finally:
        put_back()
