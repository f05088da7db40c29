"""Two ways to train, several seeds each: what differs, the learning curves, and which is better."""
