"""Learning from scores of served answers: store, training of a candidate, comparison with the served version, promotion."""
