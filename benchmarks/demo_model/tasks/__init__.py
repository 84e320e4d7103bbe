"""One module per family of exercises. A task is a function of a random stream that gives one exercise."""
