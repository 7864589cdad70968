"""Run one piece of work on each device: in order on CPUs, in threads if any is an accelerator."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from .devices import current_stream, is_accelerator, on_device


@dataclass(frozen=True)
class Piece:
    """Work for one device.

    Args:
        device: where it runs.
        name: description used in errors, such as `chunk 1 of 3 (4 samples)`.
        call: the work.
    """

    device: torch.device
    name: str
    call: Callable[[], Any]


class Executor:
    """Runs pieces concurrently and returns their results in order.

    CPU replicas run in order: they share one random stream, which threads would consume in an unpredictable order.
    Threads inherit grad mode, inference mode and autocast from the caller; if autocast is on for the first piece's
    device type, it is on, with the same dtype, for all.

    Args:
        threads: run in threads; None decides by the devices.
    """

    def __init__(self, threads: bool | None = None) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def run(self, pieces: Sequence[Piece]) -> list[Any]:
        """Run all pieces.

        Returns:
            Their results, in order.

        Raises:
            Exception: the error of the first piece that failed; its message names the device and the chunk.
        """
        threads = self._threads
        if threads is None:
            threads = any(is_accelerator(piece.device) for piece in pieces)
        context = _Context(pieces[0].device)
        if len(pieces) == 1 or not threads:
            return [_reraised(piece, context.run, piece) for piece in pieces]
        return self._run_in_threads(pieces, context)

    def _run_in_threads(self, pieces: Sequence[Piece], context: "_Context") -> list[Any]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(thread_name_prefix="replica")
        streams = [current_stream(piece.device) for piece in pieces]
        work = zip(pieces, streams, strict=True)
        futures = [self._pool.submit(context.enter_and_run, piece, stream) for piece, stream in work]
        for future in futures:
            future.exception()  # waits: no thread may still run when an error is raised
        return [_reraised(piece, future.result) for piece, future in zip(pieces, futures, strict=True)]

    def shutdown(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


class _Context:
    """Captures torch's thread-local state at construction and reproduces it in other threads."""

    def __init__(self, root_device: torch.device) -> None:
        self._root_type = root_device.type
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = torch.is_autocast_enabled(self._root_type)
        self._dtype = torch.get_autocast_dtype(self._root_type) if self._autocast else None

    def run(self, piece: Piece) -> Any:
        """Run a piece in the thread that created this context."""
        with on_device(piece.device), ExitStack() as stack:
            if piece.device.type != self._root_type:
                self._enter_autocast(stack, piece.device)
            return piece.call()

    def enter_and_run(self, piece: Piece, stream: torch.Stream | None) -> Any:
        """Run a piece in another thread."""
        with on_device(piece.device, stream), ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            self._enter_autocast(stack, piece.device)
            return piece.call()

    def _enter_autocast(self, stack: ExitStack, device: torch.device) -> None:
        if self._autocast:
            stack.enter_context(torch.autocast(device.type, self._dtype, cache_enabled=self._cache))


def _reraised(piece: Piece, call: Callable[..., Any], *args: Any) -> Any:
    """Call, and add the piece's name to any error, keeping its type and traceback."""
    try:
        return call(*args)
    except Exception as exc:
        where = f"[{piece.name} on {piece.device}]"
        if len(exc.args) == 1 and isinstance(exc.args[0], str):
            exc.args = (f"{exc.args[0]} {where}",)
            raise
        raise RuntimeError(f"{type(exc).__name__}: {exc} {where}") from exc
