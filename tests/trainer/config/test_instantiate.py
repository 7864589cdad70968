"""Objects of config groups: made from options."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from evener.strategies import ConfigError
from evener.trainer.config.instantiate import instantiate

FRACTION = {"_target_": "fractions.Fraction", "numerator": 3, "denominator": 4}


def test_a_constructor_can_be_given_further_arguments() -> None:
    assert str(instantiate("trainer", OmegaConf.create(FRACTION), denominator=8)) == "3/8"


@pytest.mark.parametrize("options", [{**FRACTION, "denominator": 0.5}, {**FRACTION, "more": 1}])
def test_what_a_constructor_refuses_names_the_group(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"module: fractions\.Fraction refused its options"):
        instantiate("module", OmegaConf.create(options))


def test_what_an_object_within_refuses_names_the_group() -> None:
    options = {**FRACTION, "numerator": {"_target_": "builtins.int", "_args_": ["x"]}}
    with pytest.raises(ConfigError, match=r"module: fractions\.Fraction refused its options: invalid literal"):
        instantiate("module", OmegaConf.create(options))


def test_other_errors_of_a_constructor_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError):
        instantiate("module", OmegaConf.create({**FRACTION, "denominator": 0}))


def test_a_class_that_does_not_exist_is_named() -> None:
    with pytest.raises(Exception, match=r"fractions\.Nothing"):
        instantiate("module", OmegaConf.create({"_target_": "fractions.Nothing"}))
