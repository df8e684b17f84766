"""Looking into checkpoints and making the fast one: `inspect` and `build`."""
