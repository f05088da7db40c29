"""Files and names that a user gives: read within bounds, and told from names on the hub."""
