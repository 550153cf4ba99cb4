"""Steps on the host, as on a CPU: torch's operations, whose results are there at once."""
