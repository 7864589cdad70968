"""Signals to a run: before the first step it ends at once; afterwards it saves, says so, and ends with their status."""

import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
from tiny import Tiny, quiet
from torch.utils.data import DataLoader

from evener.strategies import DDPStrategy
from evener.strategies.core.files import is_alive
from evener.strategies.distributed import processes
from evener.strategies.distributed.processes import ASK_TO_STOP
from evener.trainer import Trainer
from evener.trainer.checkpoint import Checkpoint
from evener.trainer.checkpoint._loader_state import make_resumable
from evener.trainer.job.log_file import Interrupted, graceful_stop


class Signalled(Tiny):
    """Sends itself a signal at a place."""

    def __init__(self, place: str, signum: int) -> None:
        super().__init__()
        self.place, self.signum = place, signum
        self.num_steps = 0

    def reach(self, place: str) -> None:
        if place == self.place:
            os.kill(os.getpid(), self.signum)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_steps += 1
        self.reach(f"step {self.trainer.global_step}")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.sanity_checking:
            self.reach("sanity check")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = int(self.trainer.estimated_stepping_batches)  # sets up the loaders, long before the first step
        self.reach("optimizers")
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=total)]


@pytest.fixture(autouse=True)
def signals_of_a_terminal() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in ASK_TO_STOP}
    fork_server.hear_signals()
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)  # Lightning ignores Ctrl-C after the first


def make_trainer(folder: Path, saver: Checkpoint | None = None, **options: Any) -> Trainer:
    return quiet(callbacks=[saver or Checkpoint(folder, interval_s=1e9)], max_epochs=2, **options)


def fit(trainer: Trainer, module: Signalled) -> None:
    loader = DataLoader(torch.arange(8.0)[:, None], 2)
    trainer.fit(module, loader, loader)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda signum: signum.name)
@pytest.mark.parametrize("place", ["optimizers", "sanity check", "step 2"])
def test_a_run_that_has_not_begun_ends_at_once_and_another_tells_what_it_saved(
    place: str, signum: signal.Signals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, trainer = Signalled(place, signum), make_trainer(tmp_path)
    with caplog.at_level(logging.INFO), pytest.raises(Interrupted) as raised, graceful_stop(trainer):
        fit(trainer, module)
    begun = place == "step 2"
    assert (raised.value.code, module.num_steps) == (128 + signum, 3 if begun else 0)
    told = f"Interrupted at step 3; saved {tmp_path}/last.ckpt; continue with resume=last"
    assert (told in caplog.text) == (tmp_path / "last.ckpt").exists() == begun
    assert "Received SIGTERM" not in caplog.text


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_script_saves_and_ends_with_the_signals_status(signum: signal.Signals, tmp_path: Path) -> None:
    # Found by `benchmarks/survival.py`: Ctrl-C raised at once, and everything since the last save was lost.
    before = signal.getsignal(signum)
    with pytest.raises(SystemExit) as raised:
        fit(make_trainer(tmp_path), Signalled("step 2", signum))
    is_ctrl_c = signum == signal.SIGINT  # after which Lightning ends with its own status, and ignores the next one
    assert raised.value.code == (1 if is_ctrl_c else 128 + signum)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3
    assert is_ctrl_c or signal.getsignal(signum) == before


@pytest.mark.parametrize("place", ["optimizers", "sanity check", "nothing saves", "twice"])
def test_ctrl_c_in_a_script_ends_it_at_once(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, trainer = Signalled({"nothing saves": "step 2"}.get(place, place), signal.SIGINT), make_trainer(tmp_path)
    if place == "nothing saves":
        trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, Checkpoint)]
    if place == "twice":
        monkeypatch.setattr(processes, "ONE_REQUEST_S", -1.0)
        module.place = "step 2"
        module.on_before_zero_grad = lambda _: module.reach(f"step {trainer.global_step}")  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        fit(trainer, module)
    assert module.num_steps == (0 if place in ("optimizers", "sanity check") else 3)
    assert not (tmp_path / "last.ckpt").exists()


