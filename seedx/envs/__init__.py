"""Environments, their adapters and the actor loop."""
