"""The loop that people write with torch alone: on one device the reference that all others are compared with."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from .problem import Problem, Run


def reference(problem: Problem) -> Problem:
    """One device, all samples of an optimizer step in one batch."""
    return replace(problem, ranks=1, accumulate=1, batch_size=problem.batch_size * problem.accumulate)


def train(run: Run) -> None:
    p = run.problem
    torch.manual_seed(p.seed)
    net, data = p.net(), p.data()
    optimizer = p.optimizer(net.parameters())
    scheduler = p.schedule(optimizer) if p.schedule else None
    sampler, called = None, net
    if p.ranks > 1:
        dist.init_process_group("gloo")
        called, sampler = nn.parallel.DistributedDataParallel(net, **p.ddp), DistributedSampler(data, shuffle=p.shuffle)
    loader = DataLoader(
        data, p.rank_batch, shuffle=p.shuffle and sampler is None, sampler=sampler, num_workers=p.workers
    )
    total, steps = torch.zeros(()), 0
    for epoch in range(p.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
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
            values["val"] = torch.cat([p.score(net, batch) for batch in DataLoader(p.validation(), p.batch_size)]).mean()
    run.end(net, steps, **values)
    if p.ranks > 1:
        dist.destroy_process_group()
