"""Settings turned into the objects of a run: the model, its feeds, and the training of its stages."""
