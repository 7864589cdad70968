"""Noise that two data workers draw, with two seeds."""

from dataclasses import replace

from silent_bugs.case import Outcomes
from silent_bugs.cases import workers_same_noise_each_epoch


def differ(outcomes: Outcomes) -> str:
    first, second = ({value for batch in outcome["inputs"] for value in batch} for outcome in outcomes)
    return (
        f"{len(first & second)} of {len(first)} samples have the same noise with both seeds" if first & second else ""
    )


PROBLEM = replace(workers_same_noise_each_epoch.CASE.problem, epochs=1)

CASE = replace(
    workers_same_noise_each_epoch.CASE,
    issue="Lightning-AI/pytorch-lightning#21399 Lightning-AI/pytorch-lightning#20412",
    wrong="applies the same augmentations whatever the seed",
    problem=PROBLEM,
    again=replace(PROBLEM, seed=123),
    property=differ,
)
