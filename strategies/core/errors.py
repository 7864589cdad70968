"""The exception raised for user errors."""


class ConfigError(ValueError):
    """What was asked for can't be honoured, and is refused before the first step.

    The message is one sentence or two: what was given, what is allowed, what to do. `train.py` prints it without a
    traceback; every other exception keeps its traceback.
    """
