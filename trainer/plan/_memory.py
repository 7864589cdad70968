"""Describe the memory of one device in one simulated step."""

from dataclasses import dataclass


@dataclass
class StageMemory:
    """Bytes on one device while a module trains, once the optimizer's state exists.

    Args:
        activations: tensors that the training step saves for its backward pass.
        forward_peak: largest number of bytes at one time during the training step, including all of the above.
        backward_peak: the same during the backward pass.
        gathered: parameters of other ranks that are gathered at one time.
        owned: bytes of the optimizer's state by the rank that keeps it, where ranks share it.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    batch: int = 0
    activations: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    update_peak: int = 0
    gathered: int = 0
    owned: tuple[int, ...] = ()
