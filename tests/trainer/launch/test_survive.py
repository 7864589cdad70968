"""Ranks go on without one that dies: a short form of `benchmarks/goodput.py`, and what is refused."""

import re
import sys
from pathlib import Path

import pytest
import warm_python
from omegaconf import OmegaConf

from evener.strategies import ConfigError
from evener.strategies.distributed.survivors import Agent, Board
from evener.trainer.config.checks import LaunchPlan
from evener.trainer.launch.launcher import verify_survive

PROGRAM = Path(__file__).parents[3] / "benchmarks/goodput.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory by Linux's means")


@pytest.mark.long
@pytest.mark.parametrize("seed", [7, 8])
def test_killed_and_frozen_ranks_leave_samples_weights_and_curves_as_they_are(seed: int) -> None:
    done = warm_python.run(PROGRAM, "--kills", "3", "--ranks", "4", "--seed", str(seed), timeout=550)
    table = dict(re.findall(r"^\| (.+) \| (.+) \|$", done.stdout, re.MULTILINE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (table["failures"], table["runs that differ"]) == ("3", "0")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"_target_": "evener.strategies.FSDPStrategy"}, "strategy=fsdp"),
        ({"batch_size_is": "per_device"}, "strategy.batch_size_is=per_device"),
        ({"shard_optimizer": True}, "strategy.shard_optimizer=True"),
        ({"compression": "bf16"}, "strategy.compression=bf16"),
    ],
)
def test_where_ranks_need_one_another_it_is_refused_by_name(changes: dict[str, object], found: str) -> None:
    strategy = {"_target_": "evener.strategies.DDPStrategy", "batch_size_is": "global", **changes}
    cfg = OmegaConf.create({"strategy": strategy, "devices": 2, "accelerator": "cpu"})
    with pytest.raises(ConfigError, match=f"got {re.escape(found)}"):
        verify_survive(cfg, LaunchPlan.of(cfg), "")


def test_a_group_is_formed_once_all_that_live_ask_from_the_last_section_that_all_have_done() -> None:
    board = Board(3)
    agent = Agent(board)
    for rank, done in enumerate([5, 4, 5]):
        for section in range(1, done + 1):
            board.write(rank, 0, section, b"%d of rank %d" % (section, rank))
        board.done(rank, done)
        board.arm(rank, True)
    assert agent.lose(2, [None, None, -9])
    board.ask(0, 1)
    agent.assemble()
    assert board.group == 0  # rank 1 has not asked
    board.ask(1, 1)
    agent.assemble()
    assert (board.group, board.section, agent.dead) == (1, 4, [2])
    assert [board.read(rank, 0, 4) for rank in range(3)] == [b"4 of rank 0", b"4 of rank 1", b"4 of rank 2"]
    board.close()


def test_a_death_ends_the_run_where_a_rank_is_not_armed_or_has_ended_in_order() -> None:
    board = Board(2)
    board.arm(0, True)
    assert not Agent(board).lose(1, [0, -9])
    board.arm(0, False)
    assert not Agent(board).lose(1, [None, -9])
    board.close()
