"""`bandpo study`: clip rules × seeds × settings, each run a `bandpo train`, and a report that states its terms."""
