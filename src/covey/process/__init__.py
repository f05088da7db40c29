"""This process among others: ranks, heartbeats between them, memory, the terminal."""
