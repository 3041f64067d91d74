"""Data and models travel through DVC's remote: a folder of this user, and S3 on loopback."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
import pytest
from conftest import Bake, Run
from moto.server import ThreadedMotoServer
from PIL import Image

RAW = "data/raw/flowers"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
KEYS = {"AWS_ACCESS_KEY_ID": "key-of-the-test", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server that speaks S3, with the bucket that a fresh bake names."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket="your-bucket")
    yield url
    server.stop()


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's own accounts."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", *KEYS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def succeed(done: subprocess.CompletedProcess[str]) -> str:
    """What a command printed, where it went well."""
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def add_images(project: Path) -> None:
    """A few images of two classes."""
    random = np.random.default_rng(0)
    for name in ("rose", "tulip"):
        (project / RAW / name).mkdir(parents=True)
        for number in range(4):
            pixels = random.integers(256, size=(8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(project / RAW / name / f"{number}.png")


def make(project: Path, run: Run, *words: str) -> subprocess.CompletedProcess[str]:
    """A target of the project's Makefile, with the environment of the tests."""
    installed = f"--assume-old={sys.prefix}/.installed"
    return run(project, "make", installed, f"VENV={sys.prefix}", *words)


@pytest.fixture(scope="module")
def produced(bake: Bake, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default bake with images under DVC and a pipeline that has run, shortened; committed."""
    project = bake(tmp_path_factory.mktemp("produced"))
    add_images(project)
    assert make(project, run, "track-data").returncode != 0, "the bundled digits are no files"
    assert f"git add {RAW}.dvc" in succeed(make(project, run, "track-data", f"RAW={RAW}"))
    params = project / "params.yaml"
    text = re.sub("(?m)^(train: .*)$", r"\1 model=mlp trainer.max_epochs=10", params.read_text())
    params.write_text(text)
    succeed(run(project, "dvc", "repro", env=ONE_THREAD))
    succeed(run(project, "git", "add", "--all"))
    succeed(run(project, "git", "commit", "--quiet", "--message", "Images and a model"))
    return project


def copied(project: Path, folder: Path) -> Path:
    """A copy, for one test to change."""
    return Path(shutil.copytree(project, folder / "house" / project.name, symlinks=True))


def arrive(project: Path, clone: Path, run: Run) -> None:
    """All is there and the same in a clone, and nothing has to run."""
    assert succeed(run(clone, "dvc", "status")).strip() == "Data and pipelines are up to date."
    for name in (f"{RAW}/tulip/3.png", "artifacts/train/best.ckpt"):
        assert (clone / name).read_bytes() == (project / name).read_bytes()
    words = ("run=artifacts/train", "out_dir=again")
    succeed(run(clone, "python", "evaluate.py", *words, env=ONE_THREAD))
    before = json.loads((project / "artifacts/evaluate/metrics.json").read_text("utf-8"))
    assert json.loads((clone / "again/metrics.json").read_text("utf-8")) == before


def test_local_folder(produced: Path, run: Run, tmp_path: Path, home: Path) -> None:
    """The default remote works at once, and for a clone anywhere on the machine."""
    project, clone = copied(produced, tmp_path), tmp_path / "far" / "away" / "clone"
    succeed(run(project, "dvc", "push"))
    assert (home / "dvc-storage" / project.name).is_dir()
    succeed(run(project, "git", "clone", "--quiet", project, clone))
    succeed(run(clone, "dvc", "pull"))
    arrive(project, clone, run)
    forget(clone, "artifacts/train/best.ckpt")
    assert "not in cache" in succeed(run(clone, "dvc", "status"))
    said = succeed(run(clone, "dvc", "repro", "--pull", env=ONE_THREAD))
    assert "Running stage" not in said, "what was lost here is fetched, not trained again"
    arrive(project, clone, run)


def forget(project: Path, name: str) -> None:
    """Lose an output and its copy in the cache."""
    md5 = hashlib.md5((project / name).read_bytes()).hexdigest()
    (project / ".dvc/cache/files/md5" / md5[:2] / md5[2:]).unlink()
    (project / name).unlink()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file systems can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_remote_that_fails_costs_nothing(
    bake: Bake, run: Run, tmp_path: Path, small: Path
) -> None:
    """Full, absent or nowhere: the cause is said, and the next push does the rest."""
    project = bake(tmp_path / "house")
    add_images(project)
    (project / RAW / "rose/large.png").write_bytes(bytes(range(256)) * 2048)
    succeed(make(project, run, "track-data", f"RAW={RAW}"))
    url = ("dvc", "remote", "modify", "--local", "storage", "url")
    nowhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1", **KEYS}
    for remote, cause in {
        str(small / "storage"): "No space left on device",
        "s3://your-bucket/x": "Could not connect to the endpoint",
        "/proc/nowhere": "No such file or directory",
    }.items():
        succeed(run(project, *url, remote))
        failed = run(project, "dvc", "push", env=nowhere)
        assert failed.returncode != 0
        assert cause in failed.stderr
    succeed(run(project, *url, str(small / "storage")))
    subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
    succeed(run(project, "dvc", "push"))
    shutil.rmtree(project / RAW)
    shutil.rmtree(project / ".dvc/cache")
    succeed(run(project, "dvc", "pull", f"{RAW}.dvc"))
    assert len(list((project / RAW).rglob("*.png"))) == 9


def test_without_git_or_a_remote_it_is_said(bake: Bake, run: Run, tmp_path: Path) -> None:
    """One line says what to do, and training goes on without both."""
    project = bake(tmp_path / "house")
    add_images(project)
    (project / ".dvc/config").write_text("[core]\n    analytics = false\n")
    assert "dvc remote add -d" in run(project, "dvc", "push").stderr
    shutil.rmtree(project / ".git")
    for words in (["repro"], ["track-data", f"RAW={RAW}"]):
        assert "error: DVC needs a git repository: git init" in make(project, run, *words).stderr
    assert "not a git repository" in make(project, run, "release", "VERSION=v1.0.0").stderr
    succeed(run(project, "python", "train.py", "debug=fast", "model=mlp", env=ONE_THREAD))


@pytest.mark.usefixtures("no_keys")
def test_s3(produced: Path, bake: Bake, run: Run, tmp_path: Path, endpoint: str) -> None:
    """Endpoint and keys come from the environment, or from a file that git ignores."""
    project, clone = copied(produced, tmp_path), tmp_path / "clone"
    config = bake(tmp_path / "other", dvc_remote="s3") / ".dvc/config"
    shutil.copy(config, project / ".dvc/config")
    succeed(run(project, "git", "commit", "--quiet", "--all", "--message", "Store it in S3"))
    assert "Unable to locate credentials" in run(project, "dvc", "push").stderr
    succeed(run(project, "dvc", "push", env={"AWS_ENDPOINT_URL": endpoint, **KEYS}))
    succeed(run(project, "git", "clone", "--quiet", project, clone))
    for key, value in {
        "endpointurl": endpoint,
        "access_key_id": KEYS["AWS_ACCESS_KEY_ID"],
        "secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"],
    }.items():
        succeed(run(clone, "dvc", "remote", "modify", "--local", "storage", key, value))
    succeed(run(clone, "dvc", "pull"))
    arrive(project, clone, run)
    changed = succeed(run(clone, "git", "status", "--porcelain")).split()
    assert changed == ["??", "again/"], "nothing of the keys is for git"
