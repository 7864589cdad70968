"""What strategy=model_parallel refuses before training, in one sentence."""

from functools import partial
from typing import Any

import pytest
import torch
from parity import FEATURES, Case, Net, assert_equal, baseline, fit, make_trainer, run
from torch import Tensor
from torch.utils.data import DataLoader

from evener.strategies import ConfigError, DataParallelStrategy, DDPStrategy, ModelParallelStrategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "half"}, "partition=half is not allowed. Give auto, manual or a list"),
        ({"partition": ["net.3"]}, r"Net has no module 'net\.3'; the nearest are net\.2"),
        ({"partition": ["net.2", "net.2"]}, "2 names for 2 stages. Give 1"),
        ({"num_microbatches": 0}, "num_microbatches=0 is not allowed. Give a whole number >= 1"),
        ({"num_microbatches": 1.5}, "num_microbatches=1.5 is not allowed. Give a whole number >= 1"),
        ({"output_device": "middle"}, "output_device=middle is not allowed. Give last or first"),
        ({"optimizer_copies": -1}, "optimizer_copies=-1 is not allowed. Give a number >= 0"),
        ({"loss_reduction": "sum"}, "model_parallel: loss_reduction is no longer there. Leave it out"),
        ({"profile_activations": True}, "Activations are no longer counted: set balance=time, or name the cut"),
    ],
)
def test_bad_options_are_refused_before_training(options: dict[str, Any], message: str) -> None:
    module = Net()
    with pytest.raises(ConfigError, match=message):
        fit(Case(), module, ModelParallelStrategy(**options))
    assert module.losses == []


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.* step flavor")
@pytest.mark.parametrize("step", ["training_step", "validation_step"])
@pytest.mark.parametrize(
    "strategy", [DDPStrategy, DataParallelStrategy, partial(ModelParallelStrategy, num_microbatches=2)]
)
def test_steps_that_read_their_own_batches_are_refused(strategy: Any, step: str) -> None:
    # Cause: without the loop's batch no share was read, so that ragged batches of ranks weighed the same.
    def reads(self: Any, dataloader_iter: Any) -> None:
        raise AssertionError("refused before")

    devices = 1 if strategy is DDPStrategy else 2
    with pytest.raises(ConfigError, match=rf"{step}\(dataloader_iter\) reads its own batches"):
        fit(Case(), type("Reads", (Net,), {step: reads})(), strategy(), devices=devices)


def test_sync_batchnorm_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_parallel: sync_batchnorm=True synchronizes processes"):
        make_trainer(Case(), ModelParallelStrategy(), devices=2, sync_batchnorm=True)


def test_a_batch_that_cannot_be_counted_is_refused() -> None:
    class Odd(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net[0].weight.sum()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            """Nothing to validate."""

    loader = torch.utils.data.DataLoader([{"a": None}] * 2, batch_size=None)
    trainer = make_trainer(Case(), ModelParallelStrategy(num_microbatches=2, global_view=False), devices=2)
    with pytest.raises(ConfigError, match=r"a batch of type dict has no samples to split.*define __len__ and split"):
        trainer.fit(Odd(), loader, loader)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.filterwarnings("ignore:The .* does not have many workers")
def test_what_cannot_be_cut_is_refused_in_a_first_batch_of_one_sample() -> None:
    # A first batch of one sample was a single micro-batch, and nothing was cut before the second step.
    class Described(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[:2], batch_idx)

    class Opaque:
        pass

    rows = torch.zeros(4, FEATURES)
    batches = [(rows[:1], rows[:1].sum(1).long(), Opaque()), (rows, rows.sum(1).long(), Opaque())]
    trainer = make_trainer(Case(), ModelParallelStrategy(num_microbatches=2, global_view=False))
    with pytest.raises(ConfigError, match=r"batch\[2\] is a Opaque, which can't be cut into chunks"):
        trainer.fit(Described(), DataLoader(batches, batch_size=None))
    assert trainer.global_step == 0


class RegistersForward(Net):
    """Registers a hook in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.register()
        return super().training_step(batch, batch_idx)

    def register(self) -> None:
        self.net[0].register_forward_hook(lambda layer, args, output: output * 1.5)


class RegistersOnAParameter(RegistersForward):
    def register(self) -> None:
        self.net[0].weight.register_hook(lambda gradient: gradient * 1.5)


@pytest.mark.parametrize("module", [RegistersForward, RegistersOnAParameter])
def test_a_step_that_registers_hooks_gets_whole_batches(module: type[Net]) -> None:
    """They were called once for each micro-batch that had registered one, and the weights were others."""
    case = Case(module)
    assert_equal(run(case, ModelParallelStrategy(num_microbatches=2), devices=2), baseline(case), 1e-10)


class RegistersOnce(Net):
    """Registers a hook in the first step, as an attribute says."""

    has_hook = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.has_hook:
            self.net[0].register_forward_hook(lambda layer, args, output: output * 1.5)
            self.has_hook = True
        return super().training_step(batch, batch_idx)


def test_a_hook_of_the_first_micro_batch_is_taken() -> None:
    case = Case(RegistersOnce)
    assert_equal(run(case, ModelParallelStrategy(num_microbatches=2), devices=2), baseline(case), 1e-10)
