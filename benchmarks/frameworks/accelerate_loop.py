"""A loop with Accelerate, as its examples `gradient_accumulation.py` and `checkpointing.py` show it."""

from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from .problem import Run


def train(run: Run) -> None:
    p, options = run.problem, {}
    if p.strategy == "fsdp":
        from accelerate import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(
        cpu=p.device == "cpu", gradient_accumulation_steps=p.accumulate,
        kwargs_handlers=[DistributedDataParallelKwargs(**p.ddp)],
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True), **options,
    )  # fmt: skip
    set_seed(p.seed)
    net: Any = p.net()
    made = p.optimizer(net.parameters())
    loader: Any = DataLoader(
        p.data(), p.rank_batch, shuffle=p.shuffle, num_workers=p.workers, pin_memory=p.device != "cpu"
    )
    if p.early:  # one after the other, as the documentation of FSDP recommended once
        net = accelerator.prepare(net)
        optimizer, loader = accelerator.prepare(made, loader)
    else:
        net, optimizer, loader = accelerator.prepare(net, made, loader)
    scheduler: Any = accelerator.prepare(p.schedule(made)) if p.schedule else None
    called = accelerator.unwrap_model(net) if p.unwrapped else net
    steps, found = 0, run.newest("step_*")
    if found:
        accelerator.load_state(str(found[0]))
        steps = found[1]
    first, skip = divmod(steps * p.accumulate, len(loader)) if found else (0, 0)
    for epoch in range(first, p.epochs):
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skip) if skip and epoch == first else loader
        for batch in batches:
            if steps == p.max_steps:
                break
            run.begin(batch)
            with accelerator.accumulate(net):
                loss = p.loss(called, batch)
                accelerator.backward(loss)
                if p.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), p.clip)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
            if p.save and accelerator.sync_gradients:
                accelerator.save_state(str(run.folder / f"step_{steps}"))
    values = {}
    if p.validation and p.score:
        scores = []
        for batch in accelerator.prepare(DataLoader(p.validation(), p.rank_batch)):
            run.validate(batch)
            with torch.no_grad():
                scores.append(accelerator.gather_for_metrics(p.score(net, batch)))
        values["val"] = torch.cat(scores).mean()
    run.end(accelerator.unwrap_model(net), steps, **values)
    accelerator.end_training()
