"""Let machines join and leave a run: `torchrun --nnodes=1:4 ... train.py num_nodes=1:4`.

torch's agents stop all workers when a machine joins or is lost, and start them anew with the machines that are there.
To the workers that is another run, so here it becomes the same one: its directory is named after the rendezvous, and it
goes on from the newest checkpoint in it.
"""

import os
import re
from collections.abc import Sequence

from lightning_fabric.plugins.environments import ClusterEnvironment, TorchElasticEnvironment

from ...strategies import ConfigError
from ...strategies.distributed.store import is_hosted_by_agent

_RANGE = re.compile(r"num_nodes=['\"]?(\d+):(\d+)['\"]?")
_DIRECTORY = "${log_dir}/${name}/${hydra:runtime.choices.strategy}"


def resolved_words(words: Sequence[str], cluster: ClusterEnvironment) -> list[str]:
    """Replace a range of machines on the command line by their present number.

    Returns:
        The words, with the directory of the run and `resume=auto`; the same words if there is no range.

    Raises:
        ConfigError: the range can't be honoured.
    """
    found = next((match for match in map(_RANGE.fullmatch, words) if match), None)
    if found is None:
        return list(words)
    least, most = map(int, found.groups())
    _verify(found[0], least, most, cluster)
    if given := [word for word in words if word.startswith("resume=")]:
        raise ConfigError(
            f"{found[0]} continues from its own checkpoints, so it can't start from {given[0]}. Leave resume out."
        )
    kept = [f"num_nodes={_num_nodes()}" if word == found[0] else word for word in words]
    if not any(word.startswith("hydra.run.dir=") for word in words):
        run_id = re.sub(r"[^A-Za-z0-9_-]+", "_", os.environ.get("TORCHELASTIC_RUN_ID", "none"))
        kept.append(f"hydra.run.dir={_DIRECTORY}/{run_id}")
    return [*kept, "resume=auto"]


def _verify(given: str, least: int, most: int, cluster: ClusterEnvironment) -> None:
    if not isinstance(cluster, TorchElasticEnvironment):
        raise ConfigError(f"{given} needs torchrun, whose agents start the workers anew. Give one number, or use it.")
    if not least <= _num_nodes() <= most:
        raise ConfigError(
            f"{given} allows {least} to {most} machines; torchrun has started {_num_nodes()}. Give torchrun the same "
            f"range: --nnodes={least}:{most}."
        )
    if is_hosted_by_agent():
        raise ConfigError(
            f"{given} needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun on every machine: "
            "torch's shared store keeps the addresses of ranks that have left, and those that join wait for them."
        )


def _num_nodes() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))
