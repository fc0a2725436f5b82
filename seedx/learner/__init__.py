"""Losses, batching and the learner loop."""
