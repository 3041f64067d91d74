"""The LightningModule around any network that classifies images."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix

from ..errors import UserError
from .network import build_network
from .sharding import clip_by_norm, shard

Batch = tuple[Tensor, Tensor]
SPLITS = ("train", "val", "test")


class Classifier(LightningModule):
    """Trains a network on images and labels.

    Args:
        net: Plain values that the net is built from: `_target_` and its arguments.
        data: Plain values of the data: `classes`, `shape`, `mean`, `std`, `counts`, ….
        loss: A factory; the loss takes logits [N, K] and labels [N], and gives a scalar.
        metrics: Factories that take `num_classes`; logged in each split as `<split>/<name>`.
        optimizer: A factory: parameter groups → optimizer.
        scheduler: `factory` (optimizer → scheduler, or None), `interval`, `total_steps`.
        monitor: The metric that a plateau scheduler watches.
        class_weights: `balanced` (inverse frequency in the train split) or one number a class;
            the loss factory is given them as `weight`.
    """

    def __init__(
        self,
        net: dict[str, Any],
        data: dict[str, Any],
        loss: Callable[..., nn.Module],
        metrics: Mapping[str, Callable[..., Metric]],
        optimizer: Callable[..., Optimizer],
        scheduler: Mapping[str, Any],
        monitor: str,
        class_weights: str | Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        # Plain values only, so that a checkpoint loads with weights_only=True.
        self.save_hyperparameters({"net": net, "data": data}, logger=False)
        self.network = build_network(net, data)
        weights = weights_of(class_weights, data["counts"]["train"])
        self.loss = loss() if weights is None else loss(weight=weights)
        classes = len(data["classes"])
        measures = MetricCollection({n: make(num_classes=classes) for n, make in metrics.items()})
        self.optimizer, self.scheduler, self.monitor = optimizer, scheduler, monitor
        self.train_metrics = measures.clone(prefix="train/")
        self.val_metrics = measures.clone(prefix="val/")
        self.test_metrics = measures.clone(prefix="test/")
        # Objects, not averages of batches: exact over uneven batches and ranks.
        self.losses: Any = nn.ModuleDict({f"{s}/loss": MeanMetric() for s in SPLITS})
        self.confusion = MulticlassConfusionMatrix(classes)
        self._sharded = False

    def configure_model(self) -> None:
        """Shard the network where the strategy brings a device mesh; Lightning calls it often."""
        mesh = self.device_mesh
        if mesh is None or self._sharded:
            return
        shard(self.network, mesh)
        for metric in self.modules():
            if isinstance(metric, Metric):  # tensor parallel ranks count the same images
                metric.process_group = mesh["data_parallel"].get_group()
        self._sharded = True

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, C, H, W] → logits [N, K]."""
        return self.network(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        loss, logits = self._step(batch, "train")
        self.train_metrics.update(logits.detach(), batch[1])
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Count a batch of the validation split; returns its logits."""
        _, logits = self._step(batch, "val")
        self.val_metrics.update(logits, batch[1])
        self.confusion.update(logits, batch[1])
        return logits

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Count a batch of the test split."""
        _, logits = self._step(batch, "test")
        self.test_metrics.update(logits, batch[1])

    def on_validation_epoch_start(self) -> None:
        """Start the confusion matrix anew, and measure what is saved: the first rank's buffers.

        DDP shares the running statistics of batch normalisation by itself; sharding does not.
        """
        self.confusion.reset()
        if self._sharded:
            for buffer in self.network.buffers():
                torch.distributed.broadcast(buffer, src=0)

    def on_train_epoch_end(self) -> None:
        """Log the epoch's training metrics."""
        self._log("train", self.train_metrics)

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics."""
        self._log("val", self.val_metrics)

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self._log("test", self.test_metrics)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer, with no weight decay on biases and norms, and its scheduler."""
        weights = [p for p in self.network.parameters() if p.requires_grad]
        decayed = [p for p in weights if p.ndim > 1]
        others = [p for p in weights if p.ndim <= 1]
        optimizer = self.optimizer(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        )
        factory, interval = self.scheduler["factory"], self.scheduler["interval"]
        if factory is None:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        options = {"total_steps": steps} if self.scheduler["total_steps"] else {}
        scheduler = factory(optimizer, **options)
        config = {"scheduler": scheduler, "interval": interval, "monitor": self.monitor}
        return {"optimizer": optimizer, "lr_scheduler": config}  # type: ignore[return-value]

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip over all ranks where the network is sharded."""
        if self._sharded and gradient_clip_val and gradient_clip_algorithm != "value":
            clip_by_norm(self.network.parameters(), gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def _step(self, batch: Batch, split: str) -> tuple[Tensor, Tensor]:
        images, labels = batch
        logits = self(images)
        loss = self.loss(logits, labels)
        self.losses[f"{split}/loss"].update(loss.detach(), weight=len(labels))
        return loss, logits

    def _log(self, split: str, metrics: MetricCollection) -> None:
        # Lightning computes and resets logged metric objects, over all ranks.
        self.log(f"{split}/loss", self.losses[f"{split}/loss"], prog_bar=split == "val")
        self.log_dict(metrics, prog_bar=split == "val")


def weights_of(choice: str | Sequence[float] | None, counts: Sequence[int]) -> Tensor | None:
    """Class weights [K] whose mean over the training images is 1, or None."""
    if choice is None:
        return None
    frequency = torch.tensor(counts, dtype=torch.float)
    if choice == "balanced":
        return frequency.sum() / (len(counts) * frequency)
    if isinstance(choice, str) or len(choice) != len(counts):
        raise UserError(
            f"task.class_weights={choice}: take null, balanced, or {len(counts)} numbers."
        )
    return torch.tensor(choice, dtype=torch.float)
