"""Make a drawn case one that Lightning takes, and that the law speaks of under a strategy.

What is drawn independently can exclude each other: half an epoch of one batch, an early stopping that monitors a
validation without batches. Such a case would say nothing, so the part that does not fit gives way.
"""

from dataclasses import replace
from typing import Any

from . import metering
from .cases import Case, Net, Options, Spread
from .loading import eval_loader, is_paired, num_batches, train_loader
from .optimizers import MANUAL

CLIPS = ("own_clipping", "edits_gradients", "logs_in_hooks")
"""Peculiarities that take norms of gradients, which sparse ones don't have."""
SEVERAL = ("two", "sequential")
"""Loaders that are evaluated one after the other, so that keys end in the number of the loader."""
WHOLE_BATCHES = ("init_features", "each_step", "first_step", "removed_later", "on_submodule_of_children")
"""Hooks in a submodule that see chunks, where the step that reads what they kept has the whole batch."""

READY = ("iterable", "iterable_unsized", "batches", "no_batching")
"""Loaders that show nothing of their second batch before the first step."""
ROWS = {"one": 1, "row": 1, "vector2": 2, "vector3": 3, "class_weights": 3, "time_first": 3, "vector4": 4, "matrix4": 4}
"""Constants that a stream's first batch of so many samples makes look like samples."""

RANKED = ("auroc", "average_precision", "spearman")
"""Metrics that order scores: a sample drawn twice has equal ones in one batch, and not to the last bit in two."""
REPEATS = ("replacement", "weighted")
"""Loaders that draw a sample more than once."""


def settled(case: Case, spread: Spread) -> Case:
    """A case that is likely to run on one device, and that must be equal or refused under a strategy."""
    case = _as_the_law_says(_worth_comparing(case, spread), spread)
    case = _with_gradients_that_fit(_with_batches_of_ranks(case, spread))
    case = replace(case, options=_with_batches_enough(case, spread))
    return _with_a_monitor(_with_loaders(case))


def whole(case: Case, spread: Spread) -> Case:
    """What one device must do: with the global batches, where the case gives those of a rank."""
    if dict(spread.options).get("batch_size_is") != "per_device":
        return case
    num, loading = spread.num_processes, case.loading
    sizes = {name: getattr(loading, name) * num for name in ("batch_size", "eval_batch_size")}
    second = (loading.second[0], loading.second[1] * num)
    return replace(case, loading=replace(loading, second=second, **sizes))


def _as_the_law_says(case: Case, spread: Spread) -> Case:
    """Without what docs/law_1.md excludes."""
    net = case.net
    if case.loading.kind in REPEATS and any(log.value in RANKED for log in case.logs):
        case = replace(case, loading=replace(case.loading, kind="shuffle"))
    unweighted = "weight" in case.returns.train and is_paired(case.loading, True)  # the weight is one loader's
    case = replace(case, returns=replace(case.returns, train="tensor")) if unweighted else case
    if case.loading.kind in READY:
        num = min(case.loading.batch_size, case.loading.num)
        extras = tuple(name for name in case.batches.extras if ROWS.get(name) != num)
        case = replace(case, batches=replace(case.batches, extras=extras))
    if case.resume_after:  # an epoch that goes on does not begin, so that the layer trains
        net = _without(net, "frozen_batchnorm")
    if dict(spread.options).get("submodule") and net.hooks in WHOLE_BATCHES:
        net = replace(net, hooks="none")
    if not spread.is_of_ranks:
        return replace(case, net=net)
    if dict(spread.options).get("static_graph"):  # a promise, which torch refuses when a batch breaks it
        net = _without(net, "experts")
    # what ranks collect in lists of their own is not summed when the epoch ends; a batch that is skipped is an error
    net = _without(net, "skips_a_batch", *(name for name in net.peculiar if "collects" in name))
    # steps of evaluation, and metrics in steps, have rank 0's own value, or none
    by_epoch = [log.where == "eval" or log.value in metering.METRICS for log in case.logs]
    logs = tuple(
        replace(log, on_step=False, on_epoch=True) if only else log
        for log, only in zip(case.logs, by_epoch, strict=True)
    )
    # of these losses each has a part that is the batch's, so that the largest is no sample's
    # and with weights of samples a term that is the batch's has no share of its own
    if any(log.value in ("max", "min", "weighted_mean") for log in logs) or "weight" in case.returns.train:
        extras = tuple(name for name in case.batches.extras if name != "unlabelled")
        case = replace(case, batches=replace(case.batches, extras=extras))
    return replace(case, net=net, logs=logs)


