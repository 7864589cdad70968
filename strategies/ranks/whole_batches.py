"""Compare steps on a few samples with one device's, and give whole batches to those that train otherwise in parts.

It is done as early as possible, since later less can be changed:

compared                                   where whole batches come from
training, before the module is wrapped     another gradient sync, with which the run begins anew
training, where an epoch or stream begins  the first rank, which computes all of them
training, in the first step of an epoch    nowhere: the module is refused
evaluation, after its first hooks          each rank, which evaluates all of them; of a stream the first rank
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

from ..batch.exact.comparison import StepComparison
from ..batch.exact.verdict import Plan, Views
from ..batch.exact.verifier import find_evaluated, verified
from ..batch.layout import GlobalView, WholeSteps, tell_whole
from ..batch.meeting import Alone, SimulatedRanks
from ..batch.results import weighs_in_loop
from ..batch.run_structures import chosen_loaders, num_evaluated
from ..core.errors import ConfigError, PartsDiffer
from ..core.module_checks import hooked, is_plain
from ..core.patching import Replacement
from ..core.rng import RandomState, random_state, set_random_state
from ..data.loaders import LoaderRole, goes_whole, verify_side_by_side
from ..data.streams import Divided, Stream
from ..distributed.objects import broadcast_object
from .gradient_sync import GradientSync

if TYPE_CHECKING:
    from .strategy import RankStrategy


class WholeBatches:
    """Which steps of a run get whole batches, and what has yet to be compared.

    Each rank evaluates all batches of the steps `of_ranks`; those `of_chunks` the devices of a rank don't cut.
    """

    def __init__(self, strategy: "RankStrategy", verifies: bool) -> None:
        self._strategy, self._verifies = strategy, verifies
        self.make_sync: Callable[[], GradientSync] | None = None
        """Makes what gives all ranks whole batches; None if they have these already, or are not to."""
        self.of_ranks, self.of_chunks = WholeSteps(), WholeSteps(strategy.strategy_name)
        self._is_open = False
        """Whether training is yet to be compared."""
        self.outside = set[str]()
        """Submodules whose parameters a step uses outside of their forward, and those that samples choose."""
        self._before: RandomState | None = None
        """The random state before training was first compared; None until then."""
        self._epoch: int | None = None
        """That of the last training step."""
        self._has_changed: Callable[[], bool] | None = None
        """Whether the step computes otherwise than when it was compared: on rank 0, or where all compute together."""
        self._evaluation: Any = None
        """The loop of an evaluation whose first hooks have run, until it ends."""
        self.seen_ranks: SimulatedRanks | None = None
        """What an evaluation sees in which each rank computes all batches."""
        self._loader: Any = None
        """What a loop of evaluation reads all batches from."""

    def allow(self, view: GlobalView, make: Callable[[bool], GradientSync], **others: bool) -> None:
        """Have steps see whole batches, or allow it; with one of `others` ranks compute all rows, not their own."""
        strategy = self._strategy
        strategy.global_view = view
        others |= {"recompute": strategy.recompute.is_on, "sync_batchnorm": strategy.syncs_batchnorm}
        if view is True and strategy.strategy_name not in ("ddp", "fsdp"):
            others = {"global_view": True}
        self.of_chunks = WholeSteps(strategy.strategy_name, "on the first device of each rank", view is not False)
        given = [name for name, is_given in others.items() if is_given]
        if view is True and given:
            raise ConfigError(
                f"{strategy.strategy_name}: global_view=true computes the whole batch as strategy=ddp or strategy=fsdp "
                f"with one device per process does. Leave out {', '.join(given)}."
            )
        if view is True:
            strategy.take_whole(make(True))
        elif view == "auto":
            self.make_sync = partial(make, not given)

    def begin_run(self, plans: list[Plan] | None) -> None:
        """Begin a run; `plans` say what its losses divide by, if that is known."""
        strategy = self._strategy
        self.of_ranks = WholeSteps(strategy.strategy_name, "no faster than one rank", self.of_chunks.allowed)
        has_parts = strategy.world_size > 1 or strategy.layout.cut_by or weighs_in_loop(strategy.trainer)
        self._is_open = plans is None and bool(has_parts)
        self._before = self._epoch = self._has_changed = self._evaluation = self.seen_ranks = self._loader = None

    def before_wrapping(self) -> None:
        """Compare training, unless that was done, before the module is wrapped or cut over the ranks."""
        self._strategy.sync.make_whole()
        if not self._is_open or self._before is not None:
            return
        self._before = before = random_state()
        self._is_open = False  # a stream that begins below is compared there
        loop = cast("Any", self._strategy.trainer.fit_loop)
        try:
            loop.setup_data()  # a stream without a length is read, so that its first batch is known
            if loop._should_reload_train_dl:  # an empty loader: the loop makes it again
                set_random_state(before)
            if self.make_sync is not None:  # else a module may weigh its loss itself
                verify_side_by_side(loop._combined_loader, self._strategy.strategy_name)
            self._compare((None, *self._rest), self._again(loop._combined_loader), is_placed=False)
        except PartsDiffer as exc:
            if self.make_sync is None:
                raise
            self._begin_anew(exc, self.make_sync, before)

    def _begin_anew(self, why: PartsDiffer, make_sync: Callable[[], GradientSync], before: RandomState) -> None:
        """Begin the run once more, with steps that get whole batches."""
        strategy, trainer = self._strategy, self._strategy.trainer
        set_random_state(before)  # loaders are made once more
        trainer.fit_loop._combined_loader = None  # of one rank's samples
        strategy.contract.end()
        if why.in_chunks:
            self.of_chunks.take("training_step", why)
        else:
            self.outside = why.outside
            strategy.take_whole(make_sync())
            if why.unused:
                strategy.sync.expect_unused()
            tell_whole(strategy.strategy_name, why, strategy.sync.computes_whole)
        strategy.begin_loaders()
        strategy.sync.begin_streams()
        strategy.contract.begin_run(trainer, None if why.in_chunks else why.plans)
        self._before = before

    @property
    def _compares_together(self) -> bool:
        """Whether parameters are cut, or without values before they are: all ranks compare steps, in the first one."""
        return self._strategy.sync.evaluates_together and not all(map(is_plain, self._strategy.module.parameters()))

    def _again(self, combined: Any) -> Collection[bool]:
        """See `verified`. Of a step that calls torch.distributed nothing is seen where all compare it together."""
        if not self._strategy.sync.evaluates_together or self._compares_together or combined is None:
            return True, False
        return (True, False) if any(isinstance(one, Stream) for one in combined.flattened) else (True,)

    @property
    def _rest(self) -> tuple[int, ...]:
        """Arguments of a training step after the batch."""
        return (0,) * is_param_in_hook_signature(self._strategy.module.training_step, "batch_idx", min_args=2)

    def begin_step(self, args: Sequence[Any]) -> None:
        """Compare training in an epoch's first step, if it was not compared, or computes otherwise by then."""
        before, self._epoch = self._epoch, self._strategy.module.current_epoch
        if self._epoch == before:
            return
        is_due = self._strategy.world_size > 1 and (before is not None or self._compares_together)
        if is_due and self._verifies and not self._is_open and "training_step" not in self.of_ranks.names:
            self._is_open = self._has_changed_anywhere(args[1:])
        while self._is_open:
            try:
                self._compare(args)
            except PartsDiffer as exc:
                if not exc.in_chunks:
                    raise
                self.of_chunks.take("training_step", exc)
                self._is_open = True  # as parts of ranks

    def _begin_pass(self) -> None:
        """Compare training where a stream begins, or an epoch whose step computes otherwise than before."""
        strategy, is_later = self._strategy, self._epoch not in (None, self._strategy.module.current_epoch)
        loop: Any = strategy.trainer.fit_loop
        sources = (getattr(one, "rank_batches", one) for one in loop._combined_loader.flattened)
        if strategy.world_size == 1 or not all(getattr(one, "is_whole", None) for one in sources):
            return  # what is yet to be compared is in the epoch's first step
        if is_later:
            self._epoch = strategy.module.current_epoch
            if self._verifies and not self._is_open and "training_step" not in self.of_ranks.names:
                self._is_open = self._has_changed_anywhere(self._rest)
        # what fails on a few samples before such hooks may not do so after them
        waits = any(hooked(name, strategy.trainer, by_user=True) for name in ("on_train_start", "on_train_epoch_start"))
        again = () if is_later else (True, False) if waits else (False,)
        while self._is_open and not (waits and self._compares_together and not is_later):
            try:
                self._compare((None, *self._rest), again)
                return
            except PartsDiffer as exc:
                is_whole = "training_step" in self.of_ranks.names
                (self.of_chunks if exc.in_chunks or is_whole else self.of_ranks).take("training_step", exc)
                # whole batches of ranks may be right, but not in chunks on the devices of the first
                self._is_open = bool(strategy.layout.cut_by) or "training_step" not in self.of_ranks.names
                if exc.unused:
                    strategy.sync.expect_unused()
                if exc.plans and weighs_in_loop(strategy.trainer):
                    strategy.contract.reader.take(exc.plans[0], strategy.module)

    def _has_changed_anywhere(self, rest: Sequence[Any]) -> bool:
        """Whether the step of training computes otherwise than when it was compared; all ranks call it."""
        strategy = self._strategy
        if self._compares_together and self._has_changed is None:
            comparison = StepComparison(strategy, together=True)
            self._has_changed = partial(strategy.sync.evaluate, partial(comparison.has_changed, rest))
        has_changed = self._has_changed is not None and self._has_changed()
        return has_changed if self._compares_together else broadcast_object(has_changed)

    def _compare(self, args: Sequence[Any], again: Collection[bool] = (), is_placed: bool = True) -> None:
        """Find by what losses divide, on rank 0 for all, or all together where the module is cut; see `verified`."""
        strategy, module, reader = self._strategy, self._strategy.module, self._strategy.contract.reader
        together = self._compares_together and is_placed
        if together:
            args = broadcast_object(move_data_to_device(args[0], "cpu")), *args[1:]
        of_ranks = strategy.world_size > 1 and "training_step" not in self.of_ranks.names
        find = partial(
            verified, strategy, Views(of_ranks, bool(strategy.layout.cut_by)), self._verifies, args,
            broadcast_object, strategy.global_rank == 0, again=again, together=together,
        )  # fmt: skip
        self._is_open = False
        found = strategy.sync.evaluate(find) if together else find()
        self.outside = found.outside
        self._has_changed = None if strategy.sync.evaluates_together else found.has_changed
        if found.waits(again):
            self._is_open = True
            return
        reader.values.learn("training_step", 0, found)
        if module.automatic_optimization:
            reader.take(found.plans[0], module)
        elif self._verifies and not all(plan.is_of_samples for plan in found.plans):
            raise PartsDiffer(
                f"{strategy.strategy_name}: in manual optimization ranks weight a loss by samples, and one is no mean "
                "over samples. Compute it in evener.over_batch(fn)(...), or set strategy.global_view=true."
            )
        if found.unused:
            strategy.sync.expect_unused()

    def begin_evaluation(self) -> None:
        """Begin an evaluation, whose step is compared once the hooks of its epoch's start have run."""
        loop: Any = self._strategy.trainer._evaluation_loop

        def compare() -> None:
            self._evaluation = loop
            if loop._combined_loader is not self._loader and not self.is_whole("evaluate"):
                return
            # each rank evaluates all batches, as if it were the only one, until the values of the epoch are known
            self.seen_ranks = Alone()
            _once(loop, "_on_evaluation_end", before=self.end_evaluation)
            self._strategy.contract.count_ranks(1)
            self._strategy.structures.lists.stay()
            set_random_state(broadcast_object(random_state()))
            if loop._combined_loader is not self._loader:
                loop._combined_loader = None
                loop.setup_data()
                self._loader = loop._combined_loader
            loop.reset()  # the first batches were perhaps read in parts

        _once(loop, "_on_evaluation_epoch_start", after=compare)

    def end_evaluation(self) -> None:
        """End an evaluation: from the hooks of its end on ranks see each other."""
        self._evaluation = None
        if self.seen_ranks is not None:
            self.seen_ranks = None
            self._strategy.contract.count_ranks(self._strategy.world_size)

    def is_whole(self, role: LoaderRole) -> bool | None:
        """See `RankBatches`. Of a stream all ranks have the first batch, on which its step is looked at."""
        if role == "train":
            self._begin_pass()
            return "training_step" in self.of_ranks.names or None
        trainer, predicts = self._strategy.trainer, role == "predict"
        step = "predict_step" if predicts else "test_step" if trainer.testing else "validation_step"
        loop: Any = trainer.predict_loop if predicts else trainer._evaluation_loop
        is_whole = not predicts and goes_whole(loop._combined_loader)
        if loop is trainer._active_loop and (predicts or loop is self._evaluation):
            for loader in range(num_evaluated(loop)):
                streams = [one for one in chosen_loaders(loop._combined_loader, loader) if isinstance(one, Divided)]
                if all(one.first_batch is not None for one in streams):
                    self._settle(step, loader, is_whole)
        return step in self.of_ranks.names or (None if predicts else is_whole)

    def _settle(self, step: str, loader: int, is_whole: bool) -> None:
        """Find how parts of a step's batches make what it logs; what they don't make gets whole ones."""
        strategy, together = self._strategy, self._strategy.sync.evaluates_together
        find = partial(find_evaluated, strategy, step=step, loader=loader, allowed=self.of_ranks.allowed)
        if not together:
            find = partial(find, share=broadcast_object, is_first=strategy.global_rank == 0)
        while True:
            of_ranks = strategy.world_size > 1 and not is_whole and step not in self.of_ranks.names
            views = Views(of_ranks, strategy.layout.cuts_evaluation(step))
            if not any(views):
                return
            try:
                strategy.sync.evaluate(partial(find, views=views, together=together))
            except PartsDiffer as exc:
                (self.of_chunks if exc.in_chunks or not of_ranks else self.of_ranks).take(step, exc)
            else:
                return


def _once(
    loop: Any, hooks: str, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> None:
    """Call a function before or after a loop calls hooks the next time."""

    def call(own: Callable[[], Any]) -> None:
        once.remove()
        before()
        own()
        after()

    once = Replacement(loop, hooks, call)
