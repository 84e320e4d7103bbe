"""The executors of one replica: process groups, all-reduce, and GPU memory shared between processes."""
