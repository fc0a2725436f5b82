"""Networks as pure functions over nested dicts."""
