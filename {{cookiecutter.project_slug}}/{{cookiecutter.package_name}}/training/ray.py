"""`launcher=ray`: one training by Ray Train, or a sweep whose runs share a Ray.

Ranks and runs are processes of their own, started by Ray's workers: there a signal reaches the
main thread, and what Ray has set up in its worker is not in the way. All machines see the
project and the run folder at the same path.
"""

import logging
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from ..cli import at_end
from ..errors import UserError
from ..log import console
from ..paths import ROOT, as_typed
from .manifest import read_manifest, write_manifest

STOPPED = (130, 143)  # exit codes of a run that was asked to stop, and saved
_jobs: dict[Future[int], Path] = {}  # an exit code to come, and the run folder
_stopped: list[int] = []  # the exit code, once a signal was received


def submit(folder: Path, config: DictConfig) -> None:
    """Train by Ray Train and wait; in a sweep, only start.

    Args:
        folder: The run folder.
        config: Of the run, resolved.

    Raises:
        UserError: If there is no such Ray, it has not what the run needs, or the run failed.
        SystemExit: 143 or 130 where a signal ended the run.
    """
    import ray

    from .resumable import handle_signals  # brings torch, which Ray's workers do without

    leave(*_stopped)
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if sweep and config.launcher.nodes > 1:
        raise UserError(f"launcher.nodes={config.launcher.nodes}: a sweep's runs take one node.")
    connect(config.launcher.address)
    handle_signals(ask_to_stop)  # in place of what Ray, or `launch`, has set
    gpus = config.trainer.accelerator != "cpu" and "GPU" in ray.cluster_resources()
    needs = {"CPU": config.launcher.cpus} | ({"GPU": 1} if gpus else {})
    ranks = config.trainer.devices * (1 if sweep else config.launcher.nodes)
    check_resources(needs, ranks, config.launcher.address)
    for old in (folder / "stop", *folder.glob("ray/rank-*.log")):  # of an earlier part
        old.unlink(missing_ok=True)
    if sweep:
        start = ray.remote(
            num_cpus=needs["CPU"] * ranks,
            num_gpus=needs.get("GPU", 0) * ranks,
            max_retries=config.launcher.retries,
        )(run_job)
        if not _jobs:
            at_end.push(_finish_sweep)
        _jobs[start.remote(str(folder), "output.log", {}).future()] = folder
        return
    # In a thread, so that the main one hears signals.
    executor = ThreadPoolExecutor(1)
    _jobs[executor.submit(train, folder, config.launcher, needs, ranks)] = folder
    ((code, said),) = finish(sweep=False)
    if code == 1:
        raise UserError(said)
    leave(code)


def _finish_sweep(kind: type[BaseException] | None, *_: object) -> None:
    """Wait for a sweep's runs; a run that could not be given to Ray has said so by itself."""
    codes = [code for code, _ in finish()]
    if kind is None:
        if failed := codes.count(1):
            sys.exit(f"error: {failed} of the sweep's runs failed: see above.")
        leave(max(codes, default=0))


def leave(code: int = 0) -> None:
    """Exit with the code of a run that was stopped; 130 if it was by Ctrl-C here."""
    if code:
        sys.exit(_stopped[0] if _stopped else code)


def connect(address: str | None) -> None:
    """Join the Ray at `address`, or start one that ends with this process."""
    import ray

    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    own = {} if address else {"include_dashboard": False}
    try:
        host, _, port = (address or "").rpartition(":")
        if host:
            socket.create_connection((host, int(port)), timeout=10).close()  # Ray waits for minutes
        # The runs' own lines are shown, without Ray's.
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"launcher.address={address}: no Ray answers there ({reason})") from error


def check_resources(needs: dict[str, float], ranks: int, address: str | None) -> None:
    """Refuse what a Ray of this machine could never place; one elsewhere may grow."""
    import ray

    there = ray.cluster_resources()
    for kind, share in needs.items():
        if address is None and share * ranks > there.get(kind, 0):
            raise UserError(
                f"{ranks} ranks need {share * ranks:g} {kind}s, this Ray has "
                f"{there.get(kind, 0):g}: set trainer.devices, launcher.cpus or launcher.address."
            )


def ask_to_stop(signum: int, frame: object) -> None:
    """On a first signal let all runs save and end; on a second one end at once."""
    from .resumable import exit_code

    if _stopped:
        os._exit(exit_code(signum))  # no thread is waited for
    _stopped.append(exit_code(signum))
    for folder in _jobs.values():
        (folder / "stop").touch()


