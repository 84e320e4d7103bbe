"""The scheduler process: carries messages between tokenizers, executors and the scheduler of engine_core."""
