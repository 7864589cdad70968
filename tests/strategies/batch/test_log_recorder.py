"""What replicas log through the original module."""

from typing import Any

import pytest
from regression import Net, Numbered, quiet_trainer
from torch.utils.data import DataLoader

from evener.strategies import DataParallelStrategy
from evener.strategies.core.errors import ConfigError


class Task:
    """Has the steps of a module, as pyannote.audio's tasks do."""

    def __init__(self, module: Net) -> None:
        self.module = module

    def training_step(self, batch: Any) -> Any:
        loss = (self.module.net(batch[0]) - batch[1]).square().mean()
        self.module.log("train", loss, on_epoch=True)
        return loss


class Delegating(Net):
    def __init__(self) -> None:
        super().__init__()
        self.task = Task(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.task.training_step(batch)


def test_a_replica_that_logs_through_the_original_module_is_refused() -> None:
    # Both chunks' values were logged as the first one's: an epoch mean of 0.7043 instead of 0.7009.
    trainer = quiet_trainer(DataParallelStrategy(), 2)
    with pytest.raises(ConfigError, match=r"called the original Delegating\.log, not its own"):
        trainer.fit(Delegating(), DataLoader(Numbered(5), 3))
    assert trainer.global_step == 0
