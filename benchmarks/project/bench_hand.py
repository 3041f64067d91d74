"""The same training as the project's, as a loop that one writes by hand over batched tensors.

python bench_hand.py <run folder of the project> <epochs> <bare?>
"""

import itertools
import json
import sys
import time
from pathlib import Path

import torch
from omegaconf import OmegaConf

from my_project.data.arrays import ImageArrays
from my_project.models.network import build_network


def main(folder: str, epochs: int, bare: bool) -> None:
    """Write samples/s of each epoch to clock.json; `bare` leaves out clipping and the schedule."""
    config = OmegaConf.load(Path(folder) / "config.yaml")
    arrays = ImageArrays(config.data.prepared_dir)
    data = {**vars(arrays.meta)}
    torch.manual_seed(0)
    network = build_network(OmegaConf.to_container(config.model), data)
    decayed = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=3e-3, fused=True
    )
    images = {k: torch.from_numpy(arrays.images[rows]) for k, rows in arrays.splits.items()}
    labels = {k: torch.from_numpy(arrays.labels[rows]) for k, rows in arrays.splits.items()}
    size, count = config.data.batch_size, len(images["train"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (count // size))
    marks = [time.perf_counter()]
    for _ in range(epochs):
        network.train()
        order = torch.randperm(count)
        for start in range(0, count - size + 1, size):
            rows = order[start : start + size]
            loss = torch.nn.functional.cross_entropy(
                network(images["train"][rows]), labels["train"][rows]
            )
            optimizer.zero_grad()
            loss.backward()
            if not bare:
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            if not bare:
                schedule.step()
        network.eval()
        correct = 0
        with torch.inference_mode():
            for start in range(0, len(images["val"]), size):
                logits = network(images["val"][start : start + size])
                correct += int((logits.argmax(1) == labels["val"][start : start + size]).sum())
        marks.append(time.perf_counter())
    speeds = [count / (b - a) for a, b in itertools.pairwise(marks)]
    Path("clock.json").write_text(json.dumps(speeds))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "bare")
