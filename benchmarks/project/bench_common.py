"""The common pattern under Lightning: samples one by one, metric objects logged every step.

python bench_common.py <run folder of the project> <epochs> <training images in an epoch>
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_data import EpochClock
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import OmegaConf
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from my_project.data.arrays import ImageArrays
from my_project.models.network import build_network


class Samples(Dataset[Any]):
    """One image at a time: PIL, then a float tensor, then normalised."""

    def __init__(self, arrays: ImageArrays, split: str) -> None:
        rows = arrays.splits[split]
        self.images, self.labels = np.array(arrays.images[rows]), arrays.labels[rows]
        self.mean, self.std = (torch.tensor(x).view(-1, 1, 1) for x in ([0.13], [0.31]))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        image = Image.fromarray(self.images[index, 0])
        pixels = torch.from_numpy(np.array(image)).unsqueeze(0).to(torch.float32).div(255)
        return (pixels - self.mean) / self.std, int(self.labels[index])


class Pattern(LightningModule):
    """Metrics updated and logged every step."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network
        self.train_acc, self.val_acc = (MulticlassAccuracy(10) for _ in range(2))
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """One step."""
        return self._step(batch, "train", self.train_loss, self.train_acc)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """One step."""
        self._step(batch, "val", self.val_loss, self.val_acc)

    def _step(self, batch: Any, split: str, mean: MeanMetric, acc: Any) -> torch.Tensor:
        logits = self.network(batch[0])
        loss = torch.nn.functional.cross_entropy(logits, batch[1])
        mean(loss)
        acc(logits.argmax(1), batch[1])
        on_step = split == "train"
        self.log(f"{split}/loss", mean, on_step=on_step, on_epoch=True, prog_bar=True)
        self.log(f"{split}/acc", acc, on_step=on_step, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(folder: str, epochs: int, samples: int) -> None:
    """Write samples/s of each epoch to clock.json."""
    config = OmegaConf.load(Path(folder) / "config.yaml")
    arrays = ImageArrays(config.data.prepared_dir)
    size = config.data.batch_size
    network = build_network(OmegaConf.to_container(config.model), vars(arrays.meta)).net
    out = Path(folder) / "common"
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=TensorBoardLogger(out),
        callbacks=[
            EpochClock("clock.json", samples),
            ModelCheckpoint(out, monitor="val/acc", mode="max", save_last=True),
            RichProgressBar(),
        ],
    )
    loaders = [
        DataLoader(Samples(arrays, split), size, shuffle=split == "train")
        for split in ("train", "val")
    ]
    trainer.fit(Pattern(network), *loaders)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
