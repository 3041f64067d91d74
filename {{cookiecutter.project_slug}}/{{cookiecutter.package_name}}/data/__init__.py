"""Raw files → arrays on disk → batches."""
