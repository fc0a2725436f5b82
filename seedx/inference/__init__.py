"""The wire, the batcher, the policy server and its client."""
