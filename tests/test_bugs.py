"""Bugs that were found and fixed, each with its cause."""

import gc
import mmap
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from parity import Case, Net, assert_equal, baseline, run
from recording import SmallModule, loader
from regression import Net as Regression
from regression import Numbered, quiet_trainer
from tiny import quiet
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, default_collate

from evener.strategies import ConfigError, DataParallelStrategy, DDPStrategy
from evener.strategies.batch.results import ChunkLosses
from evener.trainer import compose
from evener.trainer.callbacks import RunSummary
from evener.trainer.checkpoint._loader_state import make_resumable, start_workers
from evener.trainer.job.run import Parts, fit, write_predictions


def test_a_batch_in_which_nothing_weighs_anything_has_a_loss() -> None:
    # The weights were divided by their sum: a rank whose micro-batches held only padding got 0/0, and NaN weights.
    losses = [torch.tensor(2.0), torch.tensor(4.0)]
    assert float(ChunkLosses(losses, [torch.tensor(0.0) for _ in range(2)]).combine(torch.device("cpu"))) == 3.0
    assert float(ChunkLosses(losses, [0.0, 0.0]).combine(torch.device("cpu"))) == 3.0
    assert float(ChunkLosses(losses, [torch.tensor(0.0), torch.tensor(5.0)]).combine(torch.device("cpu"))) == 4.0


def test_a_sampler_is_told_each_epoch_once() -> None:
    # The epoch was also set while the loaders were made, for the sake of a resumed run, in every run.
    class Told(RandomSampler):
        def __init__(self) -> None:
            super().__init__(range(22))
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    sampler = Told()
    quiet(max_epochs=2).fit(SmallModule(), DataLoader(loader().dataset, 4, sampler=sampler), loader())
    assert sampler.epochs == [0, 1]


def test_a_worker_whose_batch_cannot_be_pickled_ends() -> None:
    # Python's queue drops such an object with no more than a traceback, and training waited for it for ever.
    train: Any = DataLoader(list(range(4)), num_workers=1, collate_fn=lambda _: threading.Lock())
    with pytest.raises(RuntimeError, match=r"worker \(pid.* exited unexpectedly"):
        list(make_resumable(train, rank=0))


class OfOneProcess:
    """Garbage, once nobody has it, whose end in another process ends that, as a process group waits for its threads."""

    def __init__(self) -> None:
        self.own, self.pid = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            os._exit(3)


def test_a_forked_worker_leaves_the_garbage_of_its_rank_alone() -> None:
    # Found by `benchmarks/goodput.py`: a group that had lost a rank ended in a data worker, without end.
    loader: Any = DataLoader(Collecting(), num_workers=1, multiprocessing_context="fork")
    gc.disable()
    try:
        OfOneProcess()
        assert [int(batch) for batch in make_resumable(loader, rank=0)] == [0, 1]
    finally:
        gc.enable()


class Collecting(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def test_workers_of_an_iterator_that_is_garbage_end_in_order() -> None:
    # Ranks that have lost one leave it in a cycle. The collector ended its queues first: their pipes were closed twice
    # (QueueFeederThread: Bad file descriptor), and the rank waited 5 s for each worker before it killed that.
    own: Any = DataLoader(range(1), num_workers=2, multiprocessing_context="fork")
    iterator = start_workers(own, own._get_iterator)
    assert int(next(iterator)) == 0
    workers, iterator.cycle = iterator._workers, iterator
    del iterator
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0]


