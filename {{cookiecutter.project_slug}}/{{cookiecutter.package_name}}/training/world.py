"""The ranks that a process belongs to, where something else has started them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

from ..errors import UserError

_runs = count()
_stores: list[Any] = []  # rank 0's holds what the others read


@dataclass(frozen=True)
class World:
    """Where a process stands among all ranks."""

    rank: int
    size: int
    ranks_per_node: int


def joined() -> World | None:
    """The world that torchrun, or this project's launcher, or srun has put this process in.

    RANK or WORLD_SIZE alone say nothing: they may be left over from another program.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
            return None
        os.environ.update(_from_slurm())
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return World(*(int(os.environ[name]) for name in names))


def _from_slurm() -> dict[str, str]:
    """A step of several tasks, in torch's variables."""
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    step = {key: os.environ[f"SLURM_{key}"] for key in ("PROCID", "LOCALID", "NODEID", "JOB_ID")}
    tasks, nodes = (int(os.environ[f"SLURM_STEP_NUM_{key}"]) for key in ("TASKS", "NODES"))
    if tasks % nodes:
        raise UserError(
            f"{tasks} tasks on {nodes} nodes: each node must run as many: use --ntasks-per-node."
        )
    first = SLURMEnvironment.resolve_root_node_address(os.environ["SLURM_STEP_NODELIST"])
    # As all tasks can work it out: a port that no other step of this user is likely to have.
    port = 20_000 + (int(step["JOB_ID"]) * 16 + int(os.environ["SLURM_STEP_ID"])) % 12_000
    return {
        "RANK": step["PROCID"],
        "LOCAL_RANK": step["LOCALID"],
        "GROUP_RANK": step["NODEID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(tasks // nodes),
        "MASTER_ADDR": first,
        "MASTER_PORT": str(port),
    }


def from_first(world: World, make: Callable[[], str]) -> str:
    """What rank 0 makes, on all ranks; they wait for it.

    Raises:
        UserError: If the port is taken, or rank 0 failed.
    """
    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(hours=2)))
    except DistError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0]
        raise UserError(f"the ranks cannot meet at {place}: {reason}") from error
    _stores.append(store)
    key = f"run-{next(_runs)}"
    if world.rank == 0:
        try:
            value = make()
        except BaseException:
            store.set(key, "")
            raise
        store.set(key, value)
        return value
    try:
        value = store.get(key).decode()
    except DistError:
        value = ""
    if not value:
        raise UserError(f"rank {world.rank} ends, since rank 0 could not start the run.")
    return value
