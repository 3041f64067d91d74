"""What sharded training cannot do, said before any work. No torch here."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ..errors import UserError
from ..paths import is_sharded, sharded_error

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")
SHORT = {"32": "32-true", "bf16": "bf16-mixed"}  # what Lightning takes too


def check_sharding(config: DictConfig, ranks: int) -> None:
    """Refuse what does not go together, and write down what `data_parallel_size=auto` comes to.

    Args:
        config: Of the run.
        ranks: On all nodes.

    Raises:
        UserError: With the setting that mends it.
    """
    trainer = config.trainer
    if not OmegaConf.is_dict(trainer.strategy) or "tensor_parallel_size" not in trainer.strategy:
        return
    settle_mesh(trainer, ranks)
    precision = str(trainer.precision)
    if SHORT.get(precision, precision) not in PRECISIONS:
        raise UserError(
            f"trainer.precision={precision} cannot be sharded: take precision=bf16, or one of "
            f"{', '.join(PRECISIONS)}."
        )
    if config.callbacks.get("ema"):
        raise UserError("sharded weights cannot be averaged: leave callbacks=ema out.")
    if trainer.sync_batchnorm:
        raise UserError("trainer=fsdp has no trainer.sync_batchnorm: set it to false.")
    if config.publish_dir and trainer.strategy.save_distributed_checkpoint:
        raise UserError(
            "publish_dir takes one file: set trainer.strategy.save_distributed_checkpoint=false."
        )


def settle_mesh(trainer: DictConfig, ranks: int) -> None:
    """Data parallel × tensor parallel ranks are all ranks."""
    strategy = trainer.strategy
    together, apart = strategy.tensor_parallel_size, strategy.data_parallel_size
    key = "trainer.strategy.tensor_parallel_size"
    if not isinstance(together, int) or together < 1:
        raise UserError(f"{key}={together}: take a number of ranks, 1 for none.")
    if trainer.devices % together:
        fits = [str(size) for size in range(1, trainer.devices + 1) if trainer.devices % size == 0]
        raise UserError(
            f"{key}={together} does not divide trainer.devices={trainer.devices}: take "
            f"{' or '.join(fits)}."
        )
    if apart == "auto":
        strategy.data_parallel_size = ranks // together
    elif apart != ranks // together:
        raise UserError(
            f"trainer.strategy.data_parallel_size={apart} × tensor_parallel_size={together} are "
            f"not the {ranks} ranks: take data_parallel_size=auto."
        )


def check_resumable(config: DictConfig, checkpoint: Path | None) -> None:
    """Refuse a sharded checkpoint where one process, or DDP, would have to read it.

    Raises:
        UserError: With the command that makes it one file.
    """
    strategy = config.trainer.strategy
    sharded = OmegaConf.is_dict(strategy) and "tensor_parallel_size" in strategy
    if checkpoint is not None and is_sharded(checkpoint) and not sharded:
        raise UserError(sharded_error(checkpoint))
