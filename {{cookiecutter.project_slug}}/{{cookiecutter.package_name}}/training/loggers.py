"""Loggers that write into the run folder, and go on where a stopped run left off."""

import json
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from omegaconf import DictConfig, OmegaConf

# How a tracker's logger is told to continue a run, by what its `version` was.
CONTINUED = {
    "WandbLogger": lambda version: {"id": version, "resume": "allow"},
    "MLFlowLogger": lambda version: {"run_id": version},
}
VERSIONS = "loggers.json"


def build_loggers(config: DictConfig, folder: Path, is_first: bool) -> list[Logger]:
    """Instantiate the loggers that are not null; a resumed run continues those it had.

    Args:
        config: Of the run; `resume` is the checkpoint it goes on from, or null.
        folder: The run folder.
        is_first: Whether this is rank 0, which notes what the trackers call the run.
    """
    file = folder / VERSIONS
    known: dict[str, str] = {}
    if config.resume and file.is_file():
        known = json.loads(file.read_text(encoding="utf-8"))
    loggers: dict[str, Logger] = {}
    for name, one in config.logger.items():
        if one is not None:
            again: dict[str, Any] = {}
            if name in known:
                again = CONTINUED[one._target_.rpartition(".")[2]](known[name])
            elif config.resume and "TensorBoard" in one._target_:
                again = {"purge_step": _step(Path(config.resume))}  # hides what is run again
            loggers[name] = instantiate(one, save_dir=str(folder), **again)
    if is_first:
        tracked = {n: one for n, one in loggers.items() if type(one).__name__ in CONTINUED}
        versions = {name: one.version for name, one in tracked.items()}
        if versions:
            file.write_text(json.dumps(versions), encoding="utf-8")
    return list(loggers.values())


def log_hyperparameters(trainer: Trainer, config: DictConfig, metrics: dict[str, float]) -> None:
    """Hand every logger the config; TensorBoard shows it beside the final metrics."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(plain, metrics, trainer.global_step)
        else:
            logger.log_hyperparams(plain)
        logger.finalize("success")


def _step(checkpoint: Path) -> int:
    if checkpoint.is_dir():  # sharded: what is no tensor lies in a file of its own
        checkpoint = checkpoint / "meta.pt"
    return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["global_step"]
