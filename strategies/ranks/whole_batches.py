"""Compare steps on a few samples with one device's, and give whole batches to those that train otherwise in parts.

It is done as early as possible, since later less can be changed:

compared                                  where whole batches come from
training, before the module is wrapped    another gradient sync, with which the run begins anew
training, when a stream begins            the first rank, which takes them whole
training, after an epoch's first hooks    the first rank; in later epochs if other operations run
training, in the first step               nowhere: the module is refused
evaluation, after its first hooks         each rank, which evaluates all of them
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

from ..batch.exact.cuts import MOST_SAMPLES
from ..batch.exact.step_comparison import StepComparison
from ..batch.exact.verdict import Plan, Views
from ..batch.exact.verifier import find_evaluated, verified
from ..batch.layout import GlobalView, WholeSteps, tell_whole
from ..batch.meeting import Alone, SimulatedRanks
from ..batch.results import weighs_in_loop
from ..batch.run_structures import FewSamples, chosen_loaders, num_evaluated
from ..core.errors import ConfigError, PartsDiffer
from ..core.module_checks import is_plain
from ..core.patching import Replacement
from ..core.rng import RandomState, isolated, random_state, set_random_state
from ..data.loaders import LoaderRole, goes_whole, verify_side_by_side
from ..data.streams import Divided
from ..distributed.objects import broadcast_object
from .gradient_sync import GradientSync

if TYPE_CHECKING:
    from .strategy import RankStrategy


class WholeBatches:
    """Which steps of a run get whole batches, and what has yet to be compared.

    The first rank computes batches of the steps `of_ranks`; those `of_chunks` the devices of a rank don't cut.
    """

    def __init__(self, strategy: "RankStrategy", verifies: bool) -> None:
        self._strategy, self._verifies = strategy, verifies
        self.make_sync: Callable[[], GradientSync] | None = None
        """Makes what gives all ranks whole batches; None if they have these already, or are not to."""
        self.of_ranks, self.of_chunks = WholeSteps(), WholeSteps(strategy.strategy_name)
        self.is_open = False
        """Whether training is yet to be compared."""
        self.uneven, self.outside = set[str](), set[str]()
        """Submodules that ranks may call unevenly, and those whose parameters a step uses outside of their forward."""
        self._before: RandomState | None = None
        """The random state before training was first compared; None until then."""
        self._samples: FewSamples | None = None
        """What all ranks compute together, where they do."""
        self.evaluation: Any = None
        """The loop of an evaluation whose first hooks have run, until it ends."""
        self.seen_ranks: SimulatedRanks | None = None
        """What an evaluation sees in which each rank computes all batches."""
        self._loader: Any = None
        """What a loop of evaluation reads all batches from."""
        self._epochs: Replacement | None = None
        self._has_changed: Callable[[], bool] | None = None
        """Whether the step computes otherwise than when it was compared: on rank 0, or where all compute together."""

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
        self.is_open = plans is None and bool(has_parts)
        self._before = self._samples = self.evaluation = self._has_changed = self.seen_ranks = self._loader = None

    def before_wrapping(self) -> None:
        """Compare training, unless that was done, before the module is wrapped or cut over the ranks."""
        self._strategy.sync.make_whole()
        if not self.is_open or self._before is not None:
            return
        self._before = before = random_state()
        try:
            self._compare_early(before)
        except PartsDiffer as exc:
            if self.make_sync is None:
                raise
            self._begin_anew(exc, self.make_sync, before)

    def _compare_early(self, before: RandomState) -> None:
        sync, loop = self._strategy.sync, cast("Any", self._strategy.trainer.fit_loop)
        loop.setup_data()  # a stream that is read begins, and is compared
        combined = loop._combined_loader
        if loop._should_reload_train_dl:  # an empty loader: the loop makes it again
            set_random_state(before)
        if self.make_sync is not None:  # else a module may weigh its loss itself
            verify_side_by_side(combined, self._strategy.strategy_name)
        if not self.is_open:
            return
        if sync.evaluates_together and combined is not None:
            for loader in combined.flattened:  # in the first step it is too late
                if (look_ahead := getattr(loader, "look_ahead", None)) is not None:
                    look_ahead()
            self._choose_samples()
        # once it is cut all ranks compute a step, which shows nothing of one that calls torch.distributed
        both = not sync.evaluates_together or self.compares_together
        self._compare(again=(True, False) if both else (True,))

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
    def compares_together(self) -> bool:
        """Whether parameters are cut, or without values before they are: all ranks compare steps, in the first one."""
        return self._strategy.sync.evaluates_together and not all(map(is_plain, self._strategy.module.parameters()))

    def _choose_samples(self) -> None:
        """Choose the samples that all ranks compute together, if they do."""
        if self.compares_together and self._samples is None:
            with suppress(Exception):  # samples can't be chosen
                module, loop = self._strategy.module, self._strategy.trainer.fit_loop
                self._samples = FewSamples(module, loop, 0, MOST_SAMPLES, share=broadcast_object)

    def begin_training(self) -> None:
        """Compare training after the hooks of an epoch's start, where it was not yet, or computes otherwise by then."""
        loop: Any = self._strategy.trainer.fit_loop
        begins = True

        def compare(start: Callable[[], Any]) -> None:
            nonlocal begins
            start()
            is_first, begins = begins, False
            sources = (getattr(one, "rank_batches", one) for one in loop._combined_loader.flattened)
            can_be_whole = all(getattr(one, "is_whole", None) for one in sources)
            if (is_first and loop.epoch_loop.batch_progress.current.ready) or not can_be_whole:
                return  # what is yet to be compared is in the first step, which refuses what needs whole batches
            was_open = self.is_open
            has_changed = (not is_first or self.compares_together) and not was_open and self._has_changed_anywhere()
            self.is_open = was_open or has_changed
            if not self.is_open:
                return
            self._choose_samples()
            # if it fails on a few samples once more whole batches are right in any case
            self._settle("training_step", None, partial(self._compare_placed, (), (False,)))
            self.is_open = self.is_open and was_open
            if is_first and "training_step" in self.of_ranks.names:  # the first batches were perhaps read in parts
                assert self._before is not None
                with isolated(state=self._before):
                    iter(loop._data_fetcher)

        if self._strategy.world_size > 1:
            self.end()
            self._epochs = Replacement(loop, "on_advance_start", compare)

    def _has_changed_anywhere(self) -> bool:
        """Whether the step of training computes otherwise than when it was compared; all ranks call it."""
        if "training_step" in self.of_ranks.names or not self._verifies:
            return False
        if not self.compares_together:
            return broadcast_object(self._has_changed is not None and self._has_changed())
        if self._has_changed is None:
            self._choose_samples()
            if self._samples is None:
                return False
            structure = self._strategy.structures.of_batch(self._strategy.trainer)
            comparison = StepComparison(self._strategy, structure, together=True, samples=self._samples)
            self._has_changed = partial(self._strategy.sync.evaluate, partial(comparison.has_changed, self._rest))
        return self._has_changed()

    @property
    def _rest(self) -> tuple[int, ...]:
        """Arguments of a training step after the batch."""
        return (0,) * is_param_in_hook_signature(self._strategy.module.training_step, "batch_idx", min_args=2)

    def end(self) -> None:
        """End a run's training."""
        if self._epochs is not None:
            self._epochs.remove()
        self._epochs = None

    def in_step(self, args: Sequence[Any]) -> None:
        """Compare training in its first step, which has these arguments."""
        self._compare_placed(args)
        self._samples = None

    def _compare_placed(
        self, args: Sequence[Any] = (), again: Collection[bool] = (), views: Views | None = None
    ) -> None:
        """Compare training with a module that is wrapped or cut; if it is cut by all ranks together."""
        if self.compares_together:
            self._strategy.sync.evaluate(partial(self._compare, (), again, views, together=True))
        else:
            self._compare(args, again, views)

    def _compare(
        self, args: Sequence[Any] = (), again: Collection[bool] = (), views: Views | None = None, together: bool = False
    ) -> None:
        """Find by what losses divide, on rank 0 for all; see `verified`."""
        strategy, module, reader = self._strategy, self._strategy.module, self._strategy.contract.reader
        args = args or (None, *self._rest)
        self.is_open = False
        views = views or Views(strategy.world_size > 1, bool(strategy.layout.cut_by))
        found = verified(
            strategy, views, self._verifies, args, broadcast_object, strategy.global_rank == 0, again=again,
            together=together, samples=self._samples,
        )  # fmt: skip
        self.uneven, self.outside = found.uneven, found.outside
        self._has_changed = None if strategy.sync.evaluates_together else found.has_changed
        if found.waits(again):
            self.is_open = True
            return
        reader.values.learn("training_step", 0, found)
        if module.automatic_optimization:
            reader.take(found.plans[0], module)
        elif self._verifies and not all(plan.is_of_samples for plan in found.plans):
            raise PartsDiffer(
                f"{strategy.strategy_name}: in manual optimization ranks weight a loss by samples, and one is no mean "
                "over samples. Compute it in evener.over_batch(fn)(...), or leave out global_view=false."
            )
        if found.unused:
            strategy.sync.expect_unused()

    def begin_evaluation(self) -> None:
        """Begin an evaluation, whose step is compared once the hooks of its epoch's start have run."""
        loop: Any = self._strategy.trainer._evaluation_loop

        def compare() -> None:
            self.evaluation = loop
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
        self.evaluation = None
        if self.seen_ranks is not None:
            self.seen_ranks = None
            self._strategy.contract.count_ranks(self._strategy.world_size)

    def is_whole(self, role: LoaderRole, looks: bool = True) -> bool | None:
        """See `RankBatches`. Of a stream all ranks have the first batch, on which its step is looked at."""
        trainer = self._strategy.trainer
        if role == "train":
            if looks and self.is_open and self._strategy.world_size > 1 and not self.compares_together:
                self._settle("training_step", None, partial(self._compare, (), (True, False)))
            return "training_step" in self.of_ranks.names or None
        predicts = role == "predict"
        step = "predict_step" if predicts else "test_step" if trainer.testing else "validation_step"
        loop: Any = trainer.predict_loop if predicts else trainer._evaluation_loop
        if loop is trainer._active_loop and (predicts or loop is self.evaluation):
            for loader in range(num_evaluated(loop)):
                streams = [one for one in chosen_loaders(loop._combined_loader, loader) if isinstance(one, Divided)]
                if all(one.first_batch is not None for one in streams):
                    self._settle(step, loop, partial(self._find, step, loader))
        return step in self.of_ranks.names or (None if predicts else goes_whole(loop._combined_loader))

    def _find(self, step: str, loader: int, views: Views) -> None:
        """Find how what a step of evaluation logs follows from parts, on rank 0 for all where it can."""
        strategy, sync = self._strategy, self._strategy.sync
        find = partial(find_evaluated, strategy, views, step, loader, self.of_ranks.allowed)
        if sync.evaluates_together:
            sync.evaluate(partial(find, together=True))
        else:
            find(broadcast_object, strategy.global_rank == 0)

    def _settle(self, step: str, evaluation: Any, find: Callable[[Views], None]) -> None:
        """Find how parts of a step's batches make these; what they don't make gets whole ones, of ranks or chunks."""
        strategy, trains = self._strategy, evaluation is None
        is_whole = not trains and step != "predict_step" and goes_whole(evaluation._combined_loader)
        while True:
            chunks = bool(strategy.layout.cut_by) if trains else strategy.layout.cuts_evaluation(step)
            views = Views(strategy.world_size > 1 and not is_whole and step not in self.of_ranks.names, chunks)
            if not any(views):
                return
            try:
                find(views)
            except PartsDiffer as exc:
                (self.of_chunks if exc.in_chunks or not views.ranks else self.of_ranks).take(step, exc)
                if exc.unused:
                    strategy.sync.expect_unused()
                if exc.plans and trains and weighs_in_loop(strategy.trainer):
                    strategy.contract.reader.take(exc.plans[0], strategy.module)
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
