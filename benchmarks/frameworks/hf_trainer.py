"""`transformers.Trainer`, with a model of one's own that returns its loss."""

from typing import Any

from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments, set_seed

from .problem import Run


class Model(nn.Module):
    """Divides by `num_items_in_batch`, as the library's own models do, where the problem is one of tokens."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.attempt, self.net = run, run.problem.net()
        self.accepts_loss_kwargs = run.problem.tokens

    def forward(self, x: Tensor, labels: Tensor, i: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        p, batch = self.attempt.problem, {"x": x, "labels": labels, "i": i}
        given = {"num": num_items_in_batch} if p.tokens and num_items_in_batch is not None else {}
        output = {"loss": p.loss(self.net, batch, **given)}
        if not self.training and p.score:
            self.attempt.validate(batch)
            output["values"] = p.score(self.net, batch)
        return output


class HFTrainer(Trainer):
    attempt: Run

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            self.attempt.begin(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


def train(run: Run) -> None:
    p = run.problem
    set_seed(p.seed)
    model = Model(run)
    optimizer = p.optimizer(model.parameters())
    args = TrainingArguments(
        output_dir=str(run.folder), use_cpu=p.device == "cpu", seed=p.seed, report_to="none", disable_tqdm=True,
        per_device_train_batch_size=p.rank_batch, per_device_eval_batch_size=p.rank_batch,
        gradient_accumulation_steps=p.accumulate, num_train_epochs=p.epochs, max_steps=p.max_steps,
        max_grad_norm=p.clip, lr_scheduler_type="constant",
        train_sampling_strategy="random" if p.shuffle else "sequential",
        save_strategy="steps" if p.save else "no", save_steps=1, remove_unused_columns=False, label_names=["labels"],
        dataloader_num_workers=p.workers, dataloader_pin_memory=p.device != "cpu", logging_steps=50,
        eval_strategy="steps" if p.validation else "no", eval_steps=1 / p.epochs / p.validations,
        ddp_find_unused_parameters=p.ddp.get("find_unused_parameters", False),
    )  # fmt: skip
    trainer = HFTrainer(
        model=model, args=args, train_dataset=p.data(), eval_dataset=p.validation() if p.validation else None,
        data_collator=default_collate, optimizers=(optimizer, p.schedule(optimizer) if p.schedule else None),
        compute_metrics=lambda found: {"val": found.predictions.mean()},
    )  # fmt: skip
    trainer.attempt = run
    trainer.train(resume_from_checkpoint=run.newest("checkpoint-*") is not None)
    values = [line["eval_val"] for line in trainer.state.log_history if "eval_val" in line]
    run.end(model.net, trainer.state.global_step, **({"val": values[-1]} if values else {}))
