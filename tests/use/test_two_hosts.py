"""One training on two hosts: network namespaces of this one, joined by a cable."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TRAINING = (
    "train.py model=mlp trainer.max_epochs=2 trainer=ddp trainer.accelerator=cpu trainer.devices=1"
).split()
FIRST = "10.213.7.1"  # only ever seen within the two namespaces


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces; each has one network card, which is named like it."""
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed: apt-get install iproute2")
    names = [f"host{number}-{os.getpid()}" for number in (1, 2)]

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")

    try:
        for name in names:
            ip("netns", "add", name)
        first, second = names
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "cable", "netns", second)
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.213.7.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def test_two_hosts_train_as_one(hosts: list[str], project: Path, tmp_path: Path) -> None:
    """One rank each, one run folder, and both commands end well."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launcher += [f"--master-addr={FIRST}", "--master-port=29500"]
    training = [*TRAINING, f"runs_dir={tmp_path}/runs"]
    processes = [
        subprocess.Popen(
            [*f"ip netns exec {host}".split(), *launcher, f"--node-rank={rank}", *training],
            cwd=project,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.terminate()
            process.wait(timeout=60)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    (folder,) = (tmp_path / "runs/digits").iterdir()
    facts = json.loads((folder / "run.json").read_text("utf-8"))
    assert (facts["status"], facts["world_size"]) == ("finished", 2)
    assert json.loads((folder / "metrics.json").read_text("utf-8"))["test/acc"] > 0.5
    # The first rank alone speaks, on its host.
    assert "epoch 2/2" in said[0]
    assert "epoch 2/2" not in said[1]
