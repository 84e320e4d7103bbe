"""What the executors of one replica share: process groups, all-reduce, and memory that several GPUs reach."""
