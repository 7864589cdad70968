"""Find what is wrong in many cases: reduce each to the fields that matter, and keep one of each kind."""

import time
from collections import Counter
from dataclasses import dataclass, field

from outcomes import Verdict

from .cases import Case, Spread, brief, simpler
from .observe import observe
from .pool import Pool
from .settled import settled
from .verdict import judge


@dataclass
class Hunt:
    """What became of the cases so far, and each distinct failure in its smallest form."""

    pool: Pool = field(default_factory=lambda: Pool(observe))
    words: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def judge(self, case: Case, spread: Spread) -> Verdict:
        """Run a case and count its verdict; a failure is confirmed in processes that have run nothing else."""
        verdict = judge(self.pool, case, spread)
        if not verdict.accepted:
            self.pool.restart()
            verdict = judge(self.pool, case, spread)
        self.words[verdict.word] += 1
        if verdict.word in ("refused", "discarded"):
            self.reasons[f"{verdict.word}: {verdict.detail.splitlines()[0][:110] if verdict.detail else ''}"] += 1
        return verdict

    def reduce(self, case: Case, spread: Spread, verdict: Verdict, seconds: float = 60.0) -> tuple[Case, Verdict]:
        """The smallest case that still fails, found by giving one field after the other its default."""
        deadline = time.monotonic() + seconds
        tried: set[Case] = set()
        left = simpler(case)
        while left and time.monotonic() < deadline:
            try:
                plainer = settled(left.pop(0), spread)
            except (IndexError, ValueError):
                continue  # a tuple has lost a field that it needs
            if plainer == case or plainer in tried:
                continue
            tried.add(plainer)
            found = judge(self.pool, plainer, spread)
            if not found.accepted:
                case, verdict, left = plainer, found, simpler(plainer)
        return case, verdict

    def add(self, case: Case, spread: Spread) -> Verdict:
        """Judge a case, and keep how it fails, by what is left of it when it is reduced."""
        first = self.judge(case, spread)
        if not first.accepted:
            small, verdict = self.reduce(case, spread, first)
            failure = f"{verdict.word}: {brief(small)} under {brief(spread)}\n    {verdict.detail}"
            self.failures[f"{spread.kind}: {brief(small)}"] = f"{failure}\n    reduced from {brief(case)}"
        return first

    def table(self) -> str:
        """Cases by verdict, refusals and discarded ones by reason, minutes."""
        judged = sum(self.words.values()) - self.words["discarded"]
        lines = [f"{judged} cases judged in {(time.monotonic() - self.began) / 60:.1f} min"]
        lines += [f"{count:6d} {word}" for word, count in self.words.most_common()]
        lines += [f"{count:6d}   {reason}" for reason, count in self.reasons.most_common()]
        return "\n".join(lines)
