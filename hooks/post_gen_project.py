"""Drop what was not chosen, make the first commit where git can, say what to type next.

Cookiecutter renders this file with Jinja and runs it inside the new project. It never asks,
never touches the network, and nothing that git does or lacks makes it fail.
"""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

# Which choice owns which paths: what no chosen option owns is deleted. A chosen path that ends
# in `-<option>` loses that ending: LICENSE-MIT becomes LICENSE.
PATHS: dict[str, dict[str, list[str]]] = {
    "license": {
        "MIT": ["LICENSE-MIT"],
        "Apache-2.0": ["LICENSE-Apache-2.0"],
        "BSD-3-Clause": ["LICENSE-BSD-3-Clause"],
        "proprietary": ["LICENSE-proprietary"],
    },
    "tracker": {
        "none": [],
        "wandb": ["configs/logger/wandb.yaml"],
        "mlflow": ["configs/logger/mlflow.yaml"],
    },
    "dvc_remote": {
        "local": [".dvc/config-local"],
        "s3": [".dvc/config-s3"],
        "gs": [".dvc/config-gs"],
        "azure": [".dvc/config-azure"],
        "ssh": [".dvc/config-ssh"],
    },
    "ci": {"github": [".github"], "gitlab": [".gitlab-ci.yml"], "none": []},
    "cluster": {
        "slurm": [
            "cluster/slurm.sh",
            "configs/launcher/slurm.yaml",
            "{{cookiecutter.package_name}}/training/slurm.py",
            "tests/test_slurm.py",
        ],
        "kubernetes": [
            "cluster/kubernetes.yaml",
            "configs/launcher/kubernetes.yaml",
            "{{cookiecutter.package_name}}/training/kubernetes.py",
            "tests/test_kubernetes.py",
        ],
        "ray": [
            "configs/launcher/ray.yaml",
            "{{cookiecutter.package_name}}/training/ray.py",
            "tests/test_ray.py",
        ],
        "all": [],  # owns what the others own
        "none": [],
    },
    # Cumulative: an option owns its own paths and those of the options before it.
    "scope": {"train": [], "ship": [], "serve": []},
}
CUMULATIVE = {"scope"}

# Nothing of the user's may sign, ask, run or hide a file in the first commit.
GIT = (
    "git -c commit.gpgsign=false -c user.useConfigOnly=true"
    f" -c core.hooksPath={os.devnull} -c core.excludesFile={os.devnull}"
).split()
# Set while git runs a hook or alias: they would point us at somebody else's repository.
FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
GIT_ENV = {k: v for k, v in os.environ.items() if k not in FOREIGN} | {"GIT_TERMINAL_PROMPT": "0"}


def select(answers: dict[str, str]) -> None:
    """Delete what no chosen option owns, and give chosen variants their final name."""
    for question, options in PATHS.items():
        chosen = answers[question]
        kept = list(options)[: list(options).index(chosen) + 1]
        for option, paths in options.items():
            keep = option in kept if question in CUMULATIVE else chosen in (option, "all")
            for path in map(Path, paths):
                if keep:
                    path.rename(path.with_name(path.name.removesuffix(f"-{option}")))
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
                if not any(path.parent.iterdir()):
                    path.parent.rmdir()


def git(*args: str) -> str | None:
    """Run git and return what it printed; None where it failed."""
    try:
        done = subprocess.run(
            [*GIT, *args],
            env=GIT_ENV,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def first_commit() -> str:
    """Make a repository with one commit; return a hint where that could not be done."""
    if git("--version") is None:
        return "git was not found: after `git init` and a first commit, DVC can track experiments."
    # A folder that the repository around it ignores (build/demo) still gets one of its own.
    if git("rev-parse", "--is-inside-work-tree") == "true" and git("check-ignore", ".") is None:
        return "Inside an existing git repository: nothing was committed, `git add .` when ready."
    # `git init -b` needs git 2.28; the branch of an empty repository can be set afterwards.
    steps = (
        ("init",),
        ("symbolic-ref", "HEAD", "refs/heads/main"),
        ("add", "--all"),
        ("commit", "--no-verify", "--message", "Bake the project from lightning-foundry"),
    )
    if any(git(*step) is None for step in steps):
        return (
            "git made no first commit: set user.name and user.email, then"
            " `git add . && git commit -m 'First commit'`."
        )
    return ""


if __name__ == "__main__":
    # tojson writes ASCII without an apostrophe, and never three double quotes in a row.
    answers = json.loads(r"""{{ cookiecutter | tojson }}""")
    select(answers)
    # Cruft (which adds `_commit`) writes its own file after this, and on an update compares two
    # fresh bakes file by file: a repository inside them would break that.
    by_cruft = "_commit" in answers
    hint = "Start with `git init` and a first commit." if by_cruft else first_commit()
    if hint:
        print(f"\n{hint}")
    # PWD is where the user stands: cookiecutter changes directories without touching it.
    folder = os.path.relpath(Path.cwd(), os.environ.get("PWD", os.pardir))
    print(f"\nNext:\n  cd {shlex.quote(folder)}\n  make train")
