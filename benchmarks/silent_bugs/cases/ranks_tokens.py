"""A mean over tokens on two ranks: a rank with few labels weighs as much as one with many."""

from frameworks.problem import Problem
from silent_bugs.case import Case, language_model, sentences, token_mean

CASE = Case(
    issue="huggingface/transformers#37474",
    wrong="averages the ranks' means, whatever number of tokens each has",
    problem=Problem(language_model, token_mean, lambda: sentences(32), ranks=2, tokens=True),
)
