"""Models and metrics of other packages: one device's training under every strategy, or refused."""

import pytest
from metric_cases import LEFT_OUT, classes, is_task_front, names
from model_cases import CASES
from zoo import STRATEGIES, Zoo, lent_zoo, needs  # noqa: F401  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [*CASES, *names()])
def test_training_is_one_devices_or_refused(name: str, strategy: str, zoo: Zoo) -> None:
    needs(name.partition(":")[0] if name in CASES else "scipy")
    verdict = zoo.of(name, strategy)
    if verdict.word == "unsound":  # stock Lightning does not run it either
        pytest.skip(verdict.detail)
    assert verdict.word in ("equal", "refused"), f"{name} under {strategy}: {verdict}"


def test_every_metric_class_has_a_case_or_a_reason() -> None:
    """A class that a new torchmetrics brings fails here until it gets one."""
    cased = {name.partition(".")[2] for name in names()} | set(LEFT_OUT)
    assert [n for n, item in classes().items() if n.partition(".")[2] not in cased and not is_task_front(item)] == []
