"""The pipeline: rings of preallocated batches, the workers between them, and the feed a trainer reads."""
