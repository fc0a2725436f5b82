"""One file for each agent: network, act and loss."""
