"""One rank's work: config.yaml of a run folder → a fitted and tested model.

`launch` calls it in its own process, or starts `python -m <package>.training.fit <run folder>`
once a rank.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_class, instantiate
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import DictConfig, OmegaConf

from ..errors import user_error
from ..log import log, setup_logging
from .callbacks import History, measured


def fit(folder: Path) -> None:
    """Train, test the best checkpoint, and write metrics.json.

    Args:
        folder: A run folder that holds config.yaml.
    """
    config = OmegaConf.load(folder / "config.yaml")
    assert isinstance(config, DictConfig)
    is_first = not is_launched() or os.environ["RANK"] == "0"
    setup_logging(folder / "train.log" if is_first else None, terminal=is_first)
    torch.set_float32_matmul_precision(config.float32_matmul_precision)
    seed_everything(config.seed, workers=True, verbose=False)
    datamodule = build_datamodule(config)
    model = build_task(config, datamodule.facts)
    callbacks = build_callbacks(config, folder)
    trainer = build_trainer(config, folder, callbacks)
    count = sum(weights.numel() for weights in model.parameters())
    log.info("Run folder: %s", folder)
    log.info("Model: %s, %s parameters.", config.model._target_.rpartition(".")[2], f"{count:,}")
    trainer.fit(model, datamodule, ckpt_path=config.resume, weights_only=True)
    metrics = best_metrics(trainer, callbacks, config)
    if config.test:
        metrics |= test_best(trainer, model, datamodule, folder)
    if trainer.is_global_zero:
        log_hyperparameters(trainer, config, metrics)
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


def is_launched() -> bool:
    """Whether torch's elastic launcher started this process; RANK alone may be a leftover."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def build_datamodule(config: DictConfig) -> Any:
    """The LightningDataModule; what belongs to `prepare` alone is left out."""
    plain = _plain(config.data)
    kind = get_class(plain.pop("_target_"))
    for key in ("name", "source", "split"):
        plain.pop(key)
    return kind(**plain, seed=config.seed)


def build_task(config: DictConfig, facts: dict[str, Any]) -> Any:
    """The LightningModule, sized from the facts that the data module knows of the data."""
    options = _plain(config.task)
    kind = get_class(options.pop("_target_"))
    model = kind(
        net=_plain(config.model),
        data=facts,
        loss=instantiate(config.loss),
        metrics=instantiate(config.metrics),
        optimizer=instantiate(config.optimizer),
        scheduler=instantiate(config.scheduler),
        monitor=config.monitor,
        **options,
    )
    if config.compile:
        model.network.compile()  # in place: the keys of the checkpoint stay as they are
    return model


def build_callbacks(config: DictConfig, folder: Path) -> list[Callback]:
    """The callbacks that are not null."""
    callbacks: list[Callback] = []
    for name, one in config.callbacks.items():
        if one is not None and (name != "progress" or config.trainer.enable_progress_bar):
            saves = name in ("checkpoint", "last")
            into = {"dirpath": str(folder / "checkpoints")} if saves else {}
            callbacks.append(instantiate(one, **into))
    return callbacks


def build_trainer(config: DictConfig, folder: Path, callbacks: list[Callback]) -> Trainer:
    """The Trainer, with loggers that write into the run folder."""
    loggers = [instantiate(one, save_dir=str(folder)) for one in config.logger.values() if one]
    environment = TorchElasticEnvironment() if is_launched() else LightningEnvironment()
    return instantiate(
        config.trainer,
        callbacks=callbacks,
        logger=loggers,
        plugins=[environment],
        default_root_dir=str(folder),
        use_distributed_sampler=False,  # the data module deals out rows itself
        _convert_="all",
    )


def best_metrics(
    trainer: Trainer, callbacks: list[Callback], config: DictConfig
) -> dict[str, float]:
    """Training and validation metrics of the epoch that the best checkpoint is from."""
    for callback in callbacks:
        if isinstance(callback, History):
            row = callback.best_row(config.monitor, config.mode)
            return {key: value for key, value in row.items() if key not in ("epoch", "step")}
    return measured(trainer)


def test_best(
    trainer: Trainer, model: LightningModule, datamodule: LightningDataModule, folder: Path
) -> dict[str, float]:
    """Metrics of the best checkpoint on the test split."""
    best = folder / "checkpoints/best.ckpt"
    if not best.is_file():
        log.warning("There is no best.ckpt: the weights as they are now are tested.")
    path = str(best) if best.is_file() else None
    results = trainer.test(model, datamodule, ckpt_path=path, verbose=False, weights_only=True)
    return dict(results[0]) if results else {}


def log_hyperparameters(trainer: Trainer, config: DictConfig, metrics: dict[str, float]) -> None:
    """Hand every logger the config; TensorBoard shows it beside the final metrics."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(_plain(config), metrics, trainer.global_step)
        else:
            logger.log_hyperparams(_plain(config))
        logger.finalize("success")


def _plain(node: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


if __name__ == "__main__":
    try:
        fit(Path(sys.argv[1]))
    except Exception as error:
        if (known := user_error(error)) is None:
            raise
        sys.exit(f"error: {known}")
