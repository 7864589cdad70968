"""Models of transformers: one device's training under every strategy, or refused."""

import pytest
from model_cases import case, cases_of
from zoo import STRATEGIES, Zoo, needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

ZOO = Zoo(cases_of("transformers"), case)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ZOO.names)
def test_training_is_one_devices_or_refused(name: str, strategy: str) -> None:
    needs("transformers")
    ZOO.check(name, strategy)
