"""Import what a `_target_` names, and say why that fails."""

import importlib
import os
import pkgutil
from types import ModuleType
from typing import Any

from typing_extensions import TypeIs

from .nearest import nearest


def find_object(target: str) -> Any:
    """Import the object at a dotted path, which runs the module's code: any error is possible."""
    return pkgutil.resolve_name(target)


def is_class(value: object) -> TypeIs[type[Any]]:
    """Tell whether a value is a class; on Python 3.10 `isinstance(list[int], type)` is true, too."""
    return issubclass(type(value), type)


def why_not_found(target: str, kind: type, exc: Exception) -> tuple[str, str]:
    """Say why a target of a base class can't be imported, and what is suggested, perhaps nothing."""
    found, rest, error = nearest_module(target)
    if error is not None:
        return str(error).splitlines()[-1] if str(error) else repr(error), ""
    if found is None:
        name = target.partition(".")[0]
        return f"No module named '{name}' in {os.getcwd()} or among the installed packages", ""
    classes = [name for name, value in vars(found).items() if is_class(value) and issubclass(value, kind)]
    own = [name for name in classes if vars(found)[name].__module__ == found.__name__] or classes
    own += [module.name for module in pkgutil.iter_modules(getattr(found, "__path__", []))]
    near = nearest(rest.partition(".")[0], own)
    has = f"it has {', '.join(own[:8])}" if own else f"it has no {kind.__name__}"
    suggestion = f"Did you mean {found.__name__}.{near}?" if near else ""
    return f"the module {found.__name__} was found, but has no {rest}; {has}", suggestion


def nearest_module(target: str) -> tuple[ModuleType | None, str, Exception | None]:
    """Import as much of a dotted path as there is: the innermost module, the rest, and the error of the next."""
    parts, found = target.split("."), None
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as exc:
            absent = exc.name is not None and (name == exc.name or name.startswith(f"{exc.name}."))
            return found, ".".join(parts[i:]), None if absent else exc
        except Exception as exc:  # noqa: BLE001  # whatever the module's code raises
            return found, ".".join(parts[i:]), exc
    return found, "", None
