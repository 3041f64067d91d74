"""A callback that brings a run to an end in the way that a test asks for."""

import os
import signal
import time
from typing import Any

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer


class Trouble(Callback):
    """Does at a batch's end what TROUBLE says: `<rank> <epoch> <batch> <what>`, or `sanity`.

    `dvc` and `group` send SIGTERM to the dvc that has started the run, or to all of its group.
    The environment says it, not the config: a resumed run has the config of the first one.
    """

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if os.environ.get("TROUBLE") == "sanity":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        place, _, what = os.environ.get("TROUBLE", "").rpartition(" ")
        if place == f"{trainer.global_rank} {trainer.current_epoch} {batch_idx}":
            if what == "raise":
                raise RuntimeError("trouble in a step")
            if what == "wait":
                time.sleep(5)
                return
            if what == "dvc":
                next(p for p in psutil.Process().parents() if "dvc" in p.cmdline()).terminate()
            elif what == "group":
                os.killpg(0, signal.SIGTERM)
            else:
                os.kill(os.getpid(), getattr(signal, what))
