"""The project's package: `data`, `models`, `training`, `evaluation`."""
