"""Device kernels, each beside a plain-torch reference. Knows tensors, not requests or batches."""
