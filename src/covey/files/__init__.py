"""Files and names that a user gives: read within bounds, and distinguished from names on the hub."""
