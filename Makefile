# Every target makes what it needs: Python 3.11 or newer, git and make are enough.
PYTHON ?= python3
TASK ?= image
WORKERS ?= auto
BIN := .venv/bin
PROJECT := {{cookiecutter.project_slug}}

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-use lint clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 12

install: .venv/.installed ## Make .venv: the template's tools and all that a baked project needs

# The project's file still holds Jinja, yet inside strings, so it reads as TOML. Torch goes first
# and alone: whatever asks for it later takes the build that is there.
define REQUIREMENTS
import tomllib
from pathlib import Path
tool, project = (tomllib.loads(Path(p, "pyproject.toml").read_text("utf-8")) for p in (".", "$(PROJECT)"))
print(*tool["dependency-groups"]["dev"], *project["project"]["dependencies"], sep="\n")
print(*project["project"]["optional-dependencies"]["dev"], sep="\n")
endef
export REQUIREMENTS

.venv/.installed: pyproject.toml $(PROJECT)/pyproject.toml $(PROJECT)/constraints.txt
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.x")'
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -c "$$REQUIREMENTS" > .venv/requirements.txt
	$(BIN)/python -m pip install --quiet --constraint "$(PROJECT)/constraints.txt" torch
	$(BIN)/python -m pip install --quiet --constraint "$(PROJECT)/constraints.txt" --requirement .venv/requirements.txt
	touch $@

demo: install ## Bake build/demo and run its whole pipeline on the CPU (TASK=image)
	rm -rf build/demo
	$(BIN)/python -m cookiecutter . --no-input --output-dir build project_name=demo package_name=demo task=$(TASK)
	$(MAKE) -C build/demo --assume-old="$(CURDIR)/.venv/.installed" repro VENV="$(CURDIR)/.venv"
	@printf '\nBaked: build/demo\nModel, metrics and plots: build/demo/artifacts\nCurves: make -C build/demo board VENV="%s"\n' "$(CURDIR)/.venv"

test: test-fast test-use ## Run every test

test-fast: install ## Run the tests that bake and read projects
	$(BIN)/python -m pytest -q -n $(WORKERS) tests/fast

test-use: install ## Run the tests that use a baked project
	$(BIN)/python -m pytest -q tests/use

lint: install ## Check style and types of the template
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## Remove all that these targets made
	rm -rf .venv build .hypothesis .mypy_cache .pytest_cache .ruff_cache
