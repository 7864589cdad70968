"""Declare what a strategy adds to Lightning's methods, so that a loop can do Lightning's part itself.

A strategy that overrides `backward` only to scale the loss first need not send the loop through Lightning's whole
chain of calls. It marks its method with what it adds:

    @adds(first="scale_loss")
    def backward(self, closure_loss, optimizer, *args, **kwargs):
        return super().backward(self.scale_loss(closure_loss), optimizer, *args, **kwargs)

A loop that implements Lightning's part calls `scale_loss` and does that part its own way; any other loop calls
`backward`. A subclass that overrides `backward` again, without a mark, is called as is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class Additions(NamedTuple):
    """Names of the strategy's methods that are called before and after Lightning's part; empty for none."""

    first: str = ""
    then: str = ""


def adds(first: str = "", then: str = "") -> Callable[[Method], Method]:
    """Mark a method that does what Lightning's does, and calls `first` before it and `then` after it.

    Args:
        first: for `backward` a function of the loss that returns the loss, for `batch_to_device` a function of the
            loader's index, otherwise one without arguments.
        then: a function without arguments. For `backward` it runs before the hook `on_after_backward`.
    """

    def mark(method: Method) -> Method:
        vars(method)["additions"] = Additions(first, then)
        return method

    return mark


def additions(strategy: object, name: str, lightnings: Any) -> Additions | None:
    """Look up what a strategy's method adds to Lightning's.

    Args:
        strategy: the strategy.
        name: name of the method.
        lightnings: Lightning's own method.

    Returns:
        The additions, or None if the method may do anything.
    """
    method = getattr(type(strategy), name)
    if name in vars(strategy):
        return None
    return Additions() if method is lightnings else getattr(method, "additions", None)
