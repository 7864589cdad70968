"""Give steps whole batches where parts of these can't be made, or train otherwise: refusing is the last resort."""

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pytorch_lightning.utilities.rank_zero import rank_zero_info

from ...core.errors import PartsDiffer

OrWhole: TypeAlias = Literal["auto", False]
"""Whether steps may get whole batches: where a module trains otherwise in parts of them, or these can't be cut."""

GlobalView: TypeAlias = bool | Literal["auto"]
"""The same, or whether they always get them."""

STEPS = frozenset(("training_step", "validation_step", "test_step", "predict_step"))


@dataclass
class WholeSteps:
    """The steps of a run that get whole batches.

    Args:
        strategy: name that begins messages.
        how: how a step computes a whole batch, for the log.
        allowed: whether steps may get them.
    """

    strategy: str = ""
    how: str = ""
    allowed: bool = False
    names: set[str] = field(default_factory=set[str])

    def take(self, step: str, why: PartsDiffer) -> None:
        """Give a step whole batches, or refuse that."""
        if not self.allowed or step in self.names:
            raise why
        self.names |= STEPS if step == "training_step" else {step}  # its evaluation computes the same loss
        tell_whole(self.strategy, why, f"{step} gets whole batches (strategy.global_view), {self.how}")

    def go_on(self, names: Collection[str]) -> None:
        """Give steps whole batches that got them in the run that is resumed."""
        if self.allowed and not self.names.issuperset(names):
            self.names.update(names)
            rank_zero_info(f"{self.strategy}: {', '.join(sorted(names))} get whole batches, as before, {self.how}.")

    @contextmanager
    def where_needed(self, step: str) -> Generator[None]:
        """Give a step whole batches from now on if what is tried inside the block needs them."""
        try:
            yield
        except PartsDiffer as exc:
            self.take(step, exc)

    def run(self, step: str, call: Callable[[], Any]) -> Any:
        """Run a step, which is known to need whole batches before anything of it counts; then it runs again."""
        try:
            return call()
        except PartsDiffer as exc:
            self.take(step, exc)
        return call()


def tell_whole(strategy: str, why: PartsDiffer, what: str) -> None:
    """Say in one line why steps get whole batches, and what that means."""
    reason = str(why).partition(". ")[0].removesuffix(".")
    named = reason if reason.startswith(f"{strategy}: ") else f"{strategy}: {reason}"
    faster = "; evener.over_batch(fn) is faster" if "evener.over_batch(fn)" in str(why) else ""
    rank_zero_info(f"{named}. So {what}{faster}.")
