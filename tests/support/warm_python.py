"""Run Python programs as `python` does, in processes forked from a server that has imported their libraries.

To import torch and Lightning takes about five seconds of processor time, a fork hundredths of a second. A program has
its own arguments, folder, environment, output, `__main__`, process id and exit status, and nothing imported is its own.
Workers of torchrun (`-m torch.distributed.run`) are forked, too. Whoever tests the order of imports starts a program
without Lightning; whoever tests what Python itself does starts `sys.executable`.
"""

import atexit
import builtins
import gc
import importlib
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

import fork_server
import numpy
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler


class Process:
    """A program that runs, with the members of `subprocess.Popen` that tests use.

    Args:
        words: those behind `python`: a script, `-m` and a module, or `-c` and code; and its arguments.
        cwd: the folder that it starts in.
        env: all of its environment variables; those of this process by default.
        output: the file that its output and errors go to; without one `communicate` returns them.
        new_session: whether it leads a session of its own.
        without_lightning: whether it is to import Lightning and this package itself.
    """

    def __init__(
        self, *words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None,
        output: Path | None = None, new_session: bool = False, without_lightning: bool = False,
    ) -> None:  # fmt: skip
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._files = [output or Path(folder, name) for name in ("out", "err")]
        for file in self._files:
            file.touch()
        arguments = (
            list(map(str, words)), os.path.abspath(cwd or "."), dict(os.environ if env is None else env),
            [str(file) for file in self._files], new_session,
        )  # fmt: skip
        context = multiprocessing.get_context("forkserver") if without_lightning else fork_server.context()
        kind = _Process if without_lightning else context.Process
        self._process = kind(target=_main, args=arguments)
        with fork_server.without_lightning() if without_lightning else nullcontext():
            self._process.start()
        self.args = list(words)
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit status."""
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end, and return what was written to the output and as errors."""
        self.wait(timeout)
        output, errors = [file.read_text() for file in self._files]
        return output, errors

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class Worker(Process):
    """What torchrun's agent takes for the `subprocess.Popen` of a worker: a process forked from the agent."""

    def __init__(
        self, args: Sequence[str], env: dict[str, str], stdout: IO[str] | None, stderr: IO[str] | None, **_: Any
    ) -> None:
        words = [word for word in args[1:] if word != "-u"]
        files = [file and file.name for file in (stdout, stderr)]
        self._process = multiprocessing.get_context("fork").Process(
            target=_main, args=(words, os.getcwd(), env, files, True)
        )
        self._process.start()
        self.args = list(args)
        self.pid = self._process.pid or 0


def run(*words: str | Path, timeout: float = 300, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, which must come in time; words and options are those of `Process`."""
    program = Process(*words, **options)
    try:
        output, errors = program.communicate(timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess(program.args, program.wait(60), output, errors)


class _Process(ForkServerProcess):
    """A process that does not import evener first, as those of multiprocessing's own class do."""


def _main(words: list[str], cwd: str, env: dict[str, str], files: list[str | None], new_session: bool) -> NoReturn:
    """Be the program: the process has just been forked."""
    if new_session:
        os.setsid()
    fork_server.hear_signals()
    for descriptor, name in ((0, os.devnull), (1, files[0]), (2, files[1])):
        if name is None:
            continue
        # a terminal controls the leader of a session that may read from it
        opened = os.open(name, os.O_APPEND | (os.O_RDWR if descriptor else os.O_RDONLY))
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    for name, descriptor in (("stdout", 1), ("stderr", 2)):  # the server's know whether its own files can be sought in
        stream = open(descriptor, "w", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    _forget_server()
    if said := env.get("PYTHONWARNINGS"):
        warnings._processoptions(said.split(","))  # pyright: ignore[reportAttributeAccessIssue]
    importlib.invalidate_caches()
    numpy.random.seed()  # Python's own generator is seeded anew by a fork
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    _end(_program(words))


def _forget_server() -> None:
    """Be a process that was not started by `multiprocessing`, and knows nothing of the server."""
    from preloaded import MAIN_PROCESS, PATH  # the server has it

    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    for name in ("__mp_main__", "fork_server", "warm_python", "distributed"):
        sys.modules.pop(name, None)
    process.ORIGINAL_DIR = os.getcwd()
    process._parent_process = None
    process._current_process = MAIN_PROCESS
    MAIN_PROCESS.name = "MainProcess"
    multiprocessing.set_start_method(None, force=True)
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    for descriptor in (server._forkserver_alive_fd, tracker._fd):
        if descriptor is not None:
            os.close(descriptor)
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    server._preload_modules = ["__main__"]
    tracker._fd = tracker._pid = None


def _program(words: list[str]) -> Callable[[], Any]:
    """What Python runs for the words of a command."""
    main = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(words[1], None)  # it runs as `__main__`
        if words[1] == "torch.distributed.run":
            subprocess_handler.Popen = Worker
        return lambda: runpy._run_module_as_main(words[1])  # pyright: ignore[reportAttributeAccessIssue]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        return lambda: exec(compile(words[1], "<string>", "exec"), vars(main))
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    main.__file__ = words[0]
    return lambda: exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), vars(main))


def _end(program: Callable[[], Any]) -> NoReturn:
    """Run the program and end the process as the interpreter does, except for the finalization of its objects."""
    status, killed = 0, False
    try:
        program()
    except SystemExit as exc:
        if isinstance(exc.code, int) or exc.code is None:
            status = exc.code or 0
        else:
            print(exc.code, file=sys.stderr)  # noqa: T201
            status = 1
    except BaseException as exc:  # noqa: BLE001
        trace = exc.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(exc), exc.with_traceback(trace), trace)
        status, killed = 1, isinstance(exc, KeyboardInterrupt)
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # waits for non-daemon threads
        atexit._run_exitfuncs()
        gc.collect()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        status = 120
    if killed:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)
