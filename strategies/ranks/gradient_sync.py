"""Make the gradients of all ranks those of the global batch. A step knows nothing else of other ranks' gradients.

gradient sync   every rank holds              where
GradientSync    the whole module              here
ShardSync       a shard of every parameter    strategies/ranks/shard_sync.py
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..core.errors import ConfigError
from ..core.loop_contract import StepContract
from ..data.loaders import RankLoaders
from ..distributed.options import name_unused_parameters
from ..distributed.reduction import are_small, average_gradients
from ..distributed.same_weights import verify_same_layout
from ..distributed.wrapper import ReducedParameters, forward_through, unwrap, verify_reduced

if TYPE_CHECKING:
    from .strategy import RankStrategy


class GradientSync:
    """Averages gradients over the ranks by torch's DistributedDataParallel, which wraps the module.

    Args:
        hook: makes the state and the function of a communication hook.
    """

    evaluates_together = False
    """Whether a rank without samples runs evaluation steps, too, because the others' need it."""

    changes_update = False
    """Whether there is something to do around an optimizer's step."""

    def __init__(self, strategy: "RankStrategy", hook: Callable[[], tuple[Any, Any]] | None = None) -> None:
        self._strategy = strategy
        self._hook = hook
        self._trained: ReducedParameters | None = None
        self._recorded: nn.Module | None = None
        self._without_gradient: list[nn.Parameter] = []
        self._is_new = False

    loaders_of: Callable[..., RankLoaders] = RankLoaders
    """Makes what makes a rank's loaders."""

    def begin_streams(self) -> None:
        """Learn that random numbers are about to be drawn; each rank has its own."""

    @property
    def _wrapper(self) -> DistributedDataParallel | None:
        model = self._strategy._model
        return model if isinstance(model, DistributedDataParallel) else None

    def wrap(self, wrap: Callable[[], None]) -> None:
        """Wrap the module, as `wrap` does.

        Raises:
            ConfigError: it has no gradients, or not those that the other ranks' modules have.
        """
        strategy = self._strategy
        module = strategy.model
        assert module is not None
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(
                f"{strategy.strategy_name}: {type(strategy.module).__name__} has no parameter that requires a "
                "gradient, so there is nothing to average over ranks. Unfreeze one, or choose strategy=single_device."
            )
        if strategy.world_size == 1:  # there is nothing to average
            return
        verify_same_layout(strategy.module, strategy.strategy_name)
        self._trained = ReducedParameters(module)
        wrap()
        wrapper = self._wrapper
        assert wrapper is not None
        if self._hook is not None:
            wrapper.register_comm_hook(*self._hook())
        self._is_new = self._hook is None and are_small([parameter for _, parameter in self._trained.reduced])

    def expect_unused(self) -> None:
        """Wrap the module so that parameters may take no part in the loss, unless that was decided by an option."""
        options: dict[str, Any] = self._strategy._ddp_kwargs
        if options.keys().isdisjoint(("find_unused_parameters", "static_graph")):
            options["find_unused_parameters"] = True
            self.wrap_again()

    def wrap_again(self) -> None:
        """Wrap the parameters as they are now, and where they are."""
        wrapper = self._wrapper
        if wrapper is not None:
            self._strategy.model = unwrap(wrapper)
            self._strategy.configure_ddp()

    def begin_batch(self) -> None:
        """Learn that hooks of module and callbacks have seen the batch; they freeze and unfreeze layers."""
        trained = self._trained  # on all ranks alike
        if trained is not None and trained.changed(self._strategy.optimizers):
            self._reduce_left(trained.frozen())
            self.wrap_again()
            self._strategy.contract.agreement.begin(self._strategy.optimizers)
        if self._is_new:
            self._is_new, wrapper = False, self._wrapper
            assert wrapper is not None
            with suppress(RuntimeError):  # a callback has registered a hook of its own
                wrapper.register_comm_hook(wrapper.process_group, average_gradients)

    def _reduce_left(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients that frozen parameters have accumulated on each rank; reduced ones do not change."""
        strategy = self._strategy
        some = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        some = strategy.reduce(some.to(strategy.root_device), reduce_op="max").tolist()
        for parameter in (p for p, has_gradient in zip(parameters, some, strict=True) if has_gradient):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = strategy.reduce(gradient, reduce_op="mean")

    def train(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step."""
        wrapper = self._strategy._model
        if isinstance(wrapper, DistributedDataParallel):
            return forward_through(wrapper, step, *args, **kwargs)
        self.sync_buffers()
        return step(*args, **kwargs)

    def evaluate(self, step: Callable[[], Any]) -> Any:
        """Run a step of evaluation."""
        return step()

    def accumulating(self, seen: bool) -> AbstractContextManager[Any]:
        """Accumulate gradients inside the block without reducing them, where nobody sees the difference.

        `on_after_backward` sees the gradients of all ranks, and may change them. The wrapper records a static graph in
        its first backward pass, and fails if that does not reduce. Averaging a part of the accumulated gradients
        earlier does not change the average of their sum.

        Args:
            seen: whether `on_after_backward` is defined.
        """
        wrapper = self._wrapper
        if seen or wrapper is None:
            return nullcontext()
        if wrapper.static_graph and self._recorded is not wrapper:
            self._recorded = wrapper
            return nullcontext()
        return wrapper.no_sync()

    def begin_backward(self, loss: Tensor) -> None:
        """Learn that a weighted loss goes backward.

        Raises:
            ConfigError: `training_step` unfroze a parameter, too late to be reduced in this step.
        """
        strategy, trained = self._strategy, self._trained
        if trained is None:
            return
        if not strategy.module.automatic_optimization:
            # frozen since the forward (`toggle_optimizer`): the wrapper will give them zeros
            self._without_gradient = [p for p in trained.frozen() if p.grad is None]
        elif trained.unfrozen():
            raise ConfigError(
                f"{strategy.strategy_name}: a parameter was unfrozen within training_step, too late for its gradient "
                "to be reduced over the ranks. Unfreeze it in on_train_batch_start or on_train_epoch_start."
            )

    def finish_backward(self) -> None:
        """Complete the gradients after a backward pass."""
        wrapper = self._strategy._model
        is_wrapped = isinstance(wrapper, DistributedDataParallel)
        while self._without_gradient:  # hooks would see the zeros, and optimizers would step with them
            self._without_gradient.pop().grad = None
        if is_wrapped:
            verify_reduced(wrapper)
            if wrapper.gradient_as_bucket_view:  # last: the wrapper has new buckets after its first backward
                self._separate_from_buckets()

    def _separate_from_buckets(self) -> None:
        """Give parameters tensors of their own for gradients that are views of the wrapper's buckets.

        The wrapper keeps its views: what a hook writes by `p.grad.data = ...` would take them out of the buckets.
        """
        assert self._trained is not None
        for _, parameter in self._trained.reduced:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach()

    def updating(self) -> AbstractContextManager[Any]:
        """Step an optimizer inside the block."""
        return nullcontext()

    def sync_buffers(self) -> None:
        """Give all ranks the buffers of rank 0."""
        wrapper = self._wrapper
        if wrapper is not None and wrapper.will_sync_module_buffers():
            wrapper._sync_buffers()

    whole_gradients, restore_gradients = StepContract.whole_gradients, StepContract.restore_gradients

    def fail(self, exception: BaseException) -> None:
        """Name the parameters without a gradient in an error of the wrapper."""
        if self._wrapper is not None and self._trained is not None:
            name_unused_parameters(exception, self._trained.reduced)

    def ending(self) -> AbstractContextManager[Any]:
        """End the run inside the block."""
        self._trained = None
        return nullcontext()
