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
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ..errors import UserError, user_error
from ..log import log, setup_logging
from ..models.network import read_checkpoint, weights_in
from ..models.sharding import recompute_activations
from .callbacks import History, measured
from .checkpoints import SafeCheckpointIO
from .loggers import build_loggers, log_hyperparameters
from .resumable import Resumable


def fit(folder: Path) -> None:
    """Train, test the best checkpoint, and write metrics.json.

    Args:
        folder: A run folder that holds config.yaml.
    """
    config = OmegaConf.load(folder / "config.yaml")
    assert isinstance(config, DictConfig)
    is_first = count_ranks(config) == 1 or os.environ["RANK"] == "0"
    setup_logging(folder / "train.log" if is_first else None, terminal=is_first)
    torch.set_float32_matmul_precision(config.float32_matmul_precision)
    seed_everything(config.seed, workers=True, verbose=False)
    datamodule = build_datamodule(config)
    model = build_task(config, datamodule.facts)
    callbacks = build_callbacks(config, folder)
    if config.init_from and not config.resume:
        warm_start(model.network, Path(config.init_from), config.init_strict)
    trainer = build_trainer(config, folder, callbacks)
    count = sum(weights.numel() for weights in model.parameters())
    log.info("Run folder: %s", folder)
    log.info("Model: %s, %s parameters.", config.model._target_.rpartition(".")[2], f"{count:,}")
    try:
        trainer.fit(model, datamodule, ckpt_path=config.resume, weights_only=True)
    except ValueError as error:
        if "Tried to step" not in str(error):
            raise
        raise UserError(
            "this scheduler was laid out for fewer steps, and cannot be stretched: "
            "init_from=<run folder> starts anew from its weights."
        ) from error
    metrics = best_metrics(trainer, callbacks, config)
    if config.test:
        metrics |= test_best(trainer, model, datamodule, folder)
    if trainer.is_global_zero:
        log_hyperparameters(trainer, config, metrics)
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


def count_ranks(config: DictConfig) -> int:
    """Of the whole world."""
    return int(config.trainer.devices * config.trainer.num_nodes)


def build_datamodule(config: DictConfig) -> Any:
    """The LightningDataModule; what belongs to `prepare` alone is left out."""
    plain = _plain(config.data)
    kind = get_class(plain.pop("_target_"))
    for key in ("name", "source", "split", "strict"):
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
        optimizer=instantiate(config.optimizer, lr=scaled_lr(config)),
        scheduler=instantiate(config.scheduler),
        monitor=config.monitor,
        **options,
    )
    if config.activation_checkpointing:
        recompute_activations(model.network)
    if config.compile:
        model.network.compile()  # in place: the keys of the checkpoint stay as they are
    return model


def build_callbacks(config: DictConfig, folder: Path) -> list[Callback]:
    """The callbacks that are not null."""
    callbacks: list[Callback] = []
    for name, one in config.callbacks.items():
        if one is not None and (name != "progress" or config.trainer.enable_progress_bar):
            into = {"dirpath": str(folder / "checkpoints")} if name == "checkpoint" else {}
            callbacks.append(instantiate(one, **into))
    # Whatever it may stop, the others are done with it.
    return sorted(callbacks, key=lambda callback: isinstance(callback, Resumable))


def build_trainer(config: DictConfig, folder: Path, callbacks: list[Callback]) -> Trainer:
    """The Trainer, with loggers that write into the run folder."""
    alone = count_ranks(config) == 1
    environment = LightningEnvironment() if alone else TorchElasticEnvironment()
    return instantiate(
        config.trainer,
        callbacks=callbacks,
        logger=build_loggers(config, folder, alone or environment.global_rank() == 0),
        plugins=[environment, SafeCheckpointIO()],
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
    if not best.exists():
        log.warning("There is no best.ckpt: the weights as they are now are tested.")
    path = str(best) if best.exists() else None
    results = trainer.test(model, datamodule, ckpt_path=path, verbose=False, weights_only=True)
    return dict(results[0]) if results else {}


def _plain(node: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def scaled_lr(config: DictConfig) -> float:
    """The learning rate for this batch size, where `optimizer.lr` was found for another.

    Linear as Goyal et al. (2017, arXiv:1706.02677), or by the square root, as suits Adam
    (Malladi et al., 2022, arXiv:2205.10287).
    """
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}.get(config.lr_scaling)
    if power is None:
        raise UserError(f"lr_scaling={config.lr_scaling}: take none, sqrt or linear.")
    lr = config.optimizer.lr * (config.data.batch_size / config.lr_batch_size) ** power
    if power:
        log.info("Learning rate %g: %g scaled (%s).", lr, config.optimizer.lr, config.lr_scaling)
    return float(lr)


def warm_start(network: nn.Module, path: Path, strict: bool) -> None:
    """Take over the weights of a checkpoint, and nothing else.

    Args:
        network: What is trained.
        path: A checkpoint of this project.
        strict: Refuse weights that do not fit, by name or shape; else leave them out and say so.
    """
    saved = weights_in(read_checkpoint(path))
    own = network.state_dict()
    fits = {key: saved[key] for key in own if key in saved and saved[key].shape == own[key].shape}
    others = sorted(own.keys() ^ fits.keys() | saved.keys() ^ fits.keys())
    if others and (strict or not fits):
        raise UserError(
            f"init_from={path}: {len(others)} weights do not fit ({', '.join(others[:3])}, …): "
            "init_strict=false takes those that do."
        )
    network.load_state_dict(fits, strict=False)
    log.info("%d weights from %s.", len(fits), path)
    if others:
        log.warning("They start anew, since they do not fit: %s", ", ".join(others))


def main(folder: Path) -> None:
    """One rank of this project's launcher, which prints how the first one failed."""
    handler = get_error_handler()
    handler.initialize()
    try:
        fit(folder)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        handler.record_exception(UserError(str(known)) if (known := user_error(error)) else error)
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
