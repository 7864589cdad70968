"""Make the gradients of all ranks those of the global batch. A step knows nothing else of other ranks' gradients.

torch's wrapper reduces the parameters that required gradients when it was created. One unfrozen later would be trained
by each rank separately, and the wrapper would wait for one frozen later.

gradient sync   every rank holds              where
GradientSync    the whole module              here
ShardSync       a shard of every parameter    strategies/ranks/shard_sync.py
WholeBatch      the whole module and batch    strategies/ranks/global_view
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..batch.meeting import SimulatedRanks
from ..core.errors import ConfigError
from ..core.loop_contract import StepContract
from ..core.patching import replaced
from ..distributed.objects import verify_same_layout
from ..distributed.wrapper import name_unused_parameters

if TYPE_CHECKING:
    from .strategy import RankStrategy

_IS_TRAINED = attrgetter("requires_grad")


class GradientSync:
    """Averages gradients by torch's DistributedDataParallel; `hook` makes the arguments of `register_comm_hook`."""

    evaluates_together = False
    """Whether a rank without samples runs evaluation steps, too, because the others' need it."""
    changes_evaluation = changes_update = False
    """Whether there is something to do around a step of evaluation, and around an optimizer's."""
    seen_ranks: SimulatedRanks | None = None
    """The ranks that a run sees, where they are not those that train together."""
    computes_whole = ""
    """How ranks compute whole batches, for the log."""

    def __init__(self, strategy: "RankStrategy", hook: Callable[[], tuple[Any, Any]] | None = None) -> None:
        self._strategy, self._hook = strategy, hook
        self._reduced, self._frozen = list[tuple[str, nn.Parameter]](), list[nn.Parameter]()
        """The parameters when the module was wrapped: those that were trained, in the wrapper's order, and others."""
        self._num_optimized: list[int] = []
        self._recorded: nn.Module | None = None
        self._without_gradient: list[nn.Parameter] = []
        self._accumulated: list[tuple[nn.Parameter, Tensor]] | None = None
        """Gradients of the optimizer step's earlier batches, apart from this one's, which may be computed again."""

    def begin_streams(self) -> None:
        """Learn that random numbers are about to be drawn; each rank has its own."""

    def make_whole(self) -> None:
        """Put a module together that an evaluation has cut: steps of training are compared with whole parameters."""

    @property
    def _wrapper(self) -> DistributedDataParallel | None:
        model = self._strategy._model
        return model if isinstance(model, DistributedDataParallel) else None

    def wrap(self, wrap: Callable[[], None]) -> None:
        """Wrap the module, as `wrap` does; refuse one that has no gradients, or not those of the other ranks'."""
        strategy = self._strategy
        module = strategy.model
        assert module is not None
        if not any(map(_IS_TRAINED, module.parameters())):
            raise ConfigError(
                f"{strategy.strategy_name}: {type(strategy.module).__name__} has no parameter that requires a "
                "gradient, so there is nothing to average over ranks. Unfreeze one, or choose strategy=single_device."
            )
        if strategy.world_size == 1:  # there is nothing to average
            return
        verify_same_layout(strategy.module, strategy.strategy_name)
        named = list(module.named_parameters())
        self._reduced = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._frozen = [parameter for _, parameter in named if not parameter.requires_grad]
        wrap()
        wrapper = self._wrapper
        if self._hook is not None and wrapper is not None:
            wrapper.register_comm_hook(*self._hook())

    def expect_unused(self) -> None:
        """Wrap the module so that parameters may take no part in the loss, unless that was decided by an option."""
        options: dict[str, Any] = self._strategy._ddp_kwargs
        if options.keys().isdisjoint(("find_unused_parameters", "static_graph")):
            options["find_unused_parameters"] = True
            self.wrap_again()

    def wrap_again(self) -> None:
        """Wrap the parameters as they are now, and where they are."""
        if self.unwrap():
            self._strategy.configure_ddp()

    def unwrap(self) -> bool:
        """Take the module out of its wrapper, if it has one."""
        wrapper: Any = self._wrapper
        if wrapper is None:
            return False
        wrapper.reducer = wrapper.logger = None  # they keep hooks on the parameters as long as they exist
        self._strategy.model = wrapper.module
        return True

    def begin_batch(self) -> None:
        """Learn that hooks of module and callbacks have seen the batch; they freeze, unfreeze and add layers."""
        if self._wrapper is not None and self._has_changed():
            self.wrap_again()
            self._strategy.contract.agreement.begin(self._strategy.optimizers)

    def _has_changed(self) -> bool:
        """Whether a parameter was frozen, unfrozen, or given to an optimizer after the module was wrapped."""
        if any(map(_IS_TRAINED, self._frozen)) or not all(one.requires_grad for _, one in self._reduced):
            return True
        groups = [group["params"] for optimizer in self._strategy.optimizers for group in optimizer.param_groups]
        before, self._num_optimized = self._num_optimized, list(map(len, groups))
        if before == self._num_optimized:
            return False
        known = {id(one) for one in (*self._frozen, *(one for _, one in self._reduced))}
        return any(id(parameter) not in known for group in groups for parameter in group)

    def train(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step."""
        wrapper = self._wrapper
        if wrapper is None:
            return step(*args, **kwargs)
        args, kwargs = wrapper._pre_forward(*args, **kwargs)
        if wrapper.mixed_precision is not None:
            wrapper._root_copy_hook()  # a hook of the module's forward
        with wrapper._inside_ddp_forward():  # in which the step may call the module itself
            output = step(*args, **kwargs)
        if self._strategy.module.automatic_optimization:
            return wrapper._post_forward(output)
        with replaced(wrapper, "require_backward_grad_sync", False):  # each `manual_backward` prepares a reduction
            return wrapper._post_forward(output)

    def evaluate(self, step: Callable[[], Any]) -> Any:
        """Run a step of evaluation."""
        return step()

    def accumulating(self, seen: bool) -> AbstractContextManager[Any]:
        """Accumulate gradients inside the block without reducing them, unless `on_after_backward` has `seen` them.

        A static graph is recorded in the wrapper's first backward pass, which must reduce.
        """
        wrapper = self._wrapper
        records = wrapper is not None and wrapper.static_graph and self._recorded is not wrapper
        self._recorded = wrapper if records and not seen else self._recorded
        reduces = seen or records or self._strategy.group.survivor is not None  # what one has alone dies with it
        return nullcontext() if wrapper is None or reduces else wrapper.no_sync()

    def begin_backward(self, loss: Tensor) -> None:
        """Learn that a weighted loss goes backward; refuse parameters that `training_step` unfroze, too late for it."""
        strategy = self._strategy
        if strategy.group.survivor is not None and strategy.trainer.accumulate_grad_batches > 1:
            self._accumulated = [(p, p.grad) for p in strategy.module.parameters() if p.grad is not None]
            for parameter, _ in self._accumulated:
                parameter.grad = None
        if self._wrapper is None:
            return
        if not strategy.module.automatic_optimization:
            # frozen since the forward (`toggle_optimizer`): the wrapper will give them zeros
            self._without_gradient = [p for _, p in self._reduced if not p.requires_grad and p.grad is None]
        elif any(map(_IS_TRAINED, self._frozen)):
            raise ConfigError(
                f"{strategy.strategy_name}: a parameter was unfrozen within training_step, too late for its gradient "
                "to be reduced over the ranks. Unfreeze it in on_train_batch_start or on_train_epoch_start."
            )

    def finish_backward(self) -> None:
        """Complete the gradients after a backward pass."""
        wrapper = self._wrapper
        while self._without_gradient:  # hooks would see the zeros, and optimizers would step with them
            self._without_gradient.pop().grad = None
        if wrapper is not None:
            if wrapper.require_backward_grad_sync:  # what the next forward begins with, an error of unused parameters
                wrapper.reducer._rebuild_buckets()
            # last: the wrapper has new buckets after its first backward
            for _, parameter in self._reduced if wrapper.gradient_as_bucket_view else ():
                if parameter.grad is not None:  # a view, where a hook's `p.grad.data = ...` would leave its own
                    parameter.grad = parameter.grad.detach()
        for parameter, before in self._accumulated or ():
            parameter.grad = before if parameter.grad is None else before + parameter.grad

    def settle(self) -> None:
        """Learn that the gradients of a batch count."""
        self._accumulated = None

    def give_up(self) -> None:
        """Give up the gradients of a batch that is computed again, if there are any."""
        for parameter in () if self._accumulated is None else self._strategy.module.parameters():
            parameter.grad = None
        for parameter, before in self._accumulated or ():
            parameter.grad = before
        self._accumulated = None

    def updating(self) -> AbstractContextManager[Any]:
        """Step an optimizer inside the block."""
        return nullcontext()

    def sync_buffers(self) -> None:
        """Give all ranks the buffers of rank 0."""
        wrapper = self._wrapper
        if wrapper is not None and wrapper.will_sync_module_buffers():
            wrapper._sync_buffers()

    def whole_tree(self, tree: Any) -> Any:
        """Gather what a structure holds of tensors of which each rank has some rows; every rank calls it."""
        return tree

    whole_gradients, restore_gradients = StepContract.whole_gradients, StepContract.restore_gradients

    def fail(self, exception: BaseException) -> None:
        """Name the parameters without a gradient in an error of the wrapper."""
        if self._wrapper is not None:
            name_unused_parameters(exception, self._reduced, self._strategy.strategy_name)

    def ending(self) -> AbstractContextManager[Any]:
        """End the run inside the block."""
        return nullcontext()
