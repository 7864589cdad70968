"""The loop that people write with torch alone: on one device the reference that all others are compared with."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from .problem import Problem, Run


def reference(problem: Problem, seen: Sequence[list[list[int]]]) -> Problem:
    """One device: all samples of an optimizer step in one batch, each once.

    Args:
        seen: numbers of the samples of each batch of an epoch, by rank, in the order that a framework has chosen.
    """
    steps, done = [], set[int]()
    for first in range(0, max(map(len, seen)), problem.accumulate):
        parts = chain.from_iterable(batches[first : first + problem.accumulate] for batches in seen)
        steps.append([i for i in dict.fromkeys(chain.from_iterable(parts)) if i not in done])
        done.update(steps[-1])
    return replace(problem, ranks=1, accumulate=1, batches=[step for step in steps if step])


def train(run: Run) -> None:
    p = run.problem
    torch.manual_seed(p.seed)
    net, data = p.net().to(p.device), p.data()
    optimizer = p.optimizer(net.parameters())
    scheduler = p.schedule(optimizer) if p.schedule else None
    sampler, called = None, net
    if p.ranks > 1:
        dist.init_process_group("gloo")
        called, sampler = nn.parallel.DistributedDataParallel(net, **p.ddp), DistributedSampler(data, shuffle=p.shuffle)
    if p.batches:
        loader = DataLoader(data, batch_sampler=p.batches)
    else:
        loader = DataLoader(
            data, p.rank_batch, p.shuffle and sampler is None, sampler, num_workers=p.workers,
            pin_memory=p.device != "cpu",
        )  # fmt: skip
    total, steps = torch.zeros((), device=p.device), 0
    for epoch in range(p.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            batch = {key: value.to(p.device, non_blocking=True) for key, value in batch.items()}
            run.begin(batch)
            loss = p.loss(called, batch)
            optimizer.zero_grad()
            loss.backward()
            if p.clip:
                nn.utils.clip_grad_norm_(net.parameters(), p.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            total, steps = total + loss.detach(), steps + 1
    values = {}
    if p.validation and p.score:
        with torch.no_grad():
            values["val"] = torch.cat(
                [p.score(net, batch) for batch in DataLoader(p.validation(), p.batch_size)]
            ).mean()
    run.end(net, steps, **values)
    if p.ranks > 1:
        dist.destroy_process_group()
