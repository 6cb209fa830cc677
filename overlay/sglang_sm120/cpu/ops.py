"""PyTorch versions of the `sgl_kernel` functions that the CPU engine calls, under upstream's names and signatures."""
