"""The project in a git repository of its own, for tests of what `dvc repro` does."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
RESOLVED = ("prepare", "train", "evaluate", "gate")
STAGES = {"resolve", *RESOLVED}
METRICS = {f"artifacts/{stage}/metrics.json" for stage in ("train", "evaluate")}
WRITTEN = {f"resolved/{stage}.{kind}" for stage in RESOLVED for kind in ("yaml", "sha256")}
REPORT = {f"artifacts/gate/report.{kind}" for kind in ("json", "md")}
WRITTEN |= {"dvc.lock", *METRICS, *REPORT}
TRAIN = "trainer=cpu model=mlp trainer.max_epochs=2 +callbacks.trouble._target_=trouble.Trouble"
# What that learns may pass.
GATE = "metrics.test.acc.min=0 metrics.test.f1.min=0 classes.recall.min=0 classes.f1.min=0"
Env = dict[str, str]
Done = subprocess.CompletedProcess[str]


class Pipeline:
    """The project in a git repository elsewhere."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def call(self, *words: str, cwd: Path | None = None, env: Env | None = None) -> Done:
        """Run a command; `python` is the one that runs the tests."""
        foreign = ("GIT_", "MAKE")  # of whatever has started the tests
        kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
        own = {"PATH": path, "PYTHONPATH": str(ROOT / "tests"), "DVC_NO_ANALYTICS": "1"}
        return subprocess.run(
            words,
            cwd=cwd or self.root,
            env={**kept, **own, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            start_new_session=True,  # a signal to its group is none to the tests
        )

    def dvc(self, *words: str) -> str:
        """Run DVC, which must succeed, and return what it printed."""
        done = self.call("python", "-m", "dvc", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def commit(self) -> None:
        """Commit all that git does not ignore, without the settings of this machine's user."""
        who = ("-c", "user.name=Tests", "-c", "user.email=tests@example.com")
        assert self.call("git", "add", "--all").returncode == 0
        options = ("--quiet", "--no-verify", "--no-gpg-sign", "--message", "As it is")
        done = self.call("git", *who, "commit", *options)
        assert done.returncode == 0, done.stdout + done.stderr

    def changed(self) -> set[str]:
        """Files that differ from the last commit."""
        done = self.call("git", "status", "--porcelain", "--untracked-files=all")
        return {line[3:] for line in done.stdout.splitlines()}

    def repro(self, *words: str) -> set[str]:
        """Reproduce and return the stages that ran."""
        return set(re.findall(r"Running stage '(\w+)'", self.dvc("repro", *words)))

    def set_params(self, stage: str, more: str) -> None:
        """Add overrides to a stage's line in params.yaml."""
        file = self.root / "params.yaml"
        params = yaml.safe_load(file.read_text(encoding="utf-8"))
        params[stage] += f" {more}"
        file.write_text(yaml.safe_dump(params, sort_keys=False, width=1000), encoding="utf-8")

    def add_line(self, path: str, line: str) -> None:
        """Change a file."""
        with (self.root / path).open("a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")

    def runs(self) -> list[Path]:
        """Run folders, oldest first."""
        return sorted(path.parent for path in self.root.glob("runs/*/*/run.json"))

    def copied_to(self, root: Path) -> "Pipeline":
        """The same, with its cache, elsewhere."""
        shutil.copytree(self.root, root, symlinks=True)
        return Pipeline(root)
