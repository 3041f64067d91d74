"""What is settled, and what is refused, before anything is written or started."""

from omegaconf import DictConfig, OmegaConf

from ..data.arrays import Meta
from ..data.folds import check_folds
from ..errors import UserError
from .shardable import check_sharding
from .world import World


def settle_ranks(config: DictConfig, world: World | None) -> int:
    """Write down what `auto` comes to, so that every rank reads the same; returns their number.

    Raises:
        UserError: If devices and strategy do not fit each other, the machine, or the ranks that
            something else has started.
    """
    trainer, alone = config.trainer, config.trainer.strategy == "auto"
    submitted = bool(config.launcher._target_)
    if world is not None and not alone:
        if trainer.devices not in ("auto", -1, world.ranks_per_node):
            raise UserError(
                f"trainer.devices={trainer.devices}, but {world.ranks_per_node} ranks were started "
                "on each node: let both be the same."
            )
        trainer.devices = world.ranks_per_node
        trainer.num_nodes = world.size // world.ranks_per_node
    elif trainer.devices in ("auto", -1) and not submitted:
        trainer.devices = 1 if alone else _count_gpus(trainer)
    if submitted and trainer.devices == "auto":
        raise UserError("trainer.devices=auto: say how many devices a node has, trainer.devices=4.")
    if not isinstance(trainer.devices, int) or trainer.devices < 1:
        raise UserError(f"trainer.devices={trainer.devices}: take a number of devices, or auto.")
    if not isinstance(trainer.num_nodes, int) or trainer.num_nodes < 1:
        raise UserError(f"launcher.nodes={trainer.num_nodes}: take a whole number above 0.")
    ranks = int(trainer.devices * trainer.num_nodes)
    if alone and world is not None and world.size > 1:
        raise UserError(f"{world.size} ranks were started: that needs trainer=ddp or trainer=fsdp.")
    if alone and ranks > 1:
        raise UserError(f"trainer.devices={ranks} needs trainer=ddp or trainer=fsdp.")
    if trainer.num_nodes > 1 and world is None and not submitted:
        raise UserError(
            f"trainer.num_nodes={trainer.num_nodes}: start train.py with torchrun on every node, "
            "or choose a launcher."
        )
    if not submitted:
        _check_devices(trainer)
    check_sharding(config, ranks)
    return ranks


def _count_gpus(trainer: DictConfig) -> int:
    import torch

    count = torch.cuda.device_count()
    if not count or trainer.accelerator == "cpu":
        raise UserError(
            "trainer.devices=auto counts GPUs: for ranks on a CPU say how many, "
            "trainer.accelerator=cpu trainer.devices=2"
        )
    return count


def _check_devices(trainer: DictConfig) -> None:
    if trainer.accelerator not in ("gpu", "cuda", "auto"):
        return
    import torch

    count = torch.cuda.device_count()
    if trainer.devices > count and (count or trainer.accelerator != "auto"):
        raise UserError(
            f"trainer.devices={trainer.devices}, but this machine has {count} GPUs: "
            "trainer.accelerator=cpu runs ranks on the CPU."
        )


def check_batch_size(config: DictConfig) -> None:
    """Refuse a batch that ranks and accumulation steps cannot share equally."""
    batch_size, trainer = config.data.batch_size, config.trainer
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f"data.batch_size={batch_size}: take a whole number above 0.")
    sharded = OmegaConf.is_dict(trainer.strategy)
    together = trainer.strategy.get("tensor_parallel_size", 1) if sharded else 1
    ranks = trainer.devices * trainer.num_nodes // together
    accumulate = trainer.accumulate_grad_batches
    parts = ranks * accumulate
    if batch_size % parts:
        below, above = batch_size // parts * parts, (batch_size // parts + 1) * parts
        fits = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"data.batch_size={batch_size} cannot be shared by {ranks} ranks × {accumulate} "
            f"accumulation steps: take {fits}."
        )


def check_data(config: DictConfig, data: Meta) -> None:
    """Refuse a fold that the data are too few for, and to watch a split that is empty."""
    fold = config.data.get("fold")
    check_folds(fold, config.data.get("folds"), data)
    if fold is None and config.monitor.startswith("val/") and not sum(data.counts["val"]):
        raise UserError(
            f"monitor={config.monitor}: the val split is empty: set monitor=train/loss mode=min."
        )
