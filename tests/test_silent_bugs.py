"""What trainers are known to get wrong without a word, and Evener does not: `benchmarks/silent_bugs`."""

import re
from pathlib import Path

import pytest
import warm_python

PROGRAM = Path(__file__).parents[1] / "benchmarks/silent_bugs/run.py"
NOT_EXACT = {
    "accumulated_contrast": "silent",  # docs/over_batch.md: each forward pass has its own batch
    "ranks_moved": "refused",  # within a step, in which ranks can't be joined anew
    "ranks_static_graph_manual": "refused",
}


def words(*only: str) -> dict[str, str]:
    """Train cases with Evener; returns the word of each."""
    done = warm_python.run(PROGRAM, "--frameworks", "evener", *(("--only", *only) if only else ()), timeout=900)
    found = re.findall(r"^\| `(\w+)` \|.* \| \**(\w+)\** \|$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return dict(found)


def test_a_few_silent_bugs_are_not_evener_s() -> None:
    names = ("accumulated_mask", "ranks_tokens", "ranks_uneven", "resume_second_epoch")
    assert words(*names) == dict.fromkeys(names, "exact")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_silent_bug_is_evener_s_but_the_one_that_is_documented() -> None:
    found = words()
    assert len(found) >= 44
    assert {name: word for name, word in found.items() if word != "exact"} == NOT_EXACT
