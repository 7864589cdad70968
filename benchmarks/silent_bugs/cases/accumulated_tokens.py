"""A mean over tokens, accumulated: batches with few labels weigh as much as those with many."""

from frameworks.problem import Problem
from silent_bugs.case import Case, language_model, sentences, token_mean

CASE = Case(
    issue="Lightning-AI/pytorch-lightning#20350",
    wrong="averages the accumulated batches' means, whatever number of tokens each has",
    problem=Problem(language_model, token_mean, lambda: sentences(32), accumulate=2, tokens=True),
)
