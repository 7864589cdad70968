"""Ranks go on without one that dies: a short form of `benchmarks/goodput.py`, and what is refused."""

import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import warm_python
from omegaconf import OmegaConf
from torch.distributed import TCPStore

from evener.strategies import ConfigError
from evener.strategies.distributed.store import PEER_LOST, RankError
from evener.strategies.distributed.survivors import Board, Connecting, Survivor
from evener.trainer.config.checks import LaunchPlan
from evener.trainer.launch.launcher import verify_survive

PROGRAM = Path(__file__).parents[3] / "benchmarks/goodput.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory by Linux's means")


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "kills"),
    [
        ("--kills 3 --seed 7", "3"),
        ("--kills 3 --seed 8", "3"),
        ("--kills 51 --seed 11 --only 17", "3"),  # a validation's values were lost, as times were not logged again
        ("--kills 2 --seed 43 --plan validating:5:1 saving:4:0", "2"),  # in one section; its values came twice
        ("--kills 18 --seed 21 --only 6", "3"),  # values of a validation that was done again came in another order
        ("--kills 1 --ranks 2 --seed 1 --restarts 1 --plan forward:6:1", "1"),  # points before it are shown once
    ],
)
def test_killed_and_frozen_ranks_leave_samples_weights_and_curves_as_they_are(words: str, kills: str) -> None:
    ranks = () if "--ranks" in words else ("--ranks", "4")
    done = warm_python.run(PROGRAM, *ranks, *words.split(), timeout=550)
    table = dict(re.findall(r"^\| (.+) \| (.+) \|$", done.stdout, re.MULTILINE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (table["failures"], table["runs that differ"]) == (kills, "0")


GLOBAL = {"batch_size_is": "global"}


@pytest.mark.parametrize(
    "changes",
    [
        {"_target_": "evener.strategies.FSDPStrategy", **GLOBAL}, {"batch_size_is": "per_device"}, {},
        {**GLOBAL, "shard_optimizer": True}, {**GLOBAL, "compression": "bf16"},
    ],
)  # fmt: skip
def test_where_ranks_need_one_another_it_is_refused(changes: dict[str, Any]) -> None:
    strategy = {"_target_": "evener.strategies.DDPStrategy", **changes}
    cfg = OmegaConf.create({"strategy": strategy, "devices": 2, "accelerator": "cpu"})
    with pytest.raises(ConfigError, match=r"survive=true needs strategy=ddp with strategy\.batch_size_is=global, or"):
        verify_survive(cfg, LaunchPlan.of(cfg), False)


def test_a_death_ends_the_run_where_a_rank_is_not_armed_or_has_ended_in_order(tmp_path: Path) -> None:
    board = Board(2, tmp_path)
    survivor = Survivor(board, 0)
    survivor.arm()
    assert not board.lose(1, [0, -9])
    survivor.arm(False)
    assert not board.lose(1, [None, -9])


def test_a_group_is_given_up_where_a_rank_dies_while_it_connects() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    PEER_LOST.set()
    try:
        with pytest.raises(RankError, match="a rank has died"):  # and not after gloo's own timeouts
            Connecting(store, 0, 2, timeout=timedelta(seconds=2))
    finally:
        PEER_LOST.clear()
