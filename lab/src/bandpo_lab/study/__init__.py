"""`bandpo-lab study`: clip rules × seeds × settings, each run a `bandpo-lab train`, and a page with the terms."""
