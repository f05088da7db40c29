"""What is wrong with a data set of prompts, row by row; and a copy of it without that."""
