"""From recordings to a corpus: clips with their texts, what was set aside and why, and people's edits."""
