"""One process per device; gradients averaged by torch's DistributedDataParallel."""

from datetime import timedelta
from typing import Any

import pytorch_lightning.strategies as pl_strategies
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from typing_extensions import override

from .exceptions import ConfigError


class DDPStrategy(pl_strategies.DDPStrategy):
    """One process per device, each with its own part of every global batch.

    Under `train.py`, torchrun, SLURM or Kubeflow the processes exist already. In a plain script the trainer starts
    them itself, by fork on CPU and by spawn on accelerators, so that the script is not run once per device.

    Args:
        timeout_s: seconds that a rank waits for its peers in a collective before it fails.
        backend: `gloo`, `nccl`, ...; None takes the one that suits the device.
        find_unused_parameters: look, in every step, for parameters that took no part in the loss.
        ddp_options: further keyword arguments of `torch.nn.parallel.DistributedDataParallel`.

    Raises:
        ConfigError: `timeout_s` is not positive.
    """

    strategy_name = "ddp"

    def __init__(
        self,
        timeout_s: float = 1800.0,
        backend: str | None = None,
        find_unused_parameters: bool = False,
        **ddp_options: Any,
    ) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"ddp: timeout_s={timeout_s} is not positive. Give seconds, for example timeout_s=1800.")
        super().__init__(
            process_group_backend=backend,
            timeout=timedelta(seconds=timeout_s),
            find_unused_parameters=find_unused_parameters,
            **ddp_options,
        )

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            return
        self._start_method = "fork" if self.root_device.type == "cpu" else "spawn"
        self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)
