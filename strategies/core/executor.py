"""Run one piece of work on each device: in order on CPUs, in threads, one per device, if any is an accelerator."""

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Semaphore, Thread
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

from .devices import current_stream, is_accelerator, on_device


def autocast_types() -> list[str]:
    """Device types of this machine. The autocast of the first where it is on goes for those where it is off."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else [accelerator.type, "cpu"]


@dataclass(frozen=True)
class Piece:
    """Work for one device; errors name it: `chunk 1 of 3 (4 samples)`."""

    device: torch.device
    name: str
    call: Callable[[], Any]


class Executor:
    """Runs pieces concurrently and returns their results in order.

    CPU replicas run in order, as pieces on one accelerator do: they share a random stream, which threads would mix.
    """

    def __init__(self, threads: bool | None = None) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def run(self, pieces: Sequence[Piece], in_order: bool = False, context: "ThreadState | None" = None) -> list[Any]:
        """Run all pieces, in the calling thread if they must run `in_order`; the first error names device and chunk."""
        context, threads = context or ThreadState(), self._threads
        if threads is None:
            threads = any(is_accelerator(piece.device) for piece in pieces)
        if in_order or len(pieces) == 1 or not threads:
            return [reraised(piece, context.run, piece) for piece in pieces]
        queues: dict[object, list[int]] = {}
        for i, piece in enumerate(pieces):
            of_one_thread = piece.device if is_accelerator(piece.device) else i
            queues.setdefault(of_one_thread, []).append(i)

        def work(queue: list[int], device: torch.device, stream: torch.Stream | None) -> dict[int, Any]:
            with context.entered(device, stream):
                return {i: reraised(pieces[i], pieces[i].call) for i in queue}

        devices = [pieces[queue[0]].device for queue in queues.values()]
        if self._pool is None:
            # one is started only where all others are at work
            self._pool = ThreadPoolExecutor(1024, thread_name_prefix="replica")
        given = zip(queues.values(), devices, map(current_stream, devices), strict=True)
        futures = [self._pool.submit(work, *each) for each in given]
        wait(futures)  # none may still run when an error is raised
        results = {i: result for future in futures for i, result in future.result().items()}
        return [results[i] for i in range(len(pieces))]

    def shutdown(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


class ThreadState:
    """Captures torch's thread-local state at construction and reproduces it in other threads."""

    def __init__(self) -> None:
        self._modes = [one for one in overrides._get_current_function_mode_stack() if not getattr(one, "stays", False)]
        self._dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        on = [kind for kind in autocast_types() if torch.is_autocast_enabled(kind)]
        self._autocast = {kind: torch.get_autocast_dtype(kind) for kind in on}

    def run(self, piece: Piece) -> Any:
        """Run a piece in the thread that created this context."""
        autocast = self.autocast_on({piece.device.type} - self._autocast.keys()) if self._autocast else nullcontext()
        with on_device(piece.device), autocast:
            return piece.call()

    @contextmanager
    def entered(self, device: torch.device, stream: torch.Stream | None) -> Generator[None]:
        """Work on a device in another thread inside the block."""
        kinds = {device.type, *(self._autocast if len(self._autocast) > 1 else ())}
        with (
            on_device(device, stream),
            torch.inference_mode(self._inference),
            torch.set_grad_enabled(self._grad),
            self.autocast_on(kinds),
            ExitStack() as modes,
        ):
            for mode in self._modes:
                overrides._push_mode(mode)
                modes.callback(overrides._pop_mode)
            for mode in self._dispatch_modes:
                _python_dispatch._push_mode(mode)
                modes.callback(_python_dispatch._pop_mode, getattr(mode, "_mode_key", None))
            yield

    @contextmanager
    def autocast_on(self, kinds: Iterable[str]) -> Generator[None]:
        """Autocast on some types of devices inside the block, if it was on for any, with that one's dtype."""
        with ExitStack() as stack:
            for kind in kinds if self._autocast else ():
                dtype = self._autocast.get(kind, next(iter(self._autocast.values())))
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._cache))
            yield


class Turns:
    """A piece of work in a thread of its own, with the `state` of the one that waits for it; only one of both runs."""

    def __init__(self, piece: Piece, state: ThreadState) -> None:
        self._piece, self._state = piece, state
        self._resumed, self._gave_way = Semaphore(0), Semaphore(0)
        self._has_begun = self._is_left = self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def resume(self) -> None:
        """Wait until it gives way or has ended."""
        if self.is_done:
            return
        if self._has_begun:
            self._resumed.release()
        else:
            self._has_begun = True
            self._start(self._run, current_stream(self._piece.device))
        self._gave_way.acquire()

    def give_way(self) -> None:
        """Let the other thread go on until it resumes this one, which calls this."""
        self._gave_way.release()
        self._resumed.acquire()
        if self._is_left:
            raise _LeftError

    def leave(self) -> None:
        """End it where it waits."""
        if self._has_begun and not self.is_done:
            self._is_left = True
            self.resume()

    def _start(self, call: Callable[..., None], *args: Any) -> None:
        Thread(target=call, args=args, name=self._piece.name, daemon=True).start()

    def _run(self, stream: torch.Stream | None) -> None:
        try:
            with self._state.entered(self._piece.device, stream):
                self.result = self._piece.call()
        except BaseException as exc:  # noqa: BLE001  # raised again in the thread that waits
            self.error = exc
        self.is_done = True
        self._gave_way.release()


class _LeftError(BaseException):
    """Ends work that is given up."""


def reraised(piece: Piece, call: Callable[..., Any], *args: Any) -> Any:
    """Call, and add the piece's name to any error, keeping its type and traceback."""
    try:
        return call(*args)
    except Exception as exc:
        where = f"[{piece.name} on {piece.device}]"
        if len(exc.args) == 1 and isinstance(exc.args[0], str):
            exc.args = (f"{exc.args[0]} {where}",)
            raise
        raise RuntimeError(f"{type(exc).__name__}: {exc} {where}") from exc
