"""Memory of a run, from the recipe alone: parameters, trainer, activations, engine, and the GPU they must fit."""
