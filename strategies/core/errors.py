"""The exception raised for user errors."""


class ConfigError(ValueError):
    """Raised, before the first step, for a request that can't be honoured.

    The message is one sentence or two: what was given, what is allowed, what to do. `train.py` prints it without a
    traceback; every other exception keeps its traceback.
    """
