"""A config → a finished run."""
