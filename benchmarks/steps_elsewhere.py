"""The steps of `step_overhead.py` under Accelerate and Ignite, on one device."""

import importlib.util
import tempfile
from typing import Any

import torch
from tiny_step import LOG_EVERY, Net, StepTimer
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter


def accelerate(case: str, timer: StepTimer, loader: DataLoader[Any]) -> None:
    from accelerate import Accelerator
    from tqdm import tqdm

    typical = case == "typical"
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, log_with="tensorboard" if typical else None, project_dir=folder)
        if typical:
            accelerator.init_trackers("run")
        net: Any = Net()
        net, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-2), loader)
        total, num_samples = torch.zeros(()), 0
        for index, (inputs, targets) in enumerate(tqdm(batches) if typical else batches):
            timer.tick()
            loss = nn.functional.cross_entropy(net(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            if typical:
                total += loss.detach() * len(inputs)
                num_samples += len(inputs)
                if (index + 1) % LOG_EVERY == 0:
                    rate = optimizer.param_groups[0]["lr"]
                    accelerator.log({"loss": loss.item(), "scaled": loss.item() * 2, "lr": rate}, step=index)
        if typical:
            accelerator.log({"mean_loss": (total / num_samples).item()}, step=timer.steps)
            accelerator.save_state(folder + "/state")
            accelerator.end_training()


def ignite(case: str, timer: StepTimer, loader: DataLoader[Any]) -> None:
    from ignite.contrib.handlers import ProgressBar
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver
    from ignite.metrics import Average

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)

    def step(engine: Any, batch: Any) -> Any:
        timer.tick()
        loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    engine = Engine(step)
    if case == "bare":
        engine.run(loader, max_epochs=1)
        return
    with tempfile.TemporaryDirectory() as folder:
        ProgressBar().attach(engine)
        Average().attach(engine, "mean_loss")
        saver: Any = DiskSaver(folder, require_empty=False)
        engine.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"net": net}, saver))
        writer = SummaryWriter(folder)

        @engine.on(Events.ITERATION_COMPLETED(every=LOG_EVERY))
        def log(engine: Any) -> None:
            at = engine.state.iteration
            writer.add_scalar("loss", engine.state.output.item(), at)
            writer.add_scalar("scaled", engine.state.output.item() * 2, at)
            writer.add_scalar("lr", optimizer.param_groups[0]["lr"], at)

        engine.run(loader, max_epochs=1)
        writer.close()  # its thread still writes to the folder


INSTALLED = {
    name: run for name, run in {"accelerate": accelerate, "ignite": ignite}.items() if importlib.util.find_spec(name)
}
CASES = ("bare", "typical")
