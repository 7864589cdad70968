"""Write one log file per run, `train.log`, with each line once whatever the number of processes."""

import logging
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_lightning.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from ...strategies.core.patching import LIGHTNING_TELLS, filtered, replaced

LOG_FILE = "train.log"
FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"
ESCAPED = "backslashreplace"
"""How text is written that is no Unicode: names of files, and messages of errors with bytes of them."""
LIGHTNING_LOGGERS = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric", "lightning")


# in Python 3.10 the class takes no parameter at run time
_StreamHandler = logging.StreamHandler[Any] if TYPE_CHECKING else logging.StreamHandler


class ConsoleHandler(_StreamHandler):
    """Write to the `sys.stdout` of the moment: a progress bar replaces it, to keep lines above itself."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


@contextmanager
def run_log(run_dir: str | Path, rank: int = 0) -> Generator[None]:
    """Send the log of this process to `train.log` and the console.

    Args:
        rank: this process's rank; ranks above 0 report errors only, on the console.

    Lightning's loggers, which have their own handlers, are redirected the same way.
    """
    # `LogEveryEpoch` shortens the interval right after this warning
    warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging interval")
    # Lightning 2.6 uses a deprecated API of torch 2.13's pytree; users can't act on the warning
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*", category=FutureWarning)
    # Lightning's own rank, which it has not declared; set before loggers are made: a forked worker has the parent's
    own_rank = replaced(rank_zero_only, "rank", rank)
    with own_rank, _root_handlers(run_dir, rank), filtered(LIGHTNING_TELLS, _is_needed):
        for name in LIGHTNING_LOGGERS:
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True
        yield


@contextmanager
def _root_handlers(run_dir: str | Path, rank: int) -> Generator[None]:
    """Replace Hydra's handlers of the root logger by the run's."""
    root = logging.getLogger()
    level, root.level = root.level, logging.INFO
    added: list[logging.Handler] = []
    hydras = [handler for handler in root.handlers if getattr(handler, "stream", None) is sys.stdout]
    for handler in hydras:
        root.removeHandler(handler)
    if hydras or not root.handlers:
        added.append(ConsoleHandler())
    if rank == 0:
        added.append(logging.FileHandler(Path(run_dir) / LOG_FILE, encoding="utf-8", errors=ESCAPED))
    else:
        logging.disable(logging.WARNING)
    for handler in added:
        to_file = isinstance(handler, logging.FileHandler)
        handler.setFormatter(logging.Formatter(FORMAT if to_file else "%(message)s"))
        root.addHandler(handler)
    try:
        yield
    finally:
        root.level = level
        logging.disable(logging.NOTSET)
        for handler in added:
            root.removeHandler(handler)
            handler.close()
        for handler in hydras:
            root.addHandler(handler)


REDUNDANT = (
    "Tip:", "GPU available:", "TPU available:", "HPU available:", "`Trainer(val_check_interval=1.0)`", "global batch ",
)  # fmt: skip
"""Lightning's tips for other products, and lines that the start-up block replaces."""


def _is_needed(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in REDUNDANT)