class Lost(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("a rank has died")


def test_workers_of_an_iterator_that_could_not_start_end_with_their_rank() -> None:
    # They outlive SIGTERM, by which Python ends children, and it then waits for them: the rank did not end.
    own: Any = DataLoader(range(1), sampler=Lost(), num_workers=2, multiprocessing_context="fork")
    others = multiprocessing.active_children()
    with pytest.raises(RuntimeError, match="a rank has died") as found:  # whose frames hold the iterator
        start_workers(own, own._get_iterator)
    workers: list[Any] = [one for one in multiprocessing.active_children() if one not in others]
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as a rank at its end
    for worker in workers:
        worker._popen.terminate()
        worker.join(60)
    signal.signal(signal.SIGCHLD, before)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2
    del found


_forks_that_hang = mmap.mmap(-1, 1)


def hang_in_fork() -> None:
    """Wait without end in a process that was just forked, where a test asks for it, as for a lock that nobody has."""
    if _forks_that_hang[0]:
        _forks_that_hang[0] -= 1
        threading.Event().wait()


os.register_at_fork(after_in_child=hang_in_fork)


def test_a_worker_that_does_not_come_out_of_its_fork_is_forked_again() -> None:
    # In 5 of 6,000 forks beside collectives (gloo, Python 3.11) the new process waited for Python's own lock of thread
    # states, which a thread of gloo had held in its parent: the rank waited for its batches without end.
    _forks_that_hang[0] = 2
    loader: Any = DataLoader(Collecting(), num_workers=2, multiprocessing_context="fork", timeout=20)
    assert [int(batch) for batch in make_resumable(loader, rank=0)] == [0, 1]
    assert _forks_that_hang[0] == 0


@pytest.mark.filterwarnings("ignore:Total length of")  # Lightning's own word on it
@pytest.mark.parametrize(("samples", "limit", "told"), [(3, None, "drop_last"), (3, 0, None), (4, None, None)])
def test_a_fit_without_a_batch_is_told(samples: int, limit: int | None, told: str | None) -> None:
    # Fewer samples than a batch, with drop_last: "fit finished", status 0, and the weights were the initial ones.
    module = SmallModule()
    batches = DataLoader(loader(samples).dataset, batch_size=4, drop_last=True)
    module.train_dataloader = lambda: batches
    module.val_dataloader = lambda: loader(4)
    trainer = quiet(limit_train_batches=limit)
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        fit(Parts(trainer, module, None, RunSummary()), compose(["test_after_fit=false"]), None)


def test_weights_alone_are_no_run_to_resume(tmp_path: Path) -> None:
    # Both ended in a KeyError with its traceback.
    module, weights, bare = SmallModule(), tmp_path / "weights.ckpt", tmp_path / "bare.ckpt"
    module.train_dataloader = module.val_dataloader = lambda: loader(4)
    trainer = quiet()
    trainer.fit(module)
    trainer.save_checkpoint(weights, weights_only=True)
    torch.save(module.state_dict(), bare)
    parts = Parts(quiet(), module, None, RunSummary())
    with pytest.raises(ConfigError, match=r"weights\.ckpt contains only weights .* Give another checkpoint; mode=test"):
        fit(parts, compose([]), str(weights))
    with pytest.raises(ConfigError, match=r"bare\.ckpt was not saved by a trainer: .*module\.load_state_dict"):
        quiet().fit(module, ckpt_path=str(bare), weights_only=True)


def test_predictions_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    # A full disk left half a file under its final name.
    trainer: Any = SimpleNamespace(is_global_zero=True)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        write_predictions(trainer, str(tmp_path), [torch.zeros(2), lambda: None])
    assert not (tmp_path / "predictions.pt").exists()
    path = write_predictions(trainer, str(tmp_path), [torch.ones(2)])
    assert torch.equal(torch.load(str(path), weights_only=True)[0], torch.ones(2))


class Reads(Regression):
    """Trains on the samples of one of several loaders, or beside what is not of samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["first"] if isinstance(batch, dict) else batch)[:3], batch_idx)


def with_boxes(lost: int, samples: list[Any]) -> list[Any]:
    """Samples and boxes, at first as many as samples by chance; from the second batch on some samples are lost."""
    is_first = int(samples[0][2]) < 2
    return [*default_collate(samples if is_first else samples[lost:]), torch.ones(2 if is_first else 5, 4)]


def _said_by_a_rank() -> list[str]:
    """What ends each of three fits."""
    read_together = {"first": DataLoader(Numbered(8), 4), "second": DataLoader(Numbered(7), 4)}
    whole, lossy = (DataLoader(Numbered(8), 4, collate_fn=partial(with_boxes, lost)) for lost in (0, 1))
    said = ["", "", ""]
    for number, batches in enumerate((read_together, whole, lossy)):
        strategy = DDPStrategy(batch_size_is="global", timeout_s=60, verify=False, global_view=False)
        try:
            quiet_trainer(strategy, 2).fit(Reads(), batches)
        except Exception as exc:  # noqa: BLE001  # of the other rank, where that was first
            said[number] = str(exc)
    return said


def test_a_rank_whose_loss_has_no_known_weight_is_refused() -> None:
    # It was weighed by the rank's part of the first loader's batch, whatever its part of the others' was, and by the
    # samples that were read, where the collate function had left some out.
    for unequal, whole, lossy in run_ranks(_said_by_a_rank, 2):
        assert "give the ranks unequal parts in step 2: 2 + 2 and " in unequal
        assert whole == ""
        assert "this rank has read 2 samples, but their batch has 1 rows" in lossy


class Wrapper(Net):
    """Takes over the layers and the forward of a module that is none of its own; has an empty container, too."""

    def __init__(self) -> None:
        super().__init__()
        inner, self.embeddings = Net(), nn.ModuleDict()
        self._modules.update(inner._modules)
        self.forward = inner.forward  # type: ignore[method-assign]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.forward.__self__.net is self.net  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)


def test_a_wrapper_that_has_taken_over_a_module_s_forward_runs_its_own_layers_in_a_replica() -> None:
    # The module itself was not copied: its forward ran the root's layers (terratorch). An empty ModuleDict is false, so
    # that the root's own stayed in the replica, whose attributes could not be refreshed (neuralforecast).
    case = Case(Wrapper)
    assert_equal(run(case, DataParallelStrategy(), devices=2), baseline(case), 1e-10)
