"""`train`: resolve the config once, make the run folder once, start as many ranks as it wants."""

import json
import os
import re
import shlex
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ..data.prepare import prepare
from ..errors import UserError
from ..log import console, record_failure, setup_logging
from ..paths import ROOT, as_typed, find_checkpoint, from_root, run_folder_of
from .manifest import manifest

PUBLISHED = ("checkpoints/best.ckpt", "metrics.json", "history.csv")


def run(config: DictConfig) -> None:
    """The `train` stage.

    Raises:
        UserError: If the config, the data or the machine cannot do what is asked, before any
            training; or if training ended for a reason that the user can mend.
    """
    world_size = count_ranks(config.trainer)
    check_batch_size(config.data.batch_size, world_size, config.trainer.accumulate_grad_batches)
    settle_devices(config, world_size)
    resumed = checkpoint_to_resume(config)
    setup_logging()
    data = prepare(config.data, check_files=False)
    if config.monitor.startswith("val/") and not sum(data.counts["val"]):
        raise UserError(
            f"monitor={config.monitor}: the val split is empty: set monitor=train/loss mode=min."
        )
    folder = run_folder(config, resumed)
    config.run_dir, config.resume = str(folder), resumed and str(resumed)
    OmegaConf.resolve(config)
    OmegaConf.save(config, folder / "config.yaml")
    command = retyped()
    facts = {
        "command": " ".join([*command, *_quoted(resume=resumed)]),
        "seed": config.seed,
        "data": {"prepared_dir": config.data.prepared_dir, "fingerprint": data.fingerprint},
        "world_size": world_size,
    }
    with manifest(folder, facts):
        try:
            start(folder, config, world_size)
        except BaseException as error:
            record_failure(folder / "train.log", error)
            raise
    if config.publish_dir:
        publish(folder, from_root(config.publish_dir))
    summarise(folder, command)


def start(folder: Path, config: DictConfig, world_size: int) -> None:
    """Train in this process, or in one process a rank."""
    if world_size == 1:
        from .fit import fit

        fit(folder)
        return
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Ranks read config.yaml of the run folder; none reads the command line.
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(search)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        max_restarts=0,
        monitor_interval=0.5,
    )
    module = f"{__package__}.fit"
    try:
        elastic_launch(launcher, sys.executable)("-m", module, str(folder))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        raise UserError(f"rank {rank} failed with exit code {code}: see above.") from None


def count_ranks(trainer: DictConfig) -> int:
    """How many processes the trainer's config asks for.

    Raises:
        UserError: If devices and strategy do not fit each other or the machine.
    """
    devices, alone = trainer.devices, trainer.strategy == "auto"
    if devices in ("auto", -1):
        import torch

        devices = 1 if alone else torch.cuda.device_count()
        if not devices or trainer.accelerator == "cpu":
            raise UserError(
                "trainer.devices=auto counts GPUs: for ranks on a CPU say how many, "
                "trainer.accelerator=cpu trainer.devices=2"
            )
    if not isinstance(devices, int) or devices < 1:
        raise UserError(f"trainer.devices={devices}: take a number of devices, or auto.")
    if alone and devices * trainer.num_nodes > 1:
        raise UserError(f"trainer.devices={devices} needs trainer=ddp or trainer=fsdp.")
    return int(devices)


def settle_devices(config: DictConfig, world_size: int) -> None:
    """Write down what `auto` came to, so that every rank reads the same."""
    config.trainer.devices = world_size // config.trainer.num_nodes
    strategy = config.trainer.strategy
    if OmegaConf.is_dict(strategy) and "data_parallel_size" in strategy:
        if config.callbacks.get("ema"):
            raise UserError("sharded weights cannot be averaged: leave callbacks=ema out.")
        if strategy.data_parallel_size == "auto":
            strategy.data_parallel_size = world_size // strategy.tensor_parallel_size


