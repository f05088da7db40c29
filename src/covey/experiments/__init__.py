"""Several runs: seeds, variations side by side on one base, and searches over options; a folder of runs that the same command continues."""
