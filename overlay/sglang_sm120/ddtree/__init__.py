"""DDTree speculative decoding: draft trees from a block-diffusion drafter, verified in one target pass."""

ALGORITHM_NAME = "DDTREE"
