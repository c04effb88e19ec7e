"""The launch that this process is a rank of, if it is one of several."""

import os
from dataclasses import dataclass

from lightning_moeclip.binding import fabric

__all__ = ["Launch", "current_launch"]

_environments = fabric.plugins.environments


@dataclass(frozen=True)
class Launch:
    """Which of how many ranks this process is.

    Attributes:
        by: what started it.
        rank: in [0, world_size).
        world_size: number of ranks.
        local_world_size: ranks on this machine.
    """

    by: str
    rank: int
    world_size: int
    local_world_size: int

    @property
    def num_nodes(self) -> int:
        """Machines, each with as many ranks as this one."""
        return max(1, self.world_size // self.local_world_size)


def current_launch() -> Launch | None:
    """The launch by torchrun or srun that Lightning would join; None where it would start processes itself."""
    if _environments.TorchElasticEnvironment.detect():
        return _launch("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if _environments.SLURMEnvironment.detect():
        return _launch("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", num_nodes="SLURM_NNODES")
    return None


def _launch(by: str, rank: str, world_size: str, local: str, *, num_nodes: str = "") -> Launch | None:
    try:
        world = int(os.environ[world_size])
        # srun tells of ranks on a node where it was told of them itself, and of nodes always
        evenly = max(1, world // int(os.environ.get(num_nodes, "1")))
        found = Launch(by, int(os.environ[rank]), world, int(os.environ.get(local, evenly)))
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"This process was started by {by}, and {rank}, {world_size} or {local} is missing or no number: {error}. "
            f"Start it as {by} does, or unset what {by} has left in the environment."
        ) from error
    return found if world > 1 else None
