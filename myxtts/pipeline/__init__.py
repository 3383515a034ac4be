"""The pipeline: rings of preallocated batches, the stages between them, and the feed a trainer reads."""
