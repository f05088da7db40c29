"""Learning from scores of served answers: kept, trained on, compared with what is served, promoted or dropped."""
