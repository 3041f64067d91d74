"""A checkpoint → figures, tables and predictions."""
