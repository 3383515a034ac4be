"""From a folder of recordings to batches: corpus, packed cache, order and gather."""
