"""The exception raised for user errors, and the check of options that are one of a few words."""

from typing import Any, get_args


class ConfigError(ValueError):
    """Raised, before the first step, for a request that can't be honoured.

    The message is one sentence or two: what was given, what is allowed, what to do. `train.py` prints it without a
    traceback; every other exception keeps its traceback.
    """


def verify_choice(option: str, value: object, allowed: Any) -> None:
    """Refuse a word that an option does not know.

    Args:
        option: its name, after the strategy's if that is to begin the message.
        allowed: a `Literal`.

    Raises:
        ConfigError: the value is none of the words.
    """
    words = get_args(allowed)
    if value not in words:
        raise ConfigError(f"{option}={value} is unknown; choose one of {', '.join(words)}.")