def _worth_comparing(case: Case, spread: Spread) -> Case:
    """One device is compared with Lightning, the others with one device."""
    if spread.kind == "single_device":  # without what is Evener's own
        options = replace(case.options, exact_accumulation=False, detect_nonfinite="off")
        if options.precision == "64-true":  # in which Lightning turns a metric's states when it is logged again
            case = replace(case, dtype="float64")
        # a validation leaves our training's random streams as they were (docs/migrating.md)
        kind = "generator" if case.loading.kind == "shuffle" else case.loading.kind
        return replace(case, options=options, loading=replace(case.loading, kind=kind), resume_after=0)
    divides = case.optimization.optimizer.startswith(("ada", "ams", "nad", "rad", "rms"))
    if case.optimization.optimizer == "odd_closure" or (divides and "16" in case.options.precision):
        # Lightning refuses the one; the others divide a gradient of rounding errors by its own size
        case = replace(case, optimization=replace(case.optimization, optimizer="sgd"))
    if spread.kind == "model_parallel" and spread.devices > 2 and case.net.kind == "mlp":  # it has two parts
        case = replace(case, net=replace(case.net, kind="deep"))
    return case


def _with_batches_of_ranks(case: Case, spread: Spread) -> Case:
    """Loaders whose global batches one device can be given, where the case says those of a rank."""
    if dict(spread.options).get("batch_size_is") != "per_device":
        return case
    loading = replace(case.loading, drop_last=False)  # it drops a rank's incomplete batch
    if loading.kind in (*READY, "bucket"):  # no one device has as many
        loading = replace(loading, kind="plain")
    if loading.eval_kind in ("iterable", "batches"):  # whose batches are those of one device
        loading = replace(loading, eval_kind="plain")
    return replace(case, loading=loading, net=_without(case.net, "hparams"))


def _with_gradients_that_fit(case: Case) -> Case:
    """What optimizers and clipping take. L-BFGS in float64: its line search enlarges float32's last bits."""
    net, options, name = case.net, case.options, case.optimization.optimizer
    if "lbfgs" in name:
        case, options = replace(case, dtype="float64"), replace(options, precision="32-true")
    if name in MANUAL:
        options = replace(options, accumulate_grad_batches=1)
        case = replace(case, callbacks=tuple(one for one in case.callbacks if one not in ("accumulation", "swa")))
    if "accumulation" in case.callbacks:
        options = replace(options, accumulate_grad_batches=1)
    if name in MANUAL or "own_clipping" in net.peculiar:
        options = replace(options, gradient_clip_val=None, gradient_clip_algorithm="norm")
    dense = name != "sgd" or options.gradient_clip_val or any(one in net.peculiar for one in CLIPS)
    if "sparse" in net.peculiar and dense:
        net = _without(net, "sparse")
    return replace(case, net=net, options=options)


def _with_batches_enough(case: Case, spread: Spread) -> Options:
    """Limits that leave at least one batch."""
    options, given = case.options, whole(case, spread)
    trained = num_batches(train_loader(given))
    least = 0 if case.loading.eval_kind == "none" else min(num_batches(eval_loader(given)) or [0])
    if _is_nothing(options.limit_val_batches, least):
        options = replace(options, limit_val_batches=None)
    if trained is None:  # Lightning takes no fraction of it
        return replace(options, limit_train_batches=None, val_check_interval=None)
    first = trained[0] if options.overfit_batches == 0 else 1
    num = min(trained) if case.loading.kind == "min_size" else max(trained)
    if _is_nothing(options.limit_train_batches, min(first, *trained)):
        options = replace(options, limit_train_batches=None)
    num = 1 if options.overfit_batches else num
    limit: Any = options.limit_train_batches
    num = num if limit is None else int(num * limit) if isinstance(limit, float) else min(num, limit)
    every: Any = options.val_check_interval
    if _is_nothing(every, num) or (isinstance(every, int) and every > num):
        options = replace(options, val_check_interval=None)
    return options


def _is_nothing(fraction: Any, num: int) -> bool:
    """Whether a limit is a fraction of less than one batch."""
    return isinstance(fraction, float) and int(num * fraction) < 1


def _with_loaders(case: Case) -> Case:
    """Loaders for what runs before the training."""
    given_late = case.before in ("test", "predict") and case.loading.given_by == "module"
    if given_late or (case.before == "predict" and is_paired(case.loading, False)):
        return replace(case, before="validate")
    return case


def _with_a_monitor(case: Case) -> Case:
    """Callbacks and a scheduler whose value is logged."""
    if case.loading.eval_kind not in (*SEVERAL, "none") and case.options.limit_val_batches != 0:
        return case
    callbacks = tuple(name for name in case.callbacks if name not in ("early_stopping", "checkpoint_val"))
    plateau = case.optimization.scheduler == "plateau_val"
    optimization = replace(case.optimization, scheduler="plateau_train") if plateau else case.optimization
    return replace(case, callbacks=callbacks, optimization=optimization)


def _without(net: Net, *names: str) -> Net:
    return replace(net, peculiar=tuple(name for name in net.peculiar if name not in names))
