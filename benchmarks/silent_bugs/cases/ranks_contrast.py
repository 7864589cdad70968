"""A contrastive loss on two ranks: negatives come from the rank's own samples."""

from dataclasses import replace

from silent_bugs.cases import accumulated_contrast

CASE = replace(
    accumulated_contrast.CASE,
    issue="huggingface/sentence-transformers#3453",
    wrong="compares each sample with those of its own rank only",
    problem=replace(accumulated_contrast.CASE.problem, accumulate=1, ranks=2),
)
