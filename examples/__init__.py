"""Programs that show tierstore at work: `train_gpt` to copy from, `demo` to watch."""
