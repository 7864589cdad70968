"""What a rank does with a signal by the state of its run."""

import signal

import pytest
import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import SIGTERMException

from evener.strategies.distributed.group import RankGroup


def test_a_rank_that_is_ending_with_an_error_is_not_interrupted_by_the_signal_that_ends_the_others() -> None:
    # the agent sends SIGTERM to all ranks when one has failed: while a rank waited for its data workers, in the
    # finalizer of its loader, Python printed the exception of the signal above the error that ended the run
    trainer, group = pl.Trainer(logger=False, enable_checkpointing=False), RankGroup(timeout_s=1)
    group.begin(trainer)
    on_signal = trainer._signal_connector._sigterm_notifier_fn
    with pytest.raises(SIGTERMException, match=r"^$"):
        on_signal(signal.SIGTERM, None)
    group.fail(KeyError("no such sample"))
    on_signal(signal.SIGTERM, None)