def check_batch_size(batch_size: Any, world_size: int, accumulate: int) -> None:
    """Refuse a batch that ranks and accumulation steps cannot share equally."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f"data.batch_size={batch_size}: take a whole number above 0.")
    parts = world_size * accumulate
    if batch_size % parts:
        below, above = batch_size // parts * parts, (batch_size // parts + 1) * parts
        fits = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"data.batch_size={batch_size} cannot be shared by {world_size} ranks × {accumulate} "
            f"accumulation steps: take {fits}."
        )


def checkpoint_to_resume(config: DictConfig) -> Path | None:
    """The checkpoint that `resume` means, if any."""
    if config.resume is None:
        return None
    if config.resume != "auto":
        return find_checkpoint(config.resume, prefer="last", key="resume")
    if config.run_dir is None:
        raise UserError("resume=auto needs run_dir=<folder>, to find the run again.")
    try:
        return find_checkpoint(from_root(config.run_dir), prefer="last")
    except UserError:
        return None


def run_folder(config: DictConfig, resumed: Path | None) -> Path:
    """Make the run folder, or take the one that is resumed.

    Raises:
        UserError: If `run_dir` holds another run, or the folder cannot be written.
    """
    if config.run_dir is not None:
        folder = from_root(config.run_dir)
        if (folder / "config.yaml").exists() and resumed is None and config.resume != "auto":
            raise UserError(f"run_dir={config.run_dir} holds a run: add resume=auto to go on.")
    elif resumed is not None:
        folder = run_folder_of(resumed)
    else:
        return _new_folder(from_root(config.runs_dir) / config.name)
    _make(folder, exist_ok=True)
    return folder


def _new_folder(parent: Path) -> Path:
    """`parent/<timestamp>`, or with -1, -2, …: made exclusively, so no two runs share one."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    _make(parent, exist_ok=True)
    number = 0
    while True:
        folder = parent / (f"{stamp}-{number}" if number else stamp)
        try:
            _make(folder, exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return folder


def _make(folder: Path, exist_ok: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        raise
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}): set runs_dir=….") from error


def publish(folder: Path, target: Path) -> None:
    """Copy a finished run's model and figures; each is whole or not there."""
    missing = [name for name in PUBLISHED if not (folder / name).is_file()]
    if missing:
        raise UserError(f"publish_dir: the run left no {missing[0]} to publish.")
    target.mkdir(parents=True, exist_ok=True)
    for name in PUBLISHED:
        file = target / Path(name).name
        scratch = file.with_name(f".{file.name}.part")
        shutil.copyfile(folder / name, scratch)
        scratch.replace(file)


def retyped() -> list[str]:
    """The command of this run, quoted for a shell, without `resume` and `run_dir`."""
    hydra = HydraConfig.get()
    typed = sys.argv[1:] if hydra.mode == RunMode.RUN else list(hydra.overrides.task)
    left_out = re.compile(r"(resume|run_dir|hydra\.[\w.]+)=")
    kept = [word for word in typed if not left_out.match(word)]
    return ["python", shlex.quote(as_typed(ROOT / "train.py")), *map(shlex.quote, kept)]


def summarise(folder: Path, command: list[str]) -> None:
    """Print the last lines of a run."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    tested = {key: value for key, value in metrics.items() if key.startswith("test/")}
    lines = [
        "  ".join(f"{key} {value:.4f}" for key, value in (tested or metrics).items()),
        f"run folder  {as_typed(folder)}",
    ]
    if (folder / "checkpoints/last.ckpt").is_file():
        evaluate = ["python", shlex.quote(as_typed(ROOT / "evaluate.py")), *_quoted(run=folder)]
        lines.append(f"evaluate    {' '.join(evaluate)}")
        lines.append(f"resume      {' '.join([*command, *_quoted(resume=folder)])}")
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _quoted(**paths: Path | None) -> list[str]:
    """Overrides with paths, safe in Hydra's grammar and in a shell."""
    words = []
    for key, path in paths.items():
        if path is not None:
            text = as_typed(path).replace("\\", "\\\\").replace('"', '\\"')
            plain = re.fullmatch(r"[\w/.:-]+", text, re.ASCII)
            words.append(f"{key}={text}" if plain else shlex.quote(f'{key}="{text}"'))
    return words
