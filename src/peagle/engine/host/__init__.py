"""Steps on the host, as on a CPU: torch's operations, whose results are there at once.

`worker` runs a step over its `rows`: `proposal` (what is drafted), `cycle` (verified and accepted),
`sampler` (which tokens), `attention`.
"""