def finish(sweep: bool = True) -> list[tuple[int, str]]:
    """Wait for what was given to Ray, and show how it goes and ends."""
    waiting, ends = set(_jobs), []
    shown: dict[Path, int] = {}
    while waiting:
        done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
        for folder in _jobs.values():
            show(folder, shown)
        for job in done:
            folder = _jobs.pop(job)
            (folder / "stop").unlink(missing_ok=True)
            code, said = how_it_ended(job, folder)
            ends.append((code, said))
            if sweep:
                state = {0: "finished", 1: f"failed: {said}"}.get(code, "stopped")
                console.print(f"{as_typed(folder)}  {state}", highlight=False, markup=False)
    return ends


def how_it_ended(job: Future[int], folder: Path) -> tuple[int, str]:
    """A run's exit code, 1 for any failure, and what made it fail; run.json is told that too."""
    try:
        code = job.result()
        if code in (0, *STOPPED):
            return code, ""
        said = last_line((folder / "output.log").read_text(encoding="utf-8", errors="replace"))
    except Exception as error:  # of Ray's, or what `train` raised
        said = last_line(str(getattr(error, "cause", None) or error))
    record = read_manifest(folder)
    if record.get("status") != "failed":  # it could not say so itself
        write_manifest(folder, {**record, "status": "failed", "error": said})
    return 1, said


def show(folder: Path, shown: dict[Path, int]) -> None:
    """Print the lines that ranks have written since the last look."""
    for file in sorted(folder.glob("ray/rank-*.log")):
        with file.open("rb") as stream:
            stream.seek(shown.get(file, 0))
            text = stream.read()
        text = text[: text.rfind(b"\n") + 1]
        shown[file] = shown.get(file, 0) + len(text)
        print(text.decode(errors="replace"), end="", flush=True)


def train(folder: Path, launcher: DictConfig, needs: dict[str, float], ranks: int) -> int:
    """Run Ray Train; returns 0, or the exit code of a run that was asked to stop."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        rank,
        train_loop_config={"folder": str(folder)},
        torch_config=TorchConfig(backend="gloo"),  # unused: ranks make a group of their own
        scaling_config=ScalingConfig(
            num_workers=ranks,
            use_gpu="GPU" in needs,
            resources_per_worker=needs,
            placement_strategy="STRICT_PACK" if launcher.nodes == 1 else "PACK",
        ),
        run_config=RunConfig(
            name="train",
            storage_path=f"{folder}/ray",
            failure_config=FailureConfig(max_failures=launcher.retries),
        ),
    )
    try:
        return trainer.fit().return_value
    except WorkerGroupError as error:
        failures = sorted(error.worker_failures.items())
        ends = [f"rank {number}: {last_line(str(failure))}" for number, failure in failures]
        raise UserError("; ".join(ends)) from None


def last_line(text: str) -> str:
    """The last line that says something, without what marks it as an error."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "no reason given"


# --- in Ray's workers ------------------------------------------------------------------------


def rank(config: dict[str, str]) -> int:
    """One rank, in a world that is made of what Ray says of this worker."""
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    context = get_context()
    number, count = context.get_world_rank(), context.get_world_size()
    with socket.socket() as free:
        free.bind(("", 0))
        port = broadcast_from_rank_zero(free.getsockname()[1])
    world = {
        "TORCHELASTIC_RUN_ID": Path(config["folder"]).name,
        "RANK": str(number),
        "LOCAL_RANK": str(context.get_local_rank()),
        "GROUP_RANK": str(context.get_node_rank()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": os.environ["MASTER_ADDR"],
        "MASTER_PORT": str(port),
    }
    code = run_job(config["folder"], f"ray/rank-{number}.log", world)
    if code not in (0, *STOPPED):
        raise RuntimeError(f"exit code {code}, see above")
    return code


def run_job(folder: str, log: str, world: dict[str, str]) -> int:
    """Run the command of a run, or of a rank of it, until it ends; returns its exit code."""
    run = Path(folder)
    command = [sys.executable, str(ROOT / "train.py"), "--config-path", folder]
    command += ["--config-name", "config", "resume=auto", "launcher._target_=null"]
    (run / log).parent.mkdir(exist_ok=True)
    with (run / log).open("ab") as stream:
        job = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **world},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        asked = False
        while (code := job.poll()) is None:
            if not asked and (asked := (run / "stop").exists()):
                job.terminate()  # SIGTERM: it saves and ends
            time.sleep(0.2)
    return code
