"""Steps on the host, as on a CPU: torch's operations, whose results are there at once.

`worker` runs a step over its `rows` as one `batch`: drafts are `proposals`, of a drafter by its
`network`; `sampler` chooses tokens; `attention` reads the caches.
"""
