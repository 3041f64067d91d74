"""Refuse answers that would bake a broken project, before a file is written.

Cookiecutter renders this file with Jinja and runs it with its own interpreter, so it needs
only the standard library. A refusal is one line on stderr: where, what, a name that would work.
"""

import json
import keyword
import re
import sys

if sys.version_info < (3, 11):
    sys.exit("Python 3.11 or newer is needed; cookiecutter runs on " + sys.version.split()[0])

MAX_LENGTH = 50

# What the project may install, by distribution and by import name: neither may be hidden.
DEPENDENCIES = frozenset(
    """
    antlr4 build cookiecutter cruft dvc dvc_azure dvc_gs dvc_s3 dvc_ssh dvclive filelock gradio gto
    hydra hydra_core hypothesis jinja2 kornia lightning lightning_fabric lightning_utilities
    litdata matplotlib mlflow mosec mypy numpy omegaconf onnx onnxruntime onnxscript openvino
    optuna pandas pil pillow pip prometheus_client psutil pytest pytorch_lightning pyyaml ray
    requests rich ruff scikit_learn scipy scmrepo setuptools sklearn submitit tensorboard tokenizers
    torch torch_tb_profiler torchao torchaudio torchmetrics torchvision tqdm uv wandb wheel yaml
    """.split()
)
# Root scripts and folders of the project: a package of that name would shadow them or be shadowed.
PROJECT_PATHS = frozenset(
    """
    aggregate artifacts baseline benchmark cluster configs data docs evaluate export gate
    monitoring predict prepare resolve resolved runs serve tests train tune
    """.split()
)
# `test` is the standard library's own test suite, which sys.stdlib_module_names leaves out;
# `type` is a soft keyword from Python 3.12 on.
STDLIB = sys.stdlib_module_names | {"test"}
SOFT_KEYWORDS = {*keyword.softkwlist, "type"}

# Line breaks and what YAML or TOML cannot hold even when it is quoted.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")
# Jinja's opening delimiters: `cruft update` would render them as code.
JINJA = re.compile("[{][%#{]")
SLUG = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
# Loose on purpose, yet within what setuptools parses: an empty one makes it crash.
ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`|~-]+"
EMAIL = re.compile(rf"{ATOM}(\.{ATOM})*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")


def slug_problem(slug: str) -> str:
    """Say why this cannot name a folder and a distribution; empty where it can."""
    if not SLUG.fullmatch(slug):
        return "must be letters, digits, '.', '_' and '-', with a letter or digit at both ends"
    if len(slug) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    if re.sub(r"[._-]+", "_", slug).lower() in DEPENDENCIES:
        return "is the name of a package that the project installs"
    return ""


def package_problem(name: str) -> str:
    """Say why this cannot name the project's Python package; empty where it can."""
    if keyword.iskeyword(name) or name in SOFT_KEYWORDS:
        return "is a Python keyword"
    if not (name.isascii() and name.isidentifier()):
        return "must be letters, digits and '_', and start with no digit"
    if len(name) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    # Case is ignored: some file systems do, too.
    if name.lower() in STDLIB:
        return "is a module of the standard library"
    if name.lower() in DEPENDENCIES:
        return "is a package that the project imports or installs"
    if name.lower() in PROJECT_PATHS:
        return "is a script or folder of the project"
    return ""


def suggestion(name: str) -> str:
    """Return a package name close to `name` that works."""
    clean = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[: MAX_LENGTH - 3].strip("_")
    candidates = (clean, f"my_{clean}", "my_project")
    return next(c for c in candidates if not package_problem(c) and not slug_problem(c))


def problem(answers: dict[str, str]) -> str:
    """Return the first thing wrong with the answers, as one line; empty where all is well."""
    for field in ("project_name", "description", "author_name", "author_email"):
        value = answers[field]
        if UNPRINTABLE.search(value):
            return f"{field}: {value!a} holds a line break or control character; remove it"
        if JINJA.search(value):
            return f"{field}: {value!a} holds an opening delimiter of Jinja; put a space in it"
    if not answers["project_name"].strip():
        return "project_name: is blank; 'My Project' would work"
    if not answers["author_name"].strip():
        return "author_name: is blank; 'Your Name' would work, the licence names it"
    slug, package = answers["project_slug"], answers["package_name"]
    if reason := slug_problem(slug):
        return f"project_slug: {slug!a} {reason}; {suggestion(slug).replace('_', '-')!r} would work"
    if reason := package_problem(package):
        return f"package_name: {package!a} {reason}; {suggestion(package)!r} would work"
    email, owner = answers["author_email"], answers["repository_owner"]
    if not EMAIL.fullmatch(email):
        return f"author_email: {email!a} is no address; 'you@example.com' would work"
    if not OWNER.fullmatch(owner):
        return f"repository_owner: {owner!a} cannot stand in a URL; 'your-name' would work"
    return ""


if __name__ == "__main__":
    # tojson writes ASCII without an apostrophe, and never three double quotes in a row.
    if reason := problem(json.loads(r"""{{ cookiecutter | tojson }}""")):
        sys.exit(reason)
