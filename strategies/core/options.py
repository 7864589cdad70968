"""Declare in its annotation which values an option may have, and refuse all others in one sentence."""

import inspect
import operator
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import Self

from .errors import ConfigError

_SIGNS: dict[str, Callable[[Any, float], bool]] = {">=": operator.ge, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class Limit:
    """A limit of a number, as in `Annotated[int, Limit(">=", 1)]`."""

    sign: Literal[">=", ">", "<"]
    number: float


@dataclass(frozen=True)
class Advice:
    """What the refusal of a value also says, as in `Annotated[Sequence[str], Advice("Give ...")]`."""

    sentence: str


Count: TypeAlias = Annotated[int, Limit(">=", 1)]
Positive: TypeAlias = Annotated[float, Limit(">", 0)]
NotNegative: TypeAlias = Annotated[float, Limit(">=", 0)]
Natural: TypeAlias = Annotated[int, Limit(">=", 0)]

_WORDS = {int: "a whole number", float: "a number", str: "text", type(None): "null"}
_ONE, _SEVERAL = re.compile(r"^(?:a )?(whole number|number|text)"), r"\1s"

_RENAMED = {"verify_loss": "verify", "async": "background"}
"""Options of earlier versions by their present names."""

GONE = {
    "copy_frozen": "Leave it out: all parameters are copied to the devices before each training step.",
    "loss_reduction": "Leave it out: what a loss divides by, or that it is a sum, is found.",
    "model_parallel_size": "Choose strategy=ddp_model_parallel, which cuts a copy per rank into stages.",
    "objective": "Leave it out: shares are measured by time; give strategy.weights for others.",
    "on_error": "Leave it out: a checkpoint that can't be written stops training; those before are intact.",
    "overlap": "Leave it out: micro-batches are launched in the schedule's order.",
    "profile_activations": "Leave it out: set balance=time, or name the cut (partition).",
    "shard_optimizer": "Choose strategy=ddp, whose ranks share the optimizers' state.",
}
"""Options of earlier versions, and what to do without them."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "model_parallel_size": (1,), "objective": ("time",), "overlap": (None, "launch"), "profile_activations": (False,),
    "on_error": ("raise",),
}  # fmt: skip
"""Values of these that configurations hold, and that mean what is done without them."""

Init = TypeVar("Init", bound=Callable[..., None])


class Options:
    """Base of dataclasses whose fields are options that their annotations declare."""

    def __post_init__(self) -> None:
        """Refuse values that the annotations don't allow."""
        for name, hint in hints_of(type(self)).items():
            verify_value(name, getattr(self, name), hint)

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Self:
        """Take these options out of a dict of several kinds of options."""
        return cls(**{name: options.pop(name) for name in hints_of(cls) if name in options})


def checked(init: Init) -> Init:
    """Have a constructor refuse, before it runs, values that its annotations don't allow."""
    names = [*inspect.signature(init).parameters][1:]

    @wraps(init)
    def checked_init(self: Any, *args: Any, **options: Any) -> None:
        options = {_RENAMED.get(name, name): value for name, value in options.items()}
        hints, before = hints_of(init), getattr(self, "strategy_name", type(self).__name__)
        for name in GONE.keys() & options.keys():
            is_taken = any(name in inspect.signature(kind.__init__).parameters for kind in type(self).__mro__)
            if not is_taken and options.pop(name) not in HARMLESS.get(name, ()):
                raise ConfigError(f"{before}: {name} is no longer there. {GONE[name]}")
        for name, value in (*zip(names, args, strict=False), *options.items()):
            verify_value(name, value, hints.get(name, Any) if name in names else Any, f"{before}: ")
        init(self, *args, **options)

    return cast("Init", checked_init)


@cache
def hints_of(owner: Any) -> dict[str, Any]:
    """The annotations of a function or class by name; empty if one of them is not to be found at run time."""
    try:
        return get_type_hints(owner, include_extras=True)
    except NameError:  # a name imported only under TYPE_CHECKING
        return {}


def verify_value(name: str, value: Any, hint: Any, before: str = "") -> None:
    """Refuse a value of an option that its annotation doesn't allow; `before` begins the message."""
    if not allows(hint, value):
        advice = "".join(f" {part.sentence}" for part in get_args(hint) if isinstance(part, Advice))
        raise ConfigError(f"{before}{name}={as_given(value)} is not allowed. Give {describe(hint)}.{advice}")


def allows(hint: Any, value: Any) -> bool:
    """Whether an annotation allows a value; a dict with a `_target_` may become any object."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any or (isinstance(value, dict) and "_target_" in value):
        return True
    if kind is Annotated:
        limits = [part for part in arguments if isinstance(part, Limit)]
        return allows(arguments[0], value) and all(_SIGNS[limit.sign](value, limit.number) for limit in limits)
    if kind in (Union, types.UnionType):
        return any(allows(argument, value) for argument in arguments)
    if kind is Literal:
        return any(value == argument and type(value) is type(argument) for argument in arguments)
    if kind is None or value is None:
        return kind in (None, type(None))
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    if isinstance(value, (bool, str)):
        return kind is type(value) or (kind is Path and isinstance(value, str))
    if isinstance(value, Real):
        return kind is float or (kind is int and isinstance(value, Integral))
    if isinstance(value, list):
        fits = kind is tuple or issubclass(list, kind)
        return fits and (kind is tuple or all(allows(argument, item) for argument in arguments for item in value))
    return isinstance(value, kind)


def describe(hint: Any) -> str:
    """Describe in words what an annotation allows."""
    words = list(dict.fromkeys(_words(hint)))
    if _WORDS[float] in words and _WORDS[int] in words:
        words.remove(_WORDS[int])
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _words(hint: Any) -> Iterator[str]:
    kind = get_origin(hint) or hint
    if kind is Annotated:
        limits = " and ".join(f"{part.sign} {part.number}" for part in get_args(hint) if isinstance(part, Limit))
        yield f"{describe(get_args(hint)[0])} {limits}".rstrip()
    elif kind in (Union, types.UnionType):
        for argument in get_args(hint):
            yield from _words(argument)
    elif kind is Literal:
        yield from map(as_given, get_args(hint))
    elif isinstance(kind, type) and issubclass(kind, Mapping):
        yield "a mapping"
    elif isinstance(kind, type) and (kind is tuple or issubclass(list, kind)):
        one = describe(get_args(hint)[0]) if get_args(hint) else ""
        yield f"a list of {_ONE.sub(_SEVERAL, one)}" if one else "a list"
    elif kind is bool:
        yield from ("true", "false")
    else:
        yield _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def as_given(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(as_given, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
