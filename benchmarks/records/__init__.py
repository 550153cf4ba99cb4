"""What was measured: results in one schema, their index, and the tables that pages show of them.

`result` is the schema, `store` the folder of results with its index, `bench` the way from and to
what `peagle bench` keeps, `cells` the figures of a table's cell, `pages` the tables between a
page's markers.
"""
