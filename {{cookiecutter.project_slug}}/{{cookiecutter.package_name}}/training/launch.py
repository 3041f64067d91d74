"""`train`: resolve the config once, make the run folder once, start as many ranks as it wants."""

import ctypes
import json
import os
import re
import select
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf

from ..data.folds import check_folds
from ..data.prepare import prepare
from ..errors import UserError
from ..log import console, record_failure, setup_logging
from ..models.network import read_checkpoint
from ..paths import ROOT, as_typed, find_checkpoint, from_root
from .checkpoints import SafeCheckpointIO
from .checks import check_batch_size, check_data, settle_ranks
from .folders import open_folder
from .manifest import manifest, write_manifest
from .ranks import start_ranks
from .resumable import handle_signals, leave
from .shardable import check_resumable
from .world import from_first, joined

PUBLISHED = ("checkpoints/best.ckpt", "metrics.json", "history.csv")
MODEL = ("state_dict", "hyper_parameters", "epoch", "global_step", "pytorch-lightning_version")


def run(config: DictConfig) -> None:
    """The `train` stage.

    Raises:
        UserError: If the config, the data or the machine cannot do what is asked, before any
            training; or if training ended for a reason that the user can mend.
        SystemExit: 143 or 130, if a signal ended it; then it can be resumed.
    """
    handle_signals(leave)
    end_with_dvc()
    setup_logging()
    world = joined()
    ranks = settle_ranks(config, world)
    check_batch_size(config)
    check_folds(config.data.get("fold"), config.data.get("folds"))
    if config.init_from:  # written out, so that the same command again is the same config
        config.init_from = str(find_checkpoint(config.init_from, key="init_from"))
    if config.launcher._target_:
        submit(config)
        return
    from .fit import fit

    with ExitStack() as stack:
        if world is None:
            folder = stack.enter_context(opened(config))
        else:  # rank 0 opens it, the others are told
            folder = Path(from_first(world, lambda: str(stack.enter_context(opened(config)))))
        if world is None and ranks > 1:
            start_ranks(folder, ranks)
        else:
            fit(folder)


def end_with_dvc() -> None:
    """Be sent SIGTERM should the `dvc` end that has started this: it hands on no signal itself."""
    if "DVC_STAGE" not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, see man 2 prctl
    # DVC starts a stage in this shell. Bash becomes the stage, dash stays as its parent.
    shell, parent = os.environ.get("SHELL") or "/bin/sh", os.getppid()
    with suppress(OSError):  # Linux before 5.3, or a shell that is not found: the signal alone
        if os.path.samefile(f"/proc/{parent}/exe", shell):
            status = Path(f"/proc/{parent}/status").read_text("utf-8")
            dvc = os.pidfd_open(int(re.findall(r"^PPid:\s*(\d+)$", status, re.MULTILINE)[0]))
            threading.Thread(target=_follow, args=(dvc,), daemon=True).start()


def _follow(process: int) -> None:
    select.select([process], [], [])  # until it has ended
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def opened(config: DictConfig) -> Iterator[Path]:
    """The run folder with config.yaml and run.json in it; at the end, a run's last lines."""
    data = prepare(config.data, check_files=False)
    check_data(config, data)
    with open_folder(config, data.fingerprint) as run:
        check_resumable(config, run.checkpoint)
        write_config(config, run.path, run.checkpoint)
        command = retyped()
        facts = {
            "command": " ".join([*command, *_quoted(resume=run.checkpoint)]),
            "seed": config.seed,
            "data": {
                "prepared_dir": config.data.prepared_dir,
                "fingerprint": data.fingerprint,
                "record": data.record,
            },
            "world_size": config.trainer.devices * config.trainer.num_nodes,
        }
        with manifest(run.path, facts):
            try:
                yield run.path
            except Exception as error:
                record_failure(run.path / "train.log", error)
                raise
        if config.publish_dir:
            publish(run.path, from_root(config.publish_dir))
        summarise(run.path, command)


def submit(config: DictConfig) -> None:
    """Hand the run to a cluster: its job trains from the run folder's config.yaml."""
    facts = {"command": " ".join(retyped()), "seed": config.seed}
    with open_folder(config) as run:
        write_config(config, run.path, run.checkpoint)
        write_manifest(run.path, {**facts, "status": "submitted"})
    try:
        get_method(config.launcher._target_)(run.path, config)
    except Exception as error:
        write_manifest(run.path, {**facts, "status": "failed", "error": str(error)})
        raise


def write_config(config: DictConfig, folder: Path, checkpoint: Path | None) -> None:
    """Write config.yaml: what each rank reads, with nothing left to resolve or to look for."""
    config.run_dir, config.resume = str(folder), checkpoint and str(checkpoint)
    OmegaConf.resolve(config)
    OmegaConf.save(config, folder / "config.yaml")


def publish(folder: Path, target: Path) -> None:
    """Copy a finished run's model and figures; each is whole or not there.

    Of the checkpoint what the model is: the same training gives the same file, and the optimizer's
    state, which outweighs the model, stays in the run.
    """
    missing = [name for name in PUBLISHED if not (folder / name).is_file()]
    if missing:
        raise UserError(f"publish_dir: the run left no {missing[0]} to publish.")
    best = read_checkpoint(folder / "checkpoints/best.ckpt")
    model = {key: value for key, value in best.items() if key in MODEL}
    SafeCheckpointIO().save_checkpoint(model, target / "best.ckpt")
    for name in PUBLISHED[1:]:
        file = target / name
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
    if (folder / "checkpoints/last.ckpt").exists():
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
