"""What `launcher=kubernetes` writes is what Kubernetes and Kubeflow Trainer take."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Run, composed, path_override, python_here
from omegaconf import OmegaConf

from {{ cookiecutter.package_name }}.training import kubernetes

IMAGE = ["launcher=kubernetes", "launcher.image=registry.example/team/project:1.0"]
WORDS = [*IMAGE, "launcher.claim=shared"]
TWO_NODES = ["trainer=ddp", "trainer.devices=4", "launcher.nodes=2", "trainer.accelerator=gpu"]


def documents(folder: Path) -> dict[str, Any]:
    """A manifest's documents by kind."""
    text = (folder / "kubernetes.yaml").read_text(encoding="utf-8")
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def only_run(folder: Path) -> Path:
    (config,) = folder.glob("runs/*/*/config.yaml")
    return config.parent


@pytest.fixture
def manifest(run: Run, tmp_path: Path) -> dict[str, Any]:
    """That of a training on two nodes with four GPUs each."""
    done = run("train.py", *WORDS, *TWO_NODES, 'name="Digits v1.5_ä"')
    assert done.returncode == 0, done.stderr
    return documents(only_run(tmp_path))


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (job,) = manifest["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


def test_kubeflow_trainer_takes_it(manifest: dict[str, Any]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for kind in ("TrainingRuntime", "TrainJob"):
        parsed = getattr(models, f"TrainerV1alpha1{kind}").from_dict(manifest[kind])
        assert parsed.to_dict() == manifest[kind]  # what has no place in the schema is left out


def test_kubernetes_takes_it(manifest: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    (job,) = manifest["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    container = job["template"]["spec"]["template"]["spec"]["containers"][0]
    container["resources"] = manifest["TrainJob"]["spec"]["trainer"]["resourcesPerNode"]
    batch = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}}
    for one in (manifest["ConfigMap"], {**batch, **job["template"]}):
        validator.validate(one, validator.latest_version(), strict=True)


def test_the_job_runs_what_was_resolved(manifest: dict[str, Any], tmp_path: Path) -> None:
    job, run = manifest["TrainJob"]["spec"], only_run(tmp_path)
    assert (job["trainer"]["numNodes"], job["trainer"]["numProcPerNode"]) == (2, 4)
    assert job["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 4
    sent = OmegaConf.create(manifest["ConfigMap"]["data"]["config.yaml"])
    assert sent.run_dir == f"/app/runs/Digits v1.5_ä/{run.name}"
    here = OmegaConf.load(run / "config.yaml")
    assert OmegaConf.merge(here, {"run_dir": sent.run_dir}) == sent
    # The words are those of a command that reads this config.
    torchrun, script, _, folder, _, name, *overrides = job["trainer"]["command"]
    assert (torchrun, script) == ("torchrun", "train.py")
    mounts = {one["mountPath"]: one for one in pod_of(manifest)["containers"][0]["volumeMounts"]}
    assert manifest["ConfigMap"]["data"].keys() == {f"{name}.yaml"}
    assert mounts[folder]["name"] == "config"
    assert {"/app/runs", "/app/data"} < mounts.keys()
    assert mounts["/dev/shm"]["name"] == "shm"  # noqa: S108
    assert overrides == ["resume=auto", "launcher._target_=null"]


def test_names_fit_together(manifest: dict[str, Any]) -> None:
    names = {one["metadata"]["name"] for one in manifest.values()}
    (name,) = names
    assert re.fullmatch(r"digits-v1-5-[0-9-]{19}", name)
    assert manifest["TrainJob"]["spec"]["runtimeRef"]["name"] == name
    claims = [one.get("persistentVolumeClaim") for one in pod_of(manifest)["volumes"]]
    assert {"claimName": "shared"} in claims


@pytest.mark.parametrize(
    ("name", "stamp", "expected"),
    [
        ("digits", "2026-01-02_03-04-05-1", "digits-2026-01-02-03-04-05-1"),
        ("9 Lives!", "x", "run-9-lives-x"),
        ("日本", "本", "run"),
        ("a" * 90, "b" * 90, f"{'a' * 15}-{'b' * 24}"),
        ("-", "2026", "run-2026"),
    ],
)
def test_any_name_becomes_one_that_kubernetes_takes(name: str, stamp: str, expected: str) -> None:
    job = kubernetes.job_name(name, stamp)
    assert job == expected
    assert re.fullmatch(kubernetes.LABEL, job)
    assert len(job) <= kubernetes.LONGEST


def test_a_sweep_on_cpus_is_a_manifest_each(run: Run, tmp_path: Path) -> None:
    done = run("train.py", *WORDS, "trainer=cpu", "seed=1,2", "-m")
    assert done.returncode == 0, done.stderr
    runs = sorted(tmp_path.glob("runs/digits/*"))
    manifests = [documents(folder) for folder in runs]
    assert len({one["TrainJob"]["metadata"]["name"] for one in manifests}) == 2
    for number, (folder, one) in enumerate(zip(runs, manifests, strict=True), start=1):
        assert f"seed: {number}\n" in one["ConfigMap"]["data"]["config.yaml"]
        limits = one["TrainJob"]["spec"]["trainer"]["resourcesPerNode"]["limits"]
        assert limits["nvidia.com/gpu"] == 0
        assert f"kubectl apply -f {folder.relative_to(tmp_path)}/kubernetes.yaml" in done.stdout


def test_odd_values_keep_their_type() -> None:
    odd = ["launcher.claim='1e3'", "launcher.memory='1e3'", "launcher.namespace=y", "name='07'"]
    config = composed("train", *IMAGE, *odd)
    OmegaConf.resolve(config)
    text = kubernetes.render(config, "job", "stamp")
    assert 'claimName: "1e3"' in text
    assert 'memory: "1e3"' in text
    assert 'namespace: "y"' in text
    assert "07/stamp" in text


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("launcher.claim=My_Claim", "launcher.claim=My_Claim: .*lower-case"),
        ("launcher.namespace=a.b", "launcher.namespace=a.b: "),
        ("launcher.image='a b'", "launcher.image=a b: "),
        ("launcher.image=null", "launcher.image=None: "),
        ("launcher.root=app", "launcher.root=app: .*absolute"),
        ("launcher.memory=lots", "launcher.memory=lots: .*16Gi"),
        ("launcher.restarts=-1", "launcher.restarts=-1: .*from 0"),
        ("launcher.nodes=0", "nodes=0"),
        ("trainer.devices=auto", "trainer.devices=auto"),
        ("trainer.devices=two", "trainer.devices=two"),
        ("init_from={checkpoint}", "init_from=.*on this machine"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(
    word: str, said: str, run: Run, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "weights.ckpt"
    checkpoint.touch()
    done = run("train.py", *WORDS, *TWO_NODES, word.format(checkpoint=checkpoint))
    assert done.returncode == 1
    assert re.search(f"^error: .*{said}", done.stderr.splitlines()[-1])
    assert not list(tmp_path.glob("runs/*/*/kubernetes.yaml"))


@pytest.mark.parametrize("missing", ["image", "claim"])
def test_a_value_without_default_is_asked_for(missing: str, tmp_path: Path) -> None:
    words = [word for word in WORDS if not word.startswith(f"launcher.{missing}=")]
    place = path_override("runs_dir", tmp_path / "runs")
    done = python_here(ROOT / "train.py", *words, place, cwd=tmp_path)
    assert done.returncode == 1
    assert f"launcher.{missing} has no value: add launcher.{missing}=" in done.stderr
    assert not list(tmp_path.iterdir())
