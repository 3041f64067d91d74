"""What makes a run one that can be stopped anywhere and continued as if it had not been."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from ..log import log

SIGNALS = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")  # SIGUSR1: SLURM's usual warning
    if hasattr(signal, name)
]
NOTHING, SAVE = -1, 0  # what a rank may ask for, beside a signal's number: to save and go on


def exit_code(signum: int) -> int:
    """130 after Ctrl-C, 143 after SIGTERM and what stands for it."""
    return 128 + (signum if signum == signal.SIGINT else signal.SIGTERM)


def leave(signum: int, frame: FrameType | None) -> None:
    """A signal handler for the time when there is nothing to save."""
    sys.exit(exit_code(signum))


def handle_signals(handler: Any) -> None:
    """Give the signals that end a run to `handler`; only a main thread may.

    What is ignored stays so: nohup asks for it.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)


class Resumable(Callback):
    """Keeps checkpoints/last.ckpt, and obeys signals.

    A checkpoint is taken before a batch, when everything that belongs to the batch before is
    done: the optimizer's step, a validation, the scheduler. With a data module that knows which
    batches were read, and seeds each step, a continued run computes what an uninterrupted one
    does, bit for bit on a CPU.

    On SIGTERM, SIGUSR1 or Ctrl-C all ranks agree at a batch, save, and exit with 143 (130 after
    Ctrl-C; a second one ends at once). A validation that is under way ends first.

    Args:
        every_n_minutes: Longest time between two savings within an epoch.
    """

    def __init__(self, every_n_minutes: float = 30) -> None:
        self.every_n_minutes = every_n_minutes
        self._asked = 0  # the signal that this rank was sent
        self._stopped_early = False
        self._before_batch = False
        self._metrics: dict[str, Tensor] = {}
        self._counts: dict[str, dict[str, Any]] = {}
        self._votes: Any = None
        self._pending: tuple[Any, Tensor] | None = None

    # --- signals ---------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning's own handler, set just before, would call a collective; nothing to save."""
        handle_signals(leave)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As above; training is over, and last.ckpt says so."""
        handle_signals(leave)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._asked == signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = self._asked or signum

    # --- training --------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare to vote: through gloo, so that no GPU is waited for."""
        self._saved_at = time.monotonic()
        self._launcher = os.getppid()
        if trainer.world_size > 1:
            self._votes = dist.new_group(backend="gloo")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on from where the checkpoint was taken."""
        # The loader was made to count the steps, before there was a state to give it.
        trainer.fit_loop._load_combined_loader_states()
        # Lightning counts the batch before which the checkpoint was taken; it was not trained on.
        trainer.fit_loop.epoch_loop.batch_progress.total.reset_on_restart()
        # And it leaves out a plateau scheduler's step for want of the metrics; here they are.
        trainer.callback_metrics.update(self._metrics)
        trainer.fit_loop._restarting = False
        self._restore_counts(trainer, pl_module)
        handle_signals(self._note)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Stop or save where all ranks agree."""
        if batch_idx % trainer.accumulate_grad_batches == 0:  # no gradient is under way
            agreed = self._agree()
            if agreed >= SAVE or (batch_idx == 0 and trainer.current_epoch):  # an epoch has ended
                self._save(trainer, before_batch=True)
            if agreed > SAVE:
                self._exit(trainer, agreed)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end, with why it ended."""
        self._stopped_early = trainer.should_stop
        self._save(trainer)
        handle_signals(leave)
        if agreed := self._count_votes(self._asked):
            self._exit(trainer, agreed)

    def _agree(self) -> int:
        """The signal that any rank was sent, SAVE, or NOTHING: the same on all ranks.

        Ranks learn of it one batch later, so that none waits for another.
        """
        due = time.monotonic() - self._saved_at > 60 * self.every_n_minutes
        vote = self._asked or (SAVE if due else NOTHING)
        if self._votes is None:
            return vote
        if os.getppid() != self._launcher:  # it was killed: nobody else would end this rank
            vote = vote if vote > SAVE else int(signal.SIGTERM)
        before, votes = self._pending, torch.tensor(vote)
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._votes, async_op=True)
        self._pending = (work, votes)
        if before is None:
            return NOTHING
        before[0].wait()
        return int(before[1])

    def _count_votes(self, vote: int) -> int:
        if self._votes is None:
            return vote
        votes = torch.tensor(vote)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._votes)
        return int(votes)

    def _exit(self, trainer: Trainer, signum: int) -> None:
        name = signal.Signals(signum).name
        log.info(
            "%s: saved at epoch %d, step %d.", name, trainer.current_epoch, trainer.global_step
        )
        sys.exit(exit_code(signum))

    # --- the checkpoint --------------------------------------------------------------------

    def _save(self, trainer: Trainer, before_batch: bool = False) -> None:
        self._saved_at = time.monotonic()
        self._before_batch = before_batch
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            path = Path(trainer.default_root_dir) / "checkpoints/last.ckpt"
            self._metrics = {k: v.cpu() for k, v in trainer.callback_metrics.items()}
            self._counts = counts_of(trainer.lightning_module)
            trainer.save_checkpoint(path)
            self._counts, self._before_batch = {}, False

    def state_dict(self) -> dict[str, Any]:
        """Why training ended, if it did; what was measured last, and is being counted now."""
        kept = {"stopped_early": self._stopped_early, "metrics": self._metrics}
        return {**kept, "counts": self._counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the figures back; `on_train_start` hands them on."""
        self._metrics, self._counts = state_dict["metrics"], state_dict["counts"]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A run that early stopping has ended stays ended: Lightning does not begin an epoch."""
        trainer.should_stop = checkpoint["callbacks"][self.state_key]["stopped_early"]

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Lightning would count a step of its loggers twice that it believes unfinished."""
        if self._before_batch and trainer.accumulate_grad_batches == 1:
            checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    def _restore_counts(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counts, self._counts = self._counts, {}
        share = trainer.distributed_sampler_kwargs or {"rank": 0}  # one for tensor parallel ranks
        for name, metric in metrics_of(pl_module).items():
            if name in counts:
                # On all ranks: those that report a metric, or save it, do so together.
                metric._update_count = 1
                if share["rank"] == 0:  # what it has counted is the sum over all shares
                    for state, value in counts[name].items():
                        there = value.to(pl_module.device)
                        several = isinstance(getattr(metric, state), list)
                        setattr(metric, state, [there] if several else there)


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """The metrics below a module, by name, with up-to-date states."""
    for collection in module.modules():
        if isinstance(collection, MetricCollection):
            collection.values()  # metrics that share their state are given it
    return {name: m for name, m in module.named_modules() if isinstance(m, Metric)}


def counts_of(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What the metrics have counted and not yet reported, over all ranks."""
    counts = {}
    for name, metric in metrics_of(module).items():
        if metric.update_called:
            with metric.sync_context():
                states = metric.metric_state.items()
                counts[name] = {key: dim_zero_cat(value).clone() for key, value in states}
    return counts
