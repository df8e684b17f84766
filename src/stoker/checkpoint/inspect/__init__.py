"""What is this checkpoint, and what is wrong with it? Answered from headers and small samples; no torch."""
