"""For tests: the conformance suite for tiers, faulty stores, and Megatron without a GPU."""
