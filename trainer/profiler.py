"""Record a trace of some steps with torch's profiler."""

import os
from pathlib import Path

import torch
from pytorch_lightning.profilers import Profiler
from torch import profiler
from typing_extensions import override


class TraceProfiler(Profiler):
    """Record some training steps with torch's profiler: operators, kernels, memory and the actions of the loop.

    Every rank writes `trace.json` (rank 0) or `trace_rank<n>.json`, which https://ui.perfetto.dev shows, and on CUDA
    `memory.pickle`, which https://pytorch.org/memory_viz shows.

    Args:
        dirpath: directory of the files.
        num_steps: number of training batches to record.
        warmup_steps: number of batches before.
    """

    def __init__(self, dirpath: str | Path, num_steps: int = 5, warmup_steps: int = 5) -> None:
        super().__init__()
        self.folder, self.num_steps, self.warmup_steps = Path(dirpath), num_steps, warmup_steps
        self._recorded = 0
        self._profile: profiler.profile | None = None
        self._open: dict[str, profiler.record_function] = {}

    @override
    def start(self, action_name: str) -> None:
        if action_name == "run_training_batch":
            self._recorded += 1
            if self._recorded == self.warmup_steps + 1:
                self._begin()
        if self._profile is not None:
            self._open[action_name] = profiler.record_function(action_name)
            self._open[action_name].__enter__()

    @override
    def stop(self, action_name: str) -> None:
        if action_name in self._open:
            self._open.pop(action_name).__exit__(None, None, None)
        if action_name == "run_training_batch" and self._recorded >= self.warmup_steps + self.num_steps:
            self._end()

    @override
    def teardown(self, stage: str | None) -> None:
        self._end()
        super().teardown(stage)

    def _begin(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history()
        self._profile = profiler.profile(profile_memory=True, record_shapes=True)
        self._profile.start()

    def _end(self) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        rank = int(os.environ.get("RANK", "0"))
        suffix = f"_rank{rank}" if rank else ""
        trace = self.folder / f"trace{suffix}.json"
        self._profile.export_chrome_trace(str(trace))
        self._profile = None
        self._open.clear()
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory{suffix}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
