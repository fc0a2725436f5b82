"""Versions of the weights, from the learner's process to others."""