def test_a_scripts_own_handler_is_kept_and_one_that_outlives_its_terminal_does_not_hear_it_close(
    tmp_path: Path,
) -> None:
    received: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: received.append(signum))
    fit(make_trainer(tmp_path), Signalled("step 2", signal.SIGUSR1))
    assert received == [signal.SIGUSR1]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    trainer, module = make_trainer(tmp_path), Signalled("step 2", signal.SIGHUP)
    with graceful_stop(trainer):
        fit(trainer, module)
    assert module.num_steps == 8


def test_micro_batches_since_the_last_save_are_saved_too(tmp_path: Path) -> None:
    """Found by `benchmarks/survival.py`: what was saved at the same optimizer step was taken for up to date."""
    trainer = make_trainer(tmp_path, Checkpoint(tmp_path, every_n_steps=1), accumulate_grad_batches=2)
    module = Signalled("batch 3", signal.SIGTERM)
    module.on_train_batch_start = lambda batch, batch_idx: module.reach(f"batch {module.num_steps + 1}")  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        fit(trainer, module)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 1
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"] == 3


class SlowFirst(Signalled):
    """Rank 0 takes longer for its validation than rank 1, which gets the signal in its first batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/mean", batch.mean(), sync_dist=True)
        if self.trainer.sanity_checking:
            return
        if self.global_rank:
            self.reach(f"batch {batch_idx}")
        else:
            time.sleep(0.5)


@pytest.mark.long
def test_a_rank_stops_in_a_validation_that_another_has_ended(tmp_path: Path) -> None:
    """Found by `benchmarks/survival.py`: at its end the other one waited for values of the one that had stopped."""
    trainer = make_trainer(tmp_path, strategy=DDPStrategy(timeout_s=120), devices=2)
    loader = DataLoader(torch.arange(24.0)[:, None], 2)
    with pytest.raises(SystemExit) as raised:
        trainer.fit(SlowFirst("batch 0", signal.SIGTERM), loader, loader)
    assert raised.value.code == 128 + signal.SIGTERM
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["exact_resume"]["point"] == "before_validation"


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Loads long enough that a worker is in the middle of it when signals arrive."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.tensor([float(index)])


class ToAll(Signalled):
    """Sends the signal to all of its processes, as SLURM, systemd and terminals do."""

    def reach(self, place: str) -> None:
        if place == self.place:
            # not from here, as a parent's own is special: torch's workers take a signal of their parent for its end
            pids = [str(process.pid) for process in multiprocessing.active_children()]
            subprocess.run(["kill", f"-{self.signum}", *pids, str(os.getpid())], check=True)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda signum: signum.name)
def test_data_workers_outlive_a_signal_to_all_processes(signum: signal.Signals, tmp_path: Path) -> None:
    """Found by `benchmarks/survival.py`: a worker that SIGTERM had ended took its rank along before that could save."""
    loader = DataLoader(Slow(), 1, num_workers=2, multiprocessing_context="fork")
    with pytest.raises(SystemExit):
        make_trainer(tmp_path).fit(ToAll("step 2", signum), loader, DataLoader(Slow(), 8))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3
    del loader
    gc.collect()
    assert multiprocessing.active_children() == []


def orphan(worker_pid: Path, method: str) -> None:
    """Be a rank that is killed while its data worker starts."""
    loader = DataLoader(
        Slow(), 1, num_workers=1, multiprocessing_context=method, worker_init_fn=partial(late, worker_pid)
    )
    batches = iter(make_resumable(loader, 0))
    time.sleep(300)
    next(batches)


def late(worker_pid: Path, worker_id: int) -> None:
    rank = multiprocessing.parent_process()  # a fork server, which starts workers too, lives on for them
    assert rank is not None
    assert rank.pid is not None
    worker_pid.write_text(str(os.getpid()))
    os.kill(rank.pid, signal.SIGKILL)
    while os.getppid() == rank.pid or rank.is_alive():
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize(("rank_method", "method"), [("fork", "fork"), ("spawn", "forkserver")])
def test_a_data_worker_ends_with_a_rank_that_is_killed_while_it_starts(
    rank_method: str, method: str, tmp_path: Path
) -> None:
    """Found by `benchmarks/survival.py`: torch's worker took the process that adopted it for its parent."""
    rank = multiprocessing.get_context(rank_method).Process(target=orphan, args=(tmp_path / "pid", method))
    rank.start()
    rank.join(timeout=300)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(pid)
