"""An engine of Ignite, with its helpers for ranks, accumulation, determinism and checkpoints."""

from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Average
from ignite.utils import manual_seed

from .problem import Batch, Run


def train(run: Run) -> None:
    p = run.problem
    if p.ranks > 1:
        idist.initialize("gloo")
    manual_seed(p.seed)
    plain, data = p.net(), p.data()
    net = idist.auto_model(plain, **p.ddp)
    optimizer = idist.auto_optim(p.optimizer(plain.parameters()))
    loader = idist.auto_dataloader(data, batch_size=p.batch_size, shuffle=p.shuffle, num_workers=p.workers)

    def prepare(batch: Batch, **_: Any) -> tuple[Batch, Batch]:
        run.begin(batch)
        return batch, batch

    def loss_of(model: Any, batch: Batch) -> torch.Tensor:
        return p.loss(plain if p.unwrapped else model, batch)

    engine = create_supervised_trainer(
        net, optimizer, lambda loss, _: loss, prepare_batch=prepare, model_fn=loss_of,
        gradient_accumulation_steps=p.accumulate, deterministic=True,
    )  # fmt: skip
    if p.schedule:
        scheduler = p.schedule(optimizer)
        engine.add_event_handler(Events.ITERATION_COMPLETED(every=p.accumulate), lambda: scheduler.step())
    if p.save:
        objects = {"engine": engine, "net": plain, "optimizer": optimizer}
        if found := run.newest("*step_*.pt"):
            Checkpoint.load_objects(objects, torch.load(found[0], weights_only=False))
        saver = Checkpoint(objects, DiskSaver(str(run.folder), require_empty=False), "step", n_saved=None)
        engine.add_event_handler(Events.ITERATION_COMPLETED, saver)
    engine.run(loader, max_epochs=p.epochs)
    values = {}
    if p.validation and p.score:
        values["val"] = evaluate(run, net)
    run.end(plain, engine.state.iteration // p.accumulate, **values)
    if p.ranks > 1:
        idist.finalize()


def evaluate(run: Run, net: Any) -> float:
    def score(engine: Any, batch: Batch) -> torch.Tensor:
        run.validate(batch)
        with torch.no_grad():
            return run.problem.score(net, batch)[:, None]  # type: ignore[misc]

    evaluator = Engine(score)
    Average().attach(evaluator, "val")
    data: Any = run.problem.validation()  # type: ignore[misc]
    evaluator.run(idist.auto_dataloader(data, batch_size=run.problem.batch_size))
    return float(evaluator.state.metrics["val"])
