"""Pictures of the validation split in TensorBoard: confusion matrix and worst mistakes."""

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from ..evaluation.figures import confusion_figure, mistakes_figure


class Pictures(Callback):
    """Draws every few epochs; needs a module with `network` and `confusion`.

    Args:
        every_n_epochs: Epochs between two pictures.
        num_mistakes: Images in the grid, the most confident mistakes first.
    """

    def __init__(self, every_n_epochs: int = 10, num_mistakes: int = 16) -> None:
        self.every_n_epochs, self.num_mistakes = every_n_epochs, num_mistakes
        self._worst: list[tuple[float, Tensor, int, int]] = []

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Forget the mistakes of the last one."""
        self._worst = []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep this rank's worst mistakes: `outputs` are the logits of `batch`."""
        if not self._due(trainer):
            return
        images, labels = batch
        confidence, predicted = outputs.softmax(-1).max(-1)
        wrong = torch.nonzero(predicted != labels).flatten()
        top = wrong[confidence[wrong].argsort(descending=True)][: self.num_mistakes]
        rows = zip(
            confidence[top].tolist(),
            images[top].cpu(),
            labels[top].tolist(),
            predicted[top].tolist(),
            strict=True,
        )
        self._worst = sorted([*self._worst, *rows], key=lambda row: -row[0])[: self.num_mistakes]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Draw."""
        if not self._due(trainer):
            return
        matrix = pl_module.confusion.compute().cpu().numpy()  # of all ranks, so all take part
        boards = [one.experiment for one in trainer.loggers if isinstance(one, TensorBoardLogger)]
        if not boards or not trainer.is_global_zero:
            return
        classes = pl_module.network.classes
        figures = {"val/confusion": confusion_figure(matrix, classes)}
        if self._worst:
            confidence, images, labels, predicted = zip(*self._worst, strict=True)
            figures["val/worst_mistakes"] = mistakes_figure(
                torch.stack(images).numpy(),
                [classes[label] for label in labels],
                [classes[label] for label in predicted],
                confidence,
            )
        for board in boards:
            for name, figure in figures.items():
                board.add_figure(name, figure, trainer.global_step - 1)  # as its metrics

    def _due(self, trainer: Trainer) -> bool:
        last = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
        due = (trainer.current_epoch + 1) % self.every_n_epochs == 0 or last
        return due and not trainer.sanity_checking
