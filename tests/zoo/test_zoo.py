"""Models and metrics of other packages: one device's training under every strategy, or refused."""

import pytest
from model_cases import CASES, case
from zoo import STRATEGIES, Zoo, needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

needs("torchmetrics", "scipy", allow_module_level=True)
import metric_cases  # noqa: E402

MODELS, METRICS = Zoo(list(CASES), case), Zoo(metric_cases.names(), metric_cases.case)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS.names)
def test_training_is_one_devices_or_refused(name: str, strategy: str) -> None:
    needs(name.partition(":")[0])
    MODELS.check(name, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", METRICS.names)
def test_metric_is_one_devices_or_refused(name: str, strategy: str) -> None:
    METRICS.check(name, strategy)


def test_every_metric_class_has_a_case_or_a_reason() -> None:
    """A class that a new torchmetrics brings fails here until it gets one."""
    cased = {name.partition(".")[2] for name in metric_cases.names()}
    missing = {
        name
        for name, item in metric_cases.classes().items()
        if name.partition(".")[2] not in cased | set(metric_cases.LEFT_OUT) and not metric_cases.is_task_front(item)
    }
    assert missing == set()
