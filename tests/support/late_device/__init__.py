"""An accelerator without hardware: devices `late:0`, `late:1`, … whose work is queued and done late.

`late_device.cpp` registers the type with torch (PrivateUse1); this file builds and loads it, gives it a module
(`torch.late`) and an accelerator of Lightning, and runs tests in processes of their own: a process that has loaded it
has another accelerator for good.

It shows placement, order, overlap on a virtual clock, memory and what makes the host wait. It has no kernels of its
own, no NCCL, no speed: `docs/dev/gpu.md` says what that leaves open.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import traceback
import types
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
from torch.utils import cpp_extension
from torch.utils.cpp_extension import library_paths

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")

needs_late_device = pytest.mark.skipif(COMPILER is None, reason="the late device needs a C++ compiler (g++)")
"""Marks tests that run on the device."""


@functools.cache
def build() -> Path:
    """Build the device for this torch, unless that was done before; takes half a minute of one core."""
    sources = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
    content = (
        b"".join(source.read_bytes() for source in sources) + f"{torch.__version__} {sysconfig.get_platform()}".encode()
    )
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    folder = root / "late_device" / hashlib.sha256(content).hexdigest()[:16]
    built = folder / "late_device_ext.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(built)
    return built


def _compile(built: Path) -> None:
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    libraries = library_paths()
    words = [
        str(COMPILER), "-O1", "-g0", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-DLATE_MODULE=late_device_ext",
        *(f"-I{path}" for path in includes), str(HERE / "late_device.cpp"), "-o", f"{built}.new",
        *(f"-L{path}" for path in libraries), "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10",
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the late device could not be built:\n{done.stderr[-4000:]}")
    os.replace(f"{built}.new", built)


_loaded: Any = None


def extension() -> Any:
    """The loaded extension."""
    assert _loaded is not None, "call load first"
    return _loaded


def load(num_devices: int = 4) -> None:
    """Make the devices exist in this process; what loads the library twice is refused by torch."""
    global _loaded
    spec = importlib.util.spec_from_file_location("late_device_ext", build())
    assert spec is not None
    assert spec.loader is not None
    _loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_loaded)
    _loaded.set_num_devices(num_devices)
    torch.utils.rename_privateuse1_backend("late")
    torch._register_device_module("late", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    importlib.import_module("torch._meta_registrations")  # the shapes of what C++ has no meta kernels for
    make: Any = lambda *args: extension().Backend(dist.ProcessGroupGloo(*args))  # noqa: E731
    dist.Backend.register_backend("late_gloo", make, devices=["late"])
    _register_accelerator()


def _index(device: Any) -> int:
    found = torch.device(device) if isinstance(device, str) else device
    index = found.index if isinstance(found, torch.device) else found
    return torch.accelerator.current_device_index() if index is None or index < 0 else index


def _module() -> types.ModuleType:
    """`torch.late`: what torch documents that a module of a device type has."""
    late, ext = types.ModuleType("torch.late"), extension()
    late.__dict__.update(
        Stream=functools.partial(torch.Stream, "late"),
        Event=functools.partial(torch.Event, "late"),
        device=lambda device: torch.accelerator.device_index(_index(device)),
        device_count=ext.num_devices,
        is_available=lambda: True,
        is_initialized=lambda: True,
        current_device=torch.accelerator.current_device_index,
        set_device=lambda device: torch.accelerator.set_device_index(_index(device)),
        current_stream=torch.accelerator.current_stream,
        stream=lambda stream: stream,
        synchronize=torch.accelerator.synchronize,
        empty_cache=torch.accelerator.empty_cache,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_rng_state=lambda device="late": ext.generator_state(_index(device)),
        set_rng_state=lambda state, device="late": ext.set_generator_state(_index(device), state),
        manual_seed=lambda seed: ext.seed_generator(torch.accelerator.current_device_index(), seed % 2**64),
        manual_seed_all=lambda seed: [ext.seed_generator(i, seed % 2**64) for i in range(ext.num_devices())],
        _is_in_bad_fork=lambda: False,
    )  # fmt: skip
    return late


def _register_accelerator() -> None:
    from pytorch_lightning.accelerators import Accelerator, AcceleratorRegistry

    class LateAccelerator(Accelerator):
        def setup_device(self, device: torch.device) -> None:
            torch.accelerator.set_device_index(device.index or 0)

        def teardown(self) -> None:
            pass

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return list(range(devices)) if isinstance(devices, int) else devices

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device("late", index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return torch.accelerator.device_count()

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return "late"

    AcceleratorRegistry.register("late", LateAccelerator, description="a device that exists in software only")


# ------------------------------------------------------------------------------------------------- what tests ask of it


@dataclass(frozen=True)
class Delays:
    """How long operations take, in seconds of the virtual clock.

    Args:
        kernel: of an operation.
        copy: of a copy between two devices or a device and the host, and of a collective.
        launch: of the host, to queue one.
        by_name: of operations by name, such as `aten::addmm.out`, in place of these.
        seed: each delay is drawn between 0 and twice its value; -1 for fixed ones.
    """

    kernel: float = 1e-5
    copy: float = 1e-5
    launch: float = 0.0
    by_name: Sequence[tuple[str, float]] = ()
    seed: int = -1


def set_delays(delays: Delays) -> None:
    extension().set_delays(delays.kernel, delays.copy, delays.launch, dict(delays.by_name), delays.seed)


def set_limit(num_bytes: int) -> None:
    """Limit the memory of each device."""
    extension().set_limit(num_bytes)


def keep_freed(keeps: bool) -> None:
    """Leave memory that is freed as it is until it is used again, as CUDA does: torch's FSDP relies on that."""
    extension().set_keeps_freed(keeps)


def clock() -> float:
    """When all that was queued so far has ended, in seconds of the virtual clock; waits for nothing."""
    return extension().end_of_work(-1)


def busy_s(device: int) -> float:
    """Seconds of the virtual clock that the operations of a device took, however many at a time."""
    return extension().busy(device)


@contextlib.contextmanager
def host_waits() -> Generator[list[str]]:
    """Collect where the host waits for a device inside the block: what for, and the Python stack."""
    found: list[str] = []
    extension().set_on_wait(lambda why: found.append(f"{why}\n{''.join(traceback.format_stack(limit=40)[:-1])}"))
    try:
        yield found
    finally:
        extension().set_on_wait(None)


@contextlib.contextmanager
def traced() -> Generator[Callable[[], list[tuple[int, int, str, float, float]]]]:
    """Note what is queued inside the block: device, stream, name, begin and end."""
    extension().set_tracing(True)
    try:
        yield extension().spans
    finally:
        extension().set_tracing(False)


def run(function: Callable[..., Any], *args: Any, num_devices: int = 4, timeout_s: float = 100.0) -> Any:
    """Run `function(*args)` in a process of its own, where the devices exist."""
    build()
    return distributed.run_script(_loaded_and, num_devices, function, *args, timeout_s=timeout_s)


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, num_devices: int = 6) -> list[Any]:
    """Run `function(*args)` on ranks, as `distributed.run_ranks`, where the devices exist."""
    build()
    return distributed.run_ranks(_loaded_and, num_ranks, num_devices, function, *args, timeout_s=100.0)


def _loaded_and(num_devices: int, function: Callable[..., Any], *args: Any) -> Any:
    load(num_devices)
    return function(*args)
