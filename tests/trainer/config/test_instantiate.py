"""Objects of config groups: made from options, in one go or prepared before."""

from typing import Any

import hydra.utils
import pytest
from omegaconf import DictConfig, OmegaConf

from evener.strategies import ConfigError
from evener.trainer.config import instantiate as module
from evener.trainer.config.instantiate import constructor, instantiate, prepare


def config(**groups: Any) -> DictConfig:
    empty = {"strategy": None, "module": None, "data": None, "checkpoint": None, "trainer": None}
    cfg = OmegaConf.create({**empty, **groups})
    assert isinstance(cfg, DictConfig)
    return cfg


FRACTION = {"_target_": "fractions.Fraction", "numerator": 3, "denominator": 4}
NESTED = {"_target_": "fractions.Fraction", "numerator": {"_target_": "builtins.abs", "_args_": [-7]}}


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets of the options that Hydra has converted."""
    targets: list[str] = []
    convert = hydra.utils.instantiate

    def recorded(options: DictConfig, **hydra_options: Any) -> Any:
        targets.append(options._target_)
        return convert(options, **hydra_options)

    monkeypatch.setattr(module, "_prepared", {})
    monkeypatch.setattr(module, "_made", {})
    monkeypatch.setattr(hydra.utils, "instantiate", recorded)
    return targets


def test_options_are_converted_once_if_they_were_prepared(conversions: list[str]) -> None:
    cfg = config(strategy=FRACTION, logger={"one": FRACTION, "two": None})
    prepare(cfg)
    assert len(conversions) == 2
    made = [instantiate("strategy", cfg.strategy), instantiate("logger.one", cfg.logger.one)]
    assert [str(one) for one in made] == ["3/4", "3/4"]
    assert len(conversions) == 2


def test_changed_options_are_not_those_that_were_prepared(conversions: list[str]) -> None:
    cfg = config(data=FRACTION)
    prepare(cfg)
    changed = OmegaConf.merge(cfg, {"data": {"denominator": 5}})
    assert str(instantiate("data", changed.data)) == "3/5"


def test_objects_within_options_are_not_made_before_they_are_needed(conversions: list[str]) -> None:
    cfg = config(module=NESTED)
    prepare(cfg)
    assert conversions == []
    assert instantiate("module", cfg.module) == 7


def test_objects_of_this_project_are_made_once_before_they_are_needed(conversions: list[str]) -> None:
    cfg = config(
        strategy={"_target_": "evener.strategies.dp.DataParallelStrategy"},
        trainer={"_target_": "evener.trainer.Trainer"},
    )
    prepare(cfg)
    assert [key for key, _ in module._made.values()] == ["strategy"]
    made = module._made[id(cfg.strategy)][1]
    assert instantiate("strategy", cfg.strategy) is made
    assert instantiate("strategy", cfg.strategy) is not made  # a trial step has one of its own
    assert len(conversions) == 2


def test_a_constructor_can_be_given_further_arguments() -> None:
    make = constructor("trainer", OmegaConf.create(FRACTION))
    assert str(make(denominator=8)) == "3/8"


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
