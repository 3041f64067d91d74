"""What a run writes down, and what ends it early."""

import csv
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.profiler import profile, schedule, tensorboard_trace_handler

from ..errors import UserError, nearest
from ..log import log

SPLITS = ("train", "val", "test")
STEP_OUTPUT = Tensor | Mapping[str, Any] | None


class History(Callback):
    """One row an epoch in history.csv, one line in the log.

    Rows are written when the next epoch starts or training ends: only then do the figures of
    training stand beside those of validation.

    Attributes:
        rows: What was written, with what an earlier part of a resumed run wrote before.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._pending: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read what a resumed run has written."""
        self.file = Path(trainer.default_root_dir) / "history.csv"
        if stage == "fit" and self.file.is_file():
            with self.file.open(newline="", encoding="utf-8") as stream:
                self.rows = [_numbers(row) for row in csv.DictReader(stream)]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up an epoch that a resumed run has begun."""
        self._pending = trainer.current_epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the epoch before."""
        if self._pending != trainer.current_epoch:
            self._write(trainer)
        self._pending = trainer.current_epoch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the last epoch."""
        self._write(trainer)

    def best_row(self, monitor: str, mode: str) -> dict[str, float]:
        """The row of the best checkpoint; the last one where `monitor` was never measured."""
        measured = [row for row in self.rows if monitor in row]
        if not measured:
            return self.rows[-1] if self.rows else {}
        choose = max if mode == "max" else min
        return choose(measured, key=lambda row: row[monitor])

    def _write(self, trainer: Trainer) -> None:
        if self._pending is None:
            return
        epoch, self._pending = self._pending, None
        metrics = measured(trainer)
        self.rows = [row for row in self.rows if row["epoch"] < epoch]
        self.rows.append({"epoch": epoch, "step": trainer.global_step, **metrics})
        if not trainer.is_global_zero:
            return
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        with self.file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, columns, restval="")
            writer.writeheader()
            writer.writerows(self.rows)
        shown = "  ".join(f"{key} {value:.4g}" for key, value in metrics.items())
        log.info("epoch %d/%s  %s", epoch + 1, trainer.max_epochs, shown)


class MonitorCheck(Callback):
    """Ends the run where `monitor` is not among the metrics, before the first epoch if it can.

    Args:
        monitor: The metric that chooses the best checkpoint.
    """

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the first validation, the sanity check included."""
        known = sorted(measured(trainer))
        # Training has not been measured yet in the sanity check, nor in the first validation.
        if self.monitor in known or self.monitor.startswith("train/"):
            return
        raise UserError(
            f"monitor={self.monitor}: there is no such metric.{nearest(self.monitor, known)} "
            f"({', '.join(known)})"
        )


class FiniteLoss(Callback):
    """Ends the run, with an error, when the loss is NaN or infinite.

    The loss is summed up on the device and read every few steps and before each validation, so
    that no step waits for it and no checkpoint is written after it.

    Args:
        every_n_steps: Batches between two looks.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        self.every_n_steps = every_n_steps
        self._sum: Tensor | float = 0.0

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Add up, and look at every n-th batch and the last one."""
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self._sum = self._sum + loss.detach()  # NaN and infinity stay in a sum
        if (batch_idx + 1) % self.every_n_steps == 0 or trainer.is_last_batch:
            self._look(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look before a checkpoint could be written."""
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        finite = bool(torch.isfinite(torch.as_tensor(self._sum)))
        self._sum = 0.0
        if not finite:
            raise UserError(
                f"the loss is not finite near step {trainer.global_step}: training stopped, its "
                "checkpoints are from before. Try a lower optimizer.lr, or "
                "trainer.detect_anomaly=true."
            )


class EMA(WeightAveraging):
    """Validates, tests and saves an exponential moving average of weights and buffers.

    The decay starts low, (1 + n) / (10 + n) after n steps, so that the average of a short run is
    not held back by the initial weights (as TensorFlow's ExponentialMovingAverage does).

    Args:
        decay: Share of the average that a step keeps, at most.
    """

    def __init__(self, decay: float = 0.99) -> None:
        def average(mean: Tensor, current: Tensor, count: Tensor) -> Tensor:
            share = ((1 + count) / (10 + count)).clamp(max=decay)
            return share * mean + (1 - share) * current

        super().__init__(use_buffers=True, avg_fn=average)
        # The task overrides configure_model for FSDP alone, which `launch` refuses beside this.
        warnings.filterwarnings("ignore", "You're using the WeightAveraging callback with a model")


class Profile(Callback):
    """Writes a torch.profiler trace of a few training steps into <run folder>/tensorboard.

    Args:
        skip: Batches before it, while caches and allocators settle.
        steps: Batches that are recorded.
    """

    def __init__(self, skip: int = 5, steps: int = 10) -> None:
        self.skip, self.steps = skip, steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the profiler; it records later."""
        folder = Path(trainer.default_root_dir) / "tensorboard"
        self.profiler = profile(
            schedule=schedule(wait=self.skip - 1, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=tensorboard_trace_handler(str(folder), f"rank{trainer.global_rank}"),
            record_shapes=True,
            profile_memory=True,
        )
        self.profiler.start()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count a step."""
        self.profiler.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop, and print the most expensive operators."""
        self.profiler.stop()
        key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self.profiler.key_averages().table(sort_by=key, row_limit=10)
        if trainer.is_global_zero:
            log.info("The ten most expensive operators:\n%s", table)


def measured(trainer: Trainer) -> dict[str, float]:
    """The metrics of the splits, training first; what else is logged is left out."""
    values = trainer.callback_metrics
    return {k: v.item() for s in SPLITS for k, v in values.items() if k.startswith(f"{s}/")}


def _numbers(row: dict[str, str]) -> dict[str, float]:
    numbers = {key: float(value) for key, value in row.items() if value}
    return {**numbers, "epoch": int(numbers["epoch"]), "step": int(numbers["step"])}
