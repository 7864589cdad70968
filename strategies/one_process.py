"""What strategies of one process and several devices share."""

import pytorch_lightning.strategies as pl_strategies

from .exceptions import ConfigError


class OneProcessStrategy(pl_strategies.SingleDeviceStrategy):
    """One process: nothing to reduce, gather or wait for. Its root device is the first of its devices."""

    @property
    def _layer_sync(self) -> None:
        """Where Lightning puts what `sync_batchnorm=True` stands for."""

    @_layer_sync.setter
    def _layer_sync(self, layer_sync: object) -> None:
        if layer_sync is not None:
            raise ConfigError(
                f"{self.strategy_name}: sync_batchnorm=True synchronizes processes, and here is only one. Set "
                "sync_batchnorm=False, or choose strategy=ddp."
            )
